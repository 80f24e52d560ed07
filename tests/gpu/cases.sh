# cases.sh: the steps of which the cases are made. Sourced by inside.sh.
# shellcheck shell=bash disable=SC2154,SC2034 # variables shared with inside.sh

say() { echo "gpu-test: $*"; }
now() { echo "$EPOCHREALTIME"; }
since() { jq -n "$(now) - $1 | . * 1000 | round / 1000"; }
wait_for() { # COMMAND...
    local end=$((SECONDS + ${wait_limit:-180}))
    until "$@"; do
        if [ "$SECONDS" -gt "$end" ]; then say "waited in vain for: $*" && return 1; fi
        sleep 0.05
    done
}

# result JSON: one line of the results.
result() { jq -c . <<< "$1" >> /out/results.jsonl; }

# low_level NAME: the runtime underneath cryopod-runtime.
low_level() { printf '[runtime]\nlow_level = "%s"\n' "$1" > /etc/cryopod/config.toml; }

pod() { timeout "${pod_limit:-300}" podman --runtime cryopod-runtime "$@"; }

# gpu_args N: fills `gpu` with what a container needs to use the first N GPUs.
gpu_args() {
    local node i
    gpu=(--network none --pids-limit 0 --device /dev/nvidiactl --device /dev/nvidia-uvm)
    [ ! -e /dev/nvidia-uvm-tools ] || gpu+=(--device /dev/nvidia-uvm-tools)
    for ((i = 0; i < $1; i++)); do
        node=$(minor_of "$i")
        gpu+=(--device "/dev/nvidia$node")
    done
    gpu+=(-v "$usr:/usr:ro,bind" -v /opt/work:/work:ro)
    if [ -n "$sim" ]; then
        gpu+=(-v /run/cusim:/run/cusim -v /opt/cusim:/cusim:ro -e LD_LIBRARY_PATH=/cusim)
    else
        gpu+=(-v /opt/driver:/driver:ro -e LD_LIBRARY_PATH=/driver)
    fi
    gpu+=("${annotations[@]}")
}

# job_command SIZE GPU[,GPU...] [zero|half]: fills `job`: the workload, SIZE in GiB (MiB with the simulated driver), on each
# GPU, random, zeros, or every other MiB random.
job_command() {
    if [ -n "$sim" ]; then
        job=(/cusim/cusim-client --mib "$1" --chunk-mib "$1" --gpus "$2" --content "${3:-random}")
        if [[ $2 == *,* ]]; then job+=(--procs 2); fi
    else
        job=(/work/gpujob "$1" 1024 "$2" ${3:+"$3"})
    fi
}

static_dir() { podman inspect -f '{{.StaticDir}}' "$1"; }
lines() { podman logs "$1" 2> /dev/null | grep -c -E ' (ok|CORRUPT) ' || true; }
more_lines() { [ "$(lines "$1")" -ge "$2" ]; }
state_is() { [ "$(podman inspect -f '{{.State.Status}}' "$1")" = "$2" ]; }

# start NAME ARG...: a container under cryopod-runtime that has begun to print.
start() {
    local name=$1 && shift
    pod run -d --name "$name" "$@" > /dev/null || return
    wait_for more_lines "$name" 3 || { podman logs "$name" | tail -n 5 && return 1; }
}

# keep_logs NAME LABEL: CRIU's logs and the metadata, before the container is removed.
keep_logs() {
    local dir file
    dir=$(static_dir "$1") || return 0
    for file in dump.log restore.log checkpoint/cryopod.json checkpoint/dump.log; do
        if [ -e "$dir/$file" ]; then cp "$dir/$file" "/logs/$2.${file##*/}"; fi
    done
    podman logs "$1" > "/logs/$2.out" 2>&1 || true
}

