# lib.sh: for scripts that run in the test bed. Bed::sh sources it; by hand: . /src/tests/testbed/lib.sh
# shellcheck shell=bash

# mkimage: makes the image localhost/busybox. Each run of the bed starts without images.
mkimage() { podman import -q /usr/local/share/testbed/busybox.tar localhost/busybox > /dev/null; }

# bundle DIR COMMAND...: an OCI bundle of busybox that runs COMMAND, without a terminal.
bundle() {
    local dir=$1 && shift
    mkdir -p "$dir/rootfs"
    tar -C "$dir/rootfs" -xf /usr/local/share/testbed/busybox.tar
    runc spec --bundle "$dir"
    jq '.process.terminal = false | .root.readonly = false | .process.args = $ARGS.positional' \
        "$dir/config.json" --args "$@" > "$dir/config.json.new"
    mv "$dir/config.json.new" "$dir/config.json"
}

# pod ARG...: podman with $RUNTIME as its runtime, by default cryopod's. A checkpoint has a second try where the freezer
# of cgroup v1 left a process frozen, as happens once in some thousand: cryopod leaves a container without a GPU to runc,
# which does not try again.
pod() {
    local podman=(podman --runtime "${RUNTIME:-cryopod-runtime}") said=/tmp/checkpoint.said.$BASHPID # two may be under way
    if [ "${1:-} ${2:-}" != "container checkpoint" ]; then
        "${podman[@]}" "$@"
    elif ! "${podman[@]}" "$@" 2> "$said"; then
        if grep -q -e 'Unseizable non-zombie .* state D' -e 'Timeout reached. Try to interrupt' "$said"; then "${podman[@]}" "$@"; else cat "$said" >&2 && return 1; fi
    else cat "$said" >&2; fi
}

# in_program ID NAME: the container's init process has become the program NAME. `run -d` and `start` of a low-level runtime
# return while it is still the runtime itself, with files of the host.
in_program() { grep -qx "$2" "/proc/$(cryopod-runtime state "$1" | jq .pid)/comm"; }

# low_level NAME: the runtime that cryopod-runtime is to put underneath.
low_level() { mkdir -p /etc/cryopod && printf '[runtime]\nlow_level = "%s"\n' "$1" > /etc/cryopod/config.toml; }

# "${counter[@]}": a container's command that prints 0, 1, 2, ... ten times a second.
# shellcheck disable=SC2034,SC2016
counter=(sh -c 'i=0; while :; do echo $i; i=$((i + 1)); sleep 0.1; done')

# printed NAME: what podman's container NAME has printed. `podman logs` takes ten times as long, and most waits look at it.
printed() {
    local all=/var/lib/containers/storage/overlay-containers id
    id=$(jq -r --arg name "$1" '.[] | select(.names[0] == $name) .id' $all/containers.json)
    cut -d ' ' -f 4- "$all/$id/userdata/ctr.log" # TIME STREAM F TEXT
}

# count NAME: the last number that the counter in container NAME has printed.
count() { printed "$1" | tail -n 1; }

# counted NAME N: the counter in container NAME has printed a number of at least N.
counted() { local n && n=$(count "$1") && [ "${n:--1}" -ge "$2" ]; }

# wait_for COMMAND...: until COMMAND succeeds; an error when it has not in five minutes. What succeeds sooner costs
# no more, so that the slowest machine sets the limit.
wait_for() {
    within 300 "$@" || {
        echo "wait_for: in vain: $*" >&2
        on_failure || true
        return 1
    }
}

# within SECONDS COMMAND...: the same with another limit, for what need not succeed.
within() {
    local end=$((SECONDS + $1)) pause=05 && shift
    until "$@"; do
        if [ "$SECONDS" -gt "$end" ]; then return 1; fi
        sleep "0.$pause"
        # Each look may cost more than what is waited for.
        case $pause in 05) pause=10 ;; 10) pause=20 ;; *) pause=40 ;; esac
    done
}

# check NAME COMMAND...: ends the script if COMMAND fails, after what on_failure, which scripts define, has to show.
check() {
    local name=$1 && shift
    if "$@"; then
        echo "ok: $name"
    else
        echo "FAILED: $name"
        on_failure || true
        exit 1
    fi
}
on_failure() { :; }

# criu_from X.Y: is the bed's CRIU of this version or a newer one?
criu_from() { printf '%s\n' "$1" "$(criu --version | sed -n 's/^Version: //p')" | sort --check=quiet --version-sort; }

# Podman shows only the first line with `not permitted`, and this CRIU writes one first where it may not raise its limits.
hidden="rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted"

# says FILE PATTERN: the file has a line that matches the extended regular expression.
says() { grep -Eq -- "$2" "$1" || { echo "$1 has no $2:" && cat "$1" && return 1; }; }

# damage FILE OFFSET: another byte than the one that is there.
damage() {
    local byte
    byte=$(od -An -tu1 -j "$2" -N 1 "$1")
    # shellcheck disable=SC2059
    printf "\\x$(printf %02x $((byte ^ 255)))" | dd of="$1" bs=1 seek="$2" conv=notrunc status=none
}

# fake_gpu_nodes: device nodes named and numbered like those of an NVIDIA and an AMD GPU. No driver is
# behind them: to open one fails.
fake_gpu_nodes() {
    mkdir -p /dev/dri
    mknod -m 666 /dev/nvidia0 c 195 0
    mknod -m 666 /dev/nvidiactl c 195 255
    mknod -m 666 /dev/nvidia-uvm c 511 0
    mknod -m 666 /dev/kfd c 510 0
    mknod -m 666 /dev/dri/renderD128 c 226 128
}

# simulate LOW [OPTION-OF-THE-SERVER...]: the simulated driver with two GPUs, and cryopod-runtime over LOW.
sim=/run/cusim/server.sock
simulate() {
    low_level "$1" && shift
    printf '[nvidia]\nlibcuda = ["/opt/cusim/libcuda.so.1"]\n' >> /etc/cryopod/config.toml
    mkdir -p /run/cusim
    /opt/build/cusim-ctl --socket "$sim" install /opt/cusim > /dev/null
    /opt/build/cusim-server --socket "$sim" --dev-root /dev --gpus 2 --memory-mib 4096 "$@" > /tmp/server.log 2>&1 &
    wait_for serves
}
serves() { /opt/build/cusim-ctl --socket "$sim" status > /dev/null 2>&1; } # a socket's file is there before anybody listens
