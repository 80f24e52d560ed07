#!/bin/bash
# inside.sh: the cases. run.sh runs it with the packed root as /, the machine at /host, results at /out, logs at /logs.
# shellcheck disable=SC2154,SC2034 # variables shared with machine.sh and cases.sh
set -uo pipefail
# shellcheck source=/dev/null
. /opt/work/machine.sh
# shellcheck source=/dev/null
. /opt/work/cases.sh
# shellcheck source=/dev/null
. /opt/work/vram_files.sh
# shellcheck source=/dev/null
. /opt/work/sharing.sh
# shellcheck source=/dev/null
. /opt/work/copies.sh
# shellcheck source=/dev/null
. /opt/work/preload.sh
# shellcheck source=/dev/null
. /opt/work/parallel.sh
# shellcheck source=/dev/null
. /opt/work/engines.sh

failed=0 started=$SECONDS annotations=()
mkdir -p /etc/cryopod
: > /out/results.jsonl
unit=$([ -n "$sim" ] && echo MiB || echo GiB)
usr=$([ -n "$sim" ] && [ -z "$python" ] && echo /usr || echo /host/usr)

minor_of() { # N: the device minor of the N-th GPU in PCI order
    awk -F: '/Device Minor/ {gsub(/[ \t]/, "", $2); print $2}' /proc/driver/nvidia/gpus/*/information | sed -n "$(($1 + 1))p"
}

if [ -n "$sim" ]; then
    mount -t tmpfs tmpfs /proc/driver
    mkdir -p /run/cusim
    /opt/cusim/cusim-server --gpus 2 --dev-root /dev --proc-root /run/cusim-proc --socket /run/cusim/server.sock \
        --log /logs/cusim.log > /logs/cusim-server.out 2>&1 &
    wait_for test -S /run/cusim/server.sock
    /opt/cusim/cusim-ctl --socket /run/cusim/server.sock install /opt/cusim
    cp /opt/cusim/libcuda.so.1 /opt/cusim/cusim.conf /usr/lib/x86_64-linux-gnu/
    cp -r "$(find /run/cusim-proc -type d -name nvidia | sed -n 1p)" /proc/driver/
fi
gpus=$(find /proc/driver/nvidia/gpus -mindepth 1 -maxdepth 1 | wc -l)

# The containers' file system: empty directories on which the machine's are mounted.
tree=$(mktemp -d)
mkdir -p "$tree"/{usr,dev,etc,proc,root,run,sys,tmp,work,driver}
chmod 1777 "$tree/tmp"
for dir in bin sbin lib lib64; do ln -s "usr/$dir" "$tree/$dir"; done
printf 'root:x:0:0:root:/root:/bin/sh\n' > "$tree/etc/passwd"
# cryopod looks at the C library of the image, over which the machine's is mounted.
mkdir -p "$tree/usr/lib/x86_64-linux-gnu"
cp -L "$(find "$usr/lib/x86_64-linux-gnu" "$usr/lib64" -maxdepth 1 -name libc.so.6 2> /dev/null | head -n 1)" "$tree/usr/lib/x86_64-linux-gnu/"
tar -C "$tree" -cf /tmp/machine.tar . && podman import -q /tmp/machine.tar localhost/machine > /dev/null || exit 1
image=localhost/machine

# ---- cases ----------------------------------------------------------------------------------------

round_trip() { # RUNTIME SIZE LABEL: run, checkpoint --export, rm, restore --import
    local label=$3 archive=/var/lib/containers/job.tar before
    low_level "$1"
    gpu_args 1
    job_command "$2" 0
    start job "${gpu[@]}" "$image" "${job[@]}" || return
    sleep 1
    checkpoint job "$label" "$archive" || return
    before=$(lines job)
    pod rm -f -t 0 job > /dev/null || return
    restore job "$label" "$archive" || return
    verdict job "$label" "$before" || return
    result "$(jq -n --arg case "$label" --arg runtime "$1" --arg size "$2 $unit" --argjson save "$saved" \
        --argjson load "$restored" --argjson gap "$(gap "/logs/$label.out")" \
        '{case: $case, ok: true, runtime: $runtime, size: $size, checkpoint: $save, restore: $load, longest_pause_s: $gap}')"
}

leave_running() { # RUNTIME SIZE LABEL
    local label=$3 archive=/var/lib/containers/job.tar before
    low_level "$1"
    gpu_args 1
    job_command "$2" 0
    start job "${gpu[@]}" "$image" "${job[@]}" || return
    before=$(lines job)
    checkpoint job "$label" "$archive" --leave-running || return
    verdict job "$label" "$before" || return
    say "$label: the container went on; now the archive"
    before=$(lines job)
    pod rm -f -t 0 job > /dev/null || return
    restore job "$label-archive" "$archive" || return
    verdict job "$label-archive" 5 || return
    result "$(jq -n --arg case "$label" --arg runtime "$1" --arg size "$2 $unit" --argjson save "$saved" --argjson load "$restored" \
        --argjson gap "$(gap "/logs/$label.out")" \
        '{case: $case, ok: true, runtime: $runtime, size: $size, checkpoint: $save, restore: $load, longest_pause_s: $gap}')"
}

at_pause() { # RUNTIME SIZE LABEL: paused, checkpointed, resumed: it moves in between not at all; and comes back from that
    local label=$3 dir=/var/lib/containers/at-pause before after id static
    low_level "$1"
    gpu_args 1
    job_command "$2" 0
    start job --annotation dev.cryopod.checkpoint.at-pause=on "${gpu[@]}" "$image" "${job[@]}" || return
    id=$(podman inspect --format '{{.Id}}' job)
    pod pause job > /dev/null || return
    before=$(lines job)
    cryopod-runtime checkpoint --leave-running --image-path "$dir" --work-path /logs "$id" > "/logs/$label.said" 2>&1 ||
        { cat "/logs/$label.said" && return 1; }
    sleep 2
    after=$(lines job)
    [ "$before" = "$after" ] || { say "$label: it went on from $before to $after while it was paused" && return 1; }
    pod unpause job > /dev/null || return
    verdict job "$label" "$before" || return
    say "$label: it stood still at $before, and went on; now from the images"
    podman kill job > /dev/null && wait_for state_is job exited || return
    static=$(static_dir job)
    rm -rf "$static/checkpoint"
    ln -s "$dir" "$static/checkpoint"
    before=$(lines job)
    pod container restore --keep job > "/logs/$label.restore" 2>&1 || { cat "/logs/$label.restore" && keep_logs job "$label" && return 1; }
    verdict job "$label-restored" "$before" || return
    rm -f "$static/checkpoint"
    rm -rf "$dir"
    result "$(jq -n --arg case "$label" --arg runtime "$1" --arg size "$2 $unit" '{case: $case, ok: true, runtime: $runtime, size: $size}')"
}

twice() { # RUNTIME SIZE LABEL: a restored container is checkpointed and restored again
    local label=$3 archive=/var/lib/containers/job before i
    low_level "$1"
    gpu_args 1
    job_command "$2" 0
    start job "${gpu[@]}" "$image" "${job[@]}" || return
    for i in 1 2; do
        checkpoint job "$label.$i" "$archive$i.tar" || return
        before=$(lines job)
        pod rm -f -t 0 job > /dev/null || return
        restore job "$label.$i" "$archive$i.tar" || return
        verdict job "$label.$i" "$before" || return
    done
    result "$(jq -n --arg case "$label" --arg runtime "$1" --arg size "$2 $unit" --argjson save "$saved" \
        --argjson load "$restored" '{case: $case, ok: true, runtime: $runtime, size: $size, checkpoint: $save, restore: $load}')"
}

train_command() { # STEPS [any]: `any` where the GPU is not needed; fills `train` and `gpu`
    local dir
    gpu_args 1
    if [ -n "$sim" ] && [ "${2:-}" != any ]; then
        train=(/cusim/cusim-client --mib 64 --ticks "$1")
        return
    fi
    for dir in "${torch_mounts[@]}"; do gpu+=(-v "/host$dir:$dir:ro,bind"); done
    gpu+=(-e CUBLAS_WORKSPACE_CONFIG=:4096:8 -e PYTHONDONTWRITEBYTECODE=1 -e HOME=/tmp)
    train=("$python" /work/train.py "$1" "$layers")
}

losses() { awk '$3 == "ok" {print $1, $2}' "$1"; }

rate() { # FILE: steps a second after the first fifth of the run
    awk -v skip=$((steps / 5)) '$3 == "ok" {if ($1 == skip) t0 = $4; n = $1; t = $4} END {if (t > t0) printf "%.4f\n", (n - skip) / (t - t0); else print 0}' "$1"
}

uninterrupted() { # RUNTIME FILE: the whole training under the runtime
    timeout 300 podman --runtime "$1" run --rm --name train "${gpu[@]}" "$image" "${train[@]}" > "$2" 2>&1
}

torch() { # LABEL: bit-identical losses, and the rate with and without cryopod
    local label=$1 i rates='[]' runtime rt archive=/var/lib/containers/train.tar
    [ -n "$sim$python" ] || skip "$label" "no Python with torch on this machine"
    low_level crun
    train_command "$steps"
    i=0
    for runtime in crun cryopod-runtime cryopod-runtime crun; do
        i=$((i + 1))
        uninterrupted "$runtime" "/logs/train.$i.$runtime.out" || { tail -n 5 "/logs/train.$i.$runtime.out" && return 1; }
        rates=$(jq -c --arg r "$runtime" --argjson v "$(rate "/logs/train.$i.$runtime.out")" '. + [{runtime: $r, steps_per_s: $v}]' <<< "$rates")
        cmp <(losses /logs/train.1.crun.out) <(losses "/logs/train.$i.$runtime.out") || return
    done
    jq -n --arg case steady-state --argjson runs "$rates" '
        def mean(r): [$runs[] | select(.runtime == r) | .steps_per_s] | add / length;
        {case: $case, ok: true, runs: $runs, ratio: (mean("cryopod-runtime") / mean("crun"))}' > /tmp/steady.json
    result "$(cat /tmp/steady.json)"
    for rt in $runtimes; do
        say "$label: $rt"
        low_level "$rt"
        pod run -d --name train "${gpu[@]}" "$image" "${train[@]}" > /dev/null || return
        wait_for more_lines train $((steps / 3)) || { podman logs train | tail -n 5 && return 1; }
        checkpoint train "$label-$rt" "$archive" || return
        [ "$(lines train)" -lt "$steps" ] || { say "the training was over before the checkpoint" && return 1; }
        pod rm -f -t 0 train > /dev/null || return
        restore train "$label-$rt" "$archive" || return
        wait_for state_is train exited || return
        podman logs train > "/logs/$label-$rt.out" 2>&1
        cmp <(losses /logs/train.1.crun.out) <(losses "/logs/$label-$rt.out") ||
            { say "$label: the losses differ" && return 1; }
        result "$(jq -n --arg case "$label-$rt" --arg runtime "$rt" --argjson save "$saved" --argjson load "$restored" \
            --arg info "$(grep '^#' "/logs/$label-$rt.out" | tr '\n' ' ')" --argjson gap "$(gap "/logs/$label-$rt.out")" \
            --argjson n "$(losses "/logs/$label-$rt.out" | wc -l)" \
            '{case: $case, ok: true, runtime: $runtime, size: "torch", checkpoint: $save, restore: $load, losses_identical: $n, info: $info, longest_pause_s: $gap}')"
        pod rm -f -t 0 train > /dev/null
        rm -f "$archive"
    done
}

program() { # RUNTIME WHICH LABEL: loader, loader-early or serve, with a checkpoint in the middle, line by line as without one
    local rt=$1 which=$2 label=$3 archive=/var/lib/containers/program.tar family=tcp command want steps=$steps
    [ -n "$python" ] || skip "$label" "no Python with torch on this machine"
    low_level "$rt"
    train_command "$steps" any
    gpu+=(--shm-size 2g "${torch_env[@]}")
    # CRIU before 4.2 cannot dump TCP sockets on Linux 6.16 and newer.
    if criu --version | grep -qE 'Version: 4\.[01]'; then family=unix; fi
    case $which in
        loader*)
            steps=$((steps * 4)) # they are short ones
            command=("$python" /work/loader.py "$steps" "${which#loader}")
            ;;
        serve) command=("$python" /work/serve.py "$steps" "$family") ;;
    esac
    want=/logs/$which.whole.out
    if [ ! -e "$want" ]; then
        timeout 300 podman --runtime crun run --rm --name program "${gpu[@]}" "$image" "${command[@]}" > "$want" 2>&1 ||
            { tail -n 5 "$want" && rm "$want" && return 1; }
    fi
    pod run -d --name program "${gpu[@]}" "$image" "${command[@]}" > /dev/null || return
    wait_for more_lines program $((steps / 4)) || { podman logs program | tail -n 5 && return 1; }
    checkpoint program "$label" "$archive" || return
    [ "$(lines program)" -lt "$steps" ] || { say "it was over before the checkpoint" && return 1; }
    pod rm -f -t 0 program > /dev/null || return
    restore program "$label" "$archive" || return
    wait_for state_is program exited || return
    podman logs program > "/logs/$label.out" 2>&1
    if grep -q CORRUPT "/logs/$label.out"; then say "$label: another answer to the same seed" && return 1; fi
    cmp <(losses "$want") <(losses "/logs/$label.out") || { say "$label: the lines differ" && return 1; }
    result "$(jq -n --arg case "$label" --arg runtime "$rt" --argjson save "$saved" --argjson load "$restored" \
        --arg info "$(grep '^#' "/logs/$label.out" | tr '\n' ' ')" --argjson gap "$(gap "/logs/$label.out")" \
        --argjson n "$(losses "/logs/$label.out" | wc -l)" \
        '{case: $case, ok: true, runtime: $runtime, size: "torch", checkpoint: $save, restore: $load, lines_identical: $n, info: $info, longest_pause_s: $gap}')"
}

two() { # RUNTIME SIZE LABEL: one process on one GPU, then two on two
    local label=$3 archive=/var/lib/containers/job.tar before which one
    [ "$gpus" -ge 2 ] || skip "$label" "this machine has one GPU"
    low_level "$1"
    gpu_args 2
    for which in 0 0,1; do
        job_command "$2" "$which"
        start job "${gpu[@]}" "$image" "${job[@]}" || return
        checkpoint job "$label.$which" "$archive" || return
        before=$(lines job)
        pod rm -f -t 0 job > /dev/null || return
        restore job "$label.$which" "$archive" || return
        verdict job "$label.$which" "$before" || return
        pod rm -f -t 0 job > /dev/null || return
        rm -f "$archive"
        if [ "$which" = 0 ]; then one=$(jq -n --argjson s "$saved" --argjson l "$restored" '{checkpoint: $s, restore: $l}'); fi
    done
    result "$(jq -n --arg case "$label" --arg runtime "$1" --arg size "2 x $2 $unit" --argjson save "$saved" --argjson load "$restored" \
        --argjson one "$one" '{case: $case, ok: true, runtime: $runtime, size: $size, checkpoint: $save, restore: $load, one_process: $one}')"
}

memory_on() { # the GPUs that hold memory of the workload, by number
    if [ -n "$sim" ]; then
        /opt/cusim/cusim-ctl --socket /run/cusim/server.sock status | jq -r '[.gpus[] | select(.pids != {}) | .minor] | join(" ")'
    else # all of the driver's own is far below a GiB
        chroot /host "$smi" --query-gpu=index,memory.used --format=csv,noheader,nounits | awk -F, '$2 > 1024 {print $1}' | paste -s -d ' '
    fi
}

node_number() { stat -c %t:%T "/proc/$(podman inspect --format "{{.State.Pid}}" "$1")/root$2" 2> /dev/null; } # in hex; empty if it is not there

map() { # RUNTIME SIZE LABEL: a container that was given GPU 0 alone is restored on GPU 1
    local label=$3 archive=/var/lib/containers/job.tar before from to zero one sum
    [ "$gpus" -ge 2 ] || skip "$label" "this machine has one GPU"
    low_level "$1"
    gpu_args 1
    zero=/dev/nvidia$(minor_of 0) one=/dev/nvidia$(minor_of 1)
    job_command "$2" 0
    start job "${gpu[@]}" "$image" "${job[@]}" || return
    from=$(memory_on)
    checkpoint job "$label" "$archive" || return
    before=$(lines job)
    [ -z "$(node_number job "$one")" ] || { say "$label: the container has $one already" && return 1; }
    pod rm -f -t 0 job > /dev/null || return
    sum=$(sha256sum < "$archive")
    printf '[gpu]\nmap = "%s=%s"\n' "$zero" "$one" >> /etc/cryopod/config.toml
    restore job "$label" "$archive" || return
    verdict job "$label" "$before" || return
    to=$(memory_on)
    say "$label: memory was on GPU $from and is on GPU $to"
    [ "$from $to" = '0 1' ] || return
    # GPU 1 has its own name, and the cgroup no longer lets the container at GPU 0. The old name leads to GPU 1 too, until
    # the driver's library finds that GPU 0 of this host should have it: it removes such a node (docs/compatibility.md).
    [ "$(node_number job "$one")" = "$(stat -c %t:%T "$one")" ] || { say "$label: $one is $(node_number job "$one")" && return 1; }
    case $(node_number job "$zero") in
        "$(stat -c %t:%T "$one")") ;;
        '') [ -z "$sim" ] || { say "$label: $zero is gone" && return 1; } ;;
        *) say "$label: $zero is $(node_number job "$zero")" && return 1 ;;
    esac
    [ "$(sha256sum < "$archive")" = "$sum" ] || { say "$label: the archive has changed" && return 1; }
    if [ -z "$sim" ]; then denied job "$zero" || { say "$label: the container can still open $zero" && return 1; }; fi
    # From there: the checkpoint's own GPU is now GPU 1, and it stays.
    low_level "$1"
    checkpoint job "$label-again" "$archive" || return
    before=$(lines job)
    pod rm -f -t 0 job > /dev/null || return
    restore job "$label-again" "$archive" || return
    verdict job "$label-again" "$before" || return
    [ "$(memory_on)" = 1 ] || { say "$label: restored again, memory is on GPU $(memory_on)" && return 1; }
    result "$(jq -n --arg case "$label" --arg runtime "$1" --arg size "$2 $unit" --argjson save "$saved" --argjson load "$restored" \
        --arg from "$from" --arg to "$to" --argjson gap "$(gap "/logs/$label.out")" '{case: $case, ok: true, runtime: $runtime, size: $size,
            memory_from_gpu: $from, memory_to_gpu: $to, checkpoint: $save, restore: $load, longest_pause_s: $gap}')"
}

denied() { # NAME NODE: even a node made anew for the host's NODE does not open in the container
    local number said
    number=$(stat -c '%t %T' "$2")
    # shellcheck disable=SC2086
    set -- "$1" $number
    podman exec --privileged "$1" sh -c "rm -f /tmp/other && mknod /tmp/other c $((16#$2)) $((16#$3))" || return
    said=$(podman exec "$1" sh -c 'exec 3<> /tmp/other' 2>&1 || true)
    podman exec "$1" rm /tmp/other
    grep -q 'not permitted' <<< "$said"
}

archive() { # RUNTIME SIZE LABEL: cryopod export to an OCI archive, verified, and back; the VRAM files' shards on the way
    local label=$3 to=/var/lib/containers/job.oci out back verified from
    archived "$1" "$2" || return
    out_and_back "$label" || return
    result "$(jq -n --arg case "$label" --arg runtime "$1" --arg size "$2 $unit" --argjson out "$out" \
        --argjson back "$back" --argjson verify "$verified" --argjson bytes "$(du -s "$to" | awk '{print $1 * 1024}')" \
        '{case: $case, ok: true, runtime: $runtime, size: $size, checkpoint: {export_s: $out.seconds, steps: $out.steps, archive_bytes: $bytes},
          restore: {import_s: $back.seconds, steps: $back.steps}, verify_s: $verify}')"
    jq -c '{case, checkpoint, restore, verify_s}' <<< "$(tail -n 1 /out/results.jsonl)"
    rm -rf "$to"
}

archived() { # RUNTIME SIZE: the container that is exported
    low_level "$1"
    gpu_args 1
    job_command "$2" 0
    start job --annotation dev.cryopod.vram=on "${gpu[@]}" "$image" "${job[@]}" || return
    sleep 1
}

out_and_back() { # LABEL [OPTION...]: exports with these options to $to, removes, verifies, imports; sets out, verified and back
    local label=$1 before && shift
    out=$(timeout 300 cryopod export job -e podman -o "oci:$to" --quiet --timings "$@" | tail -n 1) || { keep_logs job "$label" && return 1; }
    keep_logs job "$label"
    before=$(lines job)
    pod rm -f -t 0 job > /dev/null || return
    from=$(now)
    cryopod verify --quiet "oci:$to" || return
    verified=$(since "$from")
    cryopod inspect "oci:$to" > "/logs/$label.inspect.txt" || return
    back=$(timeout 300 cryopod import "oci:$to" -e podman --restore --quiet --timings | tail -n 1) || return
    verdict job "$label" "$before"
}

sealed() { # RUNTIME SIZE LABEL: encrypted and plain in turns, twice each, of one container
    local label=$3 to=/var/lib/containers/job.oci out back verified from round kind all='[]' option
    # A key for this test alone, as the machine has no program that makes one.
    local recipient=age1jw22srkaw33trn4yjqxzdd0x8w3ekzgrnd4e4udqg6xkva3lhanqqangk3 key=AGE-SECRET-KEY-10E8C2KTQPSFKDM5W5N46CXZCGF4P8X0SWHE0G0Q7T936ZRHMQ0TS2LLCMD
    archived "$1" "$2" || return
    for round in 1 2; do
        for kind in plain sealed; do
            printf '[encrypt]\nidentities = ["/etc/cryopod/key"]\n' > /tmp/encrypt
            echo "$key" > /etc/cryopod/key
            low_level "$1"
            cat /tmp/encrypt >> /etc/cryopod/config.toml
            option=(--no-encrypt)
            [ "$kind" = plain ] || option=(--encrypt-to "$recipient")
            out_and_back "$label.$kind.$round" "${option[@]}" || return
            all=$(jq -c --arg kind "$kind" --argjson out "$out" --argjson back "$back" --argjson verify "$verified" \
                '. + [{kind: $kind, export_s: $out.seconds, import_s: $back.seconds, verify_s: $verify, export: $out.steps, import: $back.steps}]' <<< "$all")
            jq -c '.[-1]' <<< "$all"
            rm -f /etc/cryopod/key
            if [ "$kind" = sealed ] && cryopod inspect "oci:$to" > /dev/null 2>&1; then say "$label: read without the key" && return 1; fi
            rm -rf "$to"
        done
    done
    result "$(jq -n --arg case "$label" --arg runtime "$1" --arg size "$2 $unit" --argjson all "$all" '
        def least(kind; what): [$all[] | select(.kind == kind) | .[what]] | min;
        def times(what): least("sealed"; what) / least("plain"; what);
        {case: $case, ok: true, runtime: $runtime, size: $size, runs: $all,
         times: {export: times("export_s"), import: times("import_s"), verify: times("verify_s")}}')"
    jq -c '{case, times}' <<< "$(tail -n 1 /out/results.jsonl)"
}

archive_speed() { # LABEL: tests/bench/archive.sh on this machine, in memory
    [ -x /usr/local/bin/bench-pages ] || skip "$1" "bench-pages is not in the pack; build cryopod-tests in release"
    WORK=/var/lib/containers GIB=$archive_gib FILES=$archive_files ROUNDS=2 BENCH_PAGES=/usr/local/bin/bench-pages \
        timeout 900 bash /opt/work/archive.sh > /out/archive.txt 2> /logs/archive.err || { tail -n 5 /logs/archive.err && return 1; }
    cat /out/archive.txt
    result "$(jq -n --arg case "$1" '{case: $case, ok: true}')"
}

probe() { # LABEL: what the driver does in the corners, to compare with the simulated one
    local dir=/tmp/probe
    [ -x /opt/cusim/cusim-probe ] || skip "$1" "cusim-probe is not in the pack; build cryopod-simdriver in release"
    mkdir -p $dir && cp /opt/cusim/cusim-{probe,step} $dir/
    # Managed memory stays out of it: on some machines it can hang the GPU for others.
    # shellcheck disable=SC2016
    printf '#!/bin/bash\ncase "$*" in *--uvm*) echo "error: left out"; exec sleep 60 ;; esac\nexec /opt/cusim/cusim-client "$@"\n' > $dir/cusim-client
    chmod +x $dir/cusim-client
    (cd $dir && timeout 150 ./cusim-probe 2>&1) | grep -v '^managed' > /out/probe.txt || return
    result "$(jq -n --arg case "$1" --argjson n "$(wc -l < /out/probe.txt)" '{case: $case, ok: true, lines: $n}')"
}

# ---- all of it ------------------------------------------------------------------------------------

# A virtual machine gets its memory when it is first used: all cases are to find it there.
if [ "${touch_gib:-0}" -gt 0 ]; then
    touched=$EPOCHREALTIME
    touching=()
    for n in $(seq 16); do
        head -c "$((touch_gib * 64))M" /dev/zero > "/var/lib/containers/touched.$n" &
        touching+=($!)
    done
    wait "${touching[@]}"
    rm /var/lib/containers/touched.*
    say "$touch_gib GiB of memory touched in $(since "$touched") s"
fi
# podman then shows the cause of a failed restore, and not the first line of crun's log.
mkdir -p /etc/containers/containers.conf.d
echo -e '[engine]\nruntime_supports_json = ["crun", "runc", "cryopod-runtime"]' > /etc/containers/containers.conf.d/json.conf
grep . /sys/kernel/mm/transparent_hugepage/{enabled,shmem_enabled} > /logs/huge-pages.txt || true
cryopod check > /logs/cryopod-check.txt 2>&1 || true
for part in $parts; do
    case $part in
        probe) run_case probe probe ;;
        jobs) for size in $sizes; do for rt in $runtimes; do run_case "job-$size-$rt" round_trip "$rt" "$size"; done; done ;;
        leave-running) for rt in $runtimes; do run_case "leave-running-$rt" leave_running "$rt" 1; done ;;
        at-pause) for rt in $runtimes; do run_case "at-pause-$rt" at_pause "$rt" 1; done ;;
        cycles) run_case cycles cycles "${runtimes%% *}" 1 "$cycles" "$kills" ;;
        twice) for rt in $runtimes; do run_case "twice-$rt" twice "$rt" 1; done ;;
        torch) run_case torch torch ;;
        loader | loader-early | serve) for rt in $runtimes; do run_case "$part-$rt" program "$rt" "$part"; done ;;
        two) run_case two-gpus two "${runtimes%% *}" "$two_size" ;;
        vram) vram_files ;;
        against) if [ -d /opt/work/other ]; then against; fi ;;
        overlap) if [ -e /dev/userfaultfd ]; then overlap; fi ;;
        unreadable) for rt in $runtimes; do run_case "unreadable-$rt" unreadable "$rt" "$vram_size"; done ;;
        archive) run_case "archive-$vram_size" archive "${runtimes%% *}" "$vram_size"; run_case archive-speed archive_speed ;;
        sealed) run_case "sealed-$vram_size" sealed "${runtimes%% *}" "$vram_size" ;;
        archive-vram) run_case "archive-$vram_size" archive "${runtimes%% *}" "$vram_size" ;;
        vram-two) run_case vram-two two_vrams "${runtimes%% *}" "$two_size" ;;
        vram-apart) run_case vram-apart two_containers "${runtimes%% *}" "$two_size" ;;
        preload)
            annotations=(--annotation dev.cryopod.preload=on)
            preload_ways
            annotations=()
            ;;
        preload-calls) run_case preload-calls preload_calls "${runtimes%% *}" ;;
        preload-torch)
            annotations=(--annotation dev.cryopod.preload=on)
            run_case preload-torch torch
            annotations=()
            ;;
        preload-running)
            annotations=(--annotation dev.cryopod.preload=on)
            run_case preload-running left_running "${runtimes%% *}"
            annotations=()
            ;;
        preload-pause)
            annotations=(--annotation dev.cryopod.preload=on)
            for size in $pause_sizes; do
                for i in $(seq "$vram_runs"); do run_case "pause-$size.$i" vram "${runtimes%% *}" "$size" random on leave; done
            done
            annotations=()
            ;;
        serving)
            annotations=(--annotation dev.cryopod.preload=on)
            run_case serving serving "${runtimes%% *}" 26 4096
            annotations=()
            ;;
        turns)
            annotations=(--annotation dev.cryopod.preload=on)
            run_case turns turns "${runtimes%% *}" 26 4096
            annotations=()
            ;;
        digests) run_case digests digests_agree ;;
        preload-programs) preload_programs ;;
        preload-cost)
            annotations=(--annotation dev.cryopod.preload=on)
            run_case preload-cost preload_cost
            annotations=()
            ;;
        preload-two)
            annotations=(--annotation dev.cryopod.preload=on)
            run_case preload-two two_vrams "${runtimes%% *}" "$two_size"
            annotations=()
            ;;
        preload-apart)
            annotations=(--annotation dev.cryopod.preload=on)
            run_case preload-apart two_containers "${runtimes%% *}" "$two_size"
            annotations=()
            ;;
        parallel)
            annotations=(--annotation dev.cryopod.preload=on)
            for rt in $runtimes; do parallel_all "$rt" "$parallel_ranks"; done
            annotations=()
            ;;
        parallel-random | parallel-apart | parallel-cost | parallel-copy)
            annotations=(--annotation dev.cryopod.preload=on)
            run_case "$part" "${part//-/_}" "${runtimes%% *}" "$parallel_ranks"
            annotations=()
            ;;
        processes) run_case processes processes "${runtimes%% *}" "$many_processes" ;;
        preload-processes)
            annotations=(--annotation dev.cryopod.preload=on)
            run_case preload-processes processes "${runtimes%% *}" "$many_processes"
            annotations=()
            ;;
        suspend) run_case suspend suspend_resume "${runtimes%% *}" "$vram_size" ;;
        chain) run_case chain chain "${runtimes%% *}" ;;
        nccl) nccl_all "${runtimes%% *}" ;;
        copies) for shape in "14 2048" "26 4096"; do run_case "copies-${shape// /x}" copies "${runtimes%% *}" ${shape% *} ${shape#* }; done ;;
        copies-two) for shape in "14 2048" "26 4096"; do run_case "copies-two-${shape// /x}" copies_two "${runtimes%% *}" ${shape% *} ${shape#* }; done ;;
        docker | ctr | cri) engine_part "$part" ;;
        elsewhere) run_case elsewhere elsewhere "${runtimes%% *}" ;;
        ipc) run_case "ipc-${runtimes%% *}" ipc "${runtimes%% *}" ;;
        map) for rt in $runtimes; do run_case "map-$rt" map "$rt" 4; done ;;
        *) say "no such part: $part" && failed=$((failed + 1)) ;;
    esac
done

engines_down
versions=$(jq -Rn '[inputs | split(" ") | {(.[0]): .[1]}] | add' < /etc/stack-versions)
jq -s --argjson versions "$versions" --arg commit "$(cat /etc/cryopod-commit)" --arg kernel "$(uname -r)" \
    --arg cpus "$(nproc)" --arg gpus "$(cat /etc/gpus 2> /dev/null || echo simulated)" --arg date "$(date -u +%FT%TZ)" --arg compress "$compress" \
    '{date: $date, cryopod: $commit, kernel: $kernel, cpus: ($cpus | tonumber), gpus: $gpus, versions: $versions, compress: $compress, cases: .}' \
    /out/results.jsonl > /out/results.json
jq -r '
    def n(x): if x == null then "-" else (x * 100 | round / 100 | tostring) end;
    def worst(a; k): [a[]? | .[k] // empty] | max;
    ["case", "ok", "export", "dump", "frozen", "gpu-out", "import", "criu", "gpu-in", "unlock", "pause"],
    (.cases[] | [.case, (if .skipped then "skipped" elif .ok then "yes" else "NO" end), n(.checkpoint.export_s), n(.checkpoint.dump_s),
        n(.checkpoint.frozen_s), n(worst(.checkpoint.processes; "checkpoint")), n(.restore.import_s), n(.restore.criu_s),
        n(worst(.restore.processes; "restore")), n(worst(.restore.processes; "unlock")), n(.longest_pause_s)]),
    (.cases[] | select(.ratio) | ["steady state", "ratio", (.ratio * 10000 | round / 10000)] + [.runs[].steps_per_s])
    | map(tostring) | join("\t")' /out/results.json |
    awk -F'\t' '{printf "%-22s %-8s", $1, $2; for (i = 3; i <= NF; i++) printf " %8s", $i; print ""}' | tee /out/table.txt
rm -f /out/results.jsonl
say "$((SECONDS - started)) s, $failed failed"
[ "$failed" = 0 ]