# checkpoint NAME LABEL ARCHIVE [ARG...]: sets `saved` to its times as JSON.
checkpoint() {
    local name=$1 label=$2 archive=$3 from took metadata && shift 3
    from=$(now)
    if ! pod container checkpoint --print-stats --keep --compress "$compress" --export "$archive" "$@" "$name" \
        > "/logs/$label.checkpoint.json" 2> "/logs/$label.checkpoint.err"; then
        cat "/logs/$label.checkpoint.err"
        keep_logs "$name" "$label"
        return 1
    fi
    took=$(since "$from")
    keep_logs "$name" "$label"
    metadata=/logs/$label.cryopod.json
    [ -e "$metadata" ] || { say "$label: the checkpoint has no cryopod.json" && return 1; }
    saved=$(jq -n --argjson export "$took" --argjson archive "$(stat -c %s "$archive")" --slurpfile stats "/logs/$label.checkpoint.json" \
        --slurpfile metadata "$metadata" '
        ($stats[0].container_statistics[0]) as $s | $metadata[0] as $c
        | [$c.gpu.plugin_report.processes[]? | .steps | map({(.step): (.micros / 1e6)}) | add] as $steps
        | {export_s: $export, plan_s: ($c.timings.plan_us / 1e6), dump_s: ($c.timings.dump_us / 1e6),
           frozen_s: (($s.criu_statistics.frozen_time // 0) / 1e6), memdump_s: (($s.criu_statistics.memdump_time // 0) / 1e6),
           memwrite_s: (($s.criu_statistics.memwrite_time // 0) / 1e6),
           runtime_s: (($s.runtime_checkpoint_duration // 0) / 1e6), podman_s: ($stats[0].podman_checkpoint_duration / 1e6),
           archive_bytes: $archive, processes: $steps, vram_bytes: [$c.gpu.plugin_report.processes[]?.vram_bytes]}')
}

# restore NAME LABEL ARCHIVE: sets `restored` to its times as JSON.
restore() {
    local name=$1 label=$2 archive=$3 from took
    from=$(now)
    if ! pod container restore --print-stats --keep --import "$archive" > "/logs/$label.restore.json" 2> "/logs/$label.restore.err"; then
        cat "/logs/$label.restore.err"
        find /var/lib/containers/storage/overlay-containers -name restore.log -exec cp {} "/logs/$label.restore.log" \;
        return 1
    fi
    took=$(since "$from")
    keep_logs "$name" "$label"
    # The plugin's steps are in CRIU's log: "process 12: restore in 345 ms".
    restored=$(jq -n --argjson import "$took" --slurpfile stats "/logs/$label.restore.json" \
        --arg log "$(grep -o -E 'process [0-9]+: [a-z]+ in [0-9]+ ms' "/logs/$label.restore.log" || true)" '
        ($stats[0].container_statistics[0]) as $s
        | {import_s: $import, criu_s: (($s.criu_statistics.restore_time // 0) / 1e6),
           runtime_s: (($s.runtime_restore_duration // 0) / 1e6), podman_s: ($stats[0].podman_restore_duration / 1e6),
           processes: [$log | split("\n")[] | select(. != "") | capture("process (?<p>[0-9]+): (?<k>[a-z]+) in (?<v>[0-9]+) ms")
             | {p, k, v: (.v | tonumber / 1000)}] | group_by(.p) | map(map({(.k): .v}) | add)}' | jq .)
}

# verdict NAME LABEL LINES: the container has printed at least LINES and 5 more lines, nothing is corrupt, and the sums
# are what they were.
verdict() {
    wait_for more_lines "$1" $(($3 + 5)) || return
    podman logs "$1" > "/logs/$2.out" 2>&1
    if grep -q -E 'CORRUPT|rror' "/logs/$2.out"; then say "$2: the memory has changed, or CUDA failed" && return 1; fi
    # One sum for each process, from the first line to the last.
    [ "$(grep ' ok ' "/logs/$2.out" | awk '{print $2, $5}' | sort -u | wc -l)" = "$(grep ' ok ' "/logs/$2.out" | awk '{print $5}' | sort -u | wc -l)" ]
}

# gap NAME-OR-FILE: the longest pause between two lines of the same process, in seconds.
gap() { awk '/ ok / {k = $5; if (k in last && $4 - last[k] > max) max = $4 - last[k]; last[k] = $4} END {printf "%.3f\n", max}' "$1"; }

# case LABEL FUNCTION ARG...: runs it in a shell of its own; what it leaves is removed; a failure is a result.
run_case() {
    local label=$1 code=0 && shift
    say "$label"
    ("$@" "$label") || code=$?
    timeout 60 podman rm -f -t 0 -a > /dev/null 2>&1 || true
    rm -f /var/lib/containers/*.tar
    if [ "$code" = 77 ]; then return; fi
    if [ "$code" != 0 ]; then
        failed=$((failed + 1))
        say "$label: FAILED"
        result "$(jq -n --arg case "$label" '{case: $case, ok: false}')"
    fi
}

# skip LABEL WHY: from within a case.
skip() {
    say "$1: skipped: $2"
    result "$(jq -n --arg case "$1" --arg why "$2" '{case: $case, skipped: $why}')"
    exit 77
}
