#!/bin/bash
# demo.sh: checkpoints a counter in a container into a file, removes the container, restores it from the file, and starts
# three copies from the file. Does so with crun and with runc below cryopod-runtime, and then with a container that has two
# GPUs of the simulated driver (`make gpu-test` is for real ones). Fails if one does not continue where it was.
# Run it with `make demo`, because it needs the test bed.
set -euo pipefail
# shellcheck source=tests/testbed/lib.sh
. "$(dirname "$0")/../tests/testbed/lib.sh"
# shellcheck source=tests/tests/scripts/archive/lib.sh
. "$(dirname "$0")/../tests/tests/scripts/archive/lib.sh"
[ -n "${TESTBED_CGROUP:-}" ] || { echo "demo.sh: run it with: make demo" >&2 && exit 1; }

bold='' dim='' plain=''
if [ -t 1 ]; then bold=$'\e[1m' dim=$'\e[2m' plain=$'\e[0m'; fi

say() { printf '%s\n' "$@"; }

# step COMMAND...: prints the command, runs it, prints how long it took, and leaves that in `took`.
step() {
    local word line='' start end
    for word; do
        if [[ $word == *[!A-Za-z0-9_./:=-]* ]]; then word=${word@Q}; fi
        line+=" $word"
    done
    say "${bold}\$${line}${plain}"
    start=$EPOCHREALTIME
    "$@" > /tmp/demo.out 2>&1 || { cat /tmp/demo.out && exit 1; }
    end=$EPOCHREALTIME
    took=$(((${end/./} - ${start/./}) / 1000))
    sed "s/^/  ${dim}/; s/\$/${plain}/" /tmp/demo.out
    say "  ${dim}${took} ms${plain}"
}

numbers() { podman logs counter | tail -n "+$1" | tr '\n' ' '; }

copies() { # ARCHIVE LAST: three containers that begin where the checkpoint ended
    local i first
    for i in 1 2 3; do
        step podman --runtime cryopod-runtime run --detach --name "copy$i" --annotation "dev.cryopod.restore=$1" localhost/busybox true
    done
    for i in 1 2 3; do
        wait_for counted "copy$i" $(($2 + 5))
        first=$(podman logs "copy$i" | sed -n 1p)
        say "  copy$i began with ${bold}$first${plain}"
        if [ "$first" != $(($2 + 1)) ]; then say "  that is not the number after $2" >&2 && exit 1; fi
    done
    podman --runtime cryopod-runtime rm --force --time 0 copy1 copy2 copy3 > /dev/null
}

gpu_demo() { # a CUDA program that sums up its GPU memory again and again: step, sum, and whether the sum is right
    local gpus=(--network none "${nodes[@]/#/--device=}" "${binds[@]/#/--volume=}" --env LD_LIBRARY_PATH=/cusim)
    local archive=$checkpoints/job.tar.zst i steps
    say "" "${bold}== a container with two GPUs (simulated driver) ==${plain}"
    simulate crun
    printf '[restore]\nallow = ["%s"]\n' "$checkpoints" >> /etc/cryopod/config.toml
    step podman --runtime cryopod-runtime run --detach --name job "${gpus[@]}" localhost/busybox /cusim/cusim-client
    wait_for ticked job 5
    step podman --runtime cryopod-runtime container checkpoint --export "$archive" job
    steps=$(ticks job)
    step podman --runtime cryopod-runtime rm job
    for i in 1 2 3; do
        step podman --runtime cryopod-runtime run --detach --name "copy$i" --annotation "dev.cryopod.restore=$archive" "${gpus[@]}" localhost/busybox true
    done
    for i in 1 2 3; do
        goes_on "copy$i"
        say "  after step $steps copy$i went on with ${bold}$(logs "copy$i" | head -n 1)${plain}"
        logs "copy$i" | head -n 1 | grep -Eq '^[1-9].* ok' || { say "  that is not the step after it" >&2 && exit 1; }
    done
    podman --runtime cryopod-runtime rm --force --time 0 copy1 copy2 copy3 > /dev/null
}

demo() {
    local runtime=$1 archive=$checkpoints/counter-$1.tar.zst last size checkpoint
    say "" "${bold}== $runtime below cryopod-runtime ==${plain}"
    low_level "$runtime"
    printf '[restore]\nallow = ["%s"]\n' "$checkpoints" >> /etc/cryopod/config.toml
    step podman --runtime cryopod-runtime run --detach --name counter localhost/busybox "${counter[@]}"
    wait_for counted counter 20

    step podman --runtime cryopod-runtime container checkpoint --export "$archive" counter
    checkpoint=$took
    last=$(count counter)
    size=$(stat -c %s "$archive")
    say "  the counter had reached ${bold}$last${plain}; the archive has $((size / 1024)) KiB"

    step podman --runtime cryopod-runtime rm counter
    step podman --runtime cryopod-runtime container restore --import "$archive"
    wait_for counted counter $((last + 5))
    say "  after $last it went on with ${bold}$(numbers $((last + 2)))${plain}"
    if [ "$(podman logs counter | sed -n "$((last + 2))p")" != $((last + 1)) ]; then
        say "  that is not the number after $last: the counter did not go on where it was" >&2
        exit 1
    fi
    summary+=("$(printf '%-6s %10s ms %10s ms %10s KiB   %s -> %s' "$runtime" "$checkpoint" "$took" $((size / 1024)) "$last" $((last + 1)))")
    podman --runtime cryopod-runtime rm --force --time 0 counter > /dev/null
    copies "$archive" "$last"
}

summary=() checkpoints=/srv/checkpoints
mkdir -p "$checkpoints"
say "podman $(podman version -f '{{.Client.Version}}'), criu $(criu --version | sed -n 's/^Version: //p'), $(crun --version | head -n 1), $(runc --version | head -n 1), Debian $TESTBED_SUITE, cgroup $TESTBED_CGROUP"
mkimage
demo crun
demo runc
gpu_demo
say "" "       checkpoint       restore      archive   last number -> first number"
printf '%s\n' "${summary[@]}"
