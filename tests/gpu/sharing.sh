# sharing.sh: the cases of GPU memory that processes share: NCCL over each of its transports, CUDA IPC. Sourced by inside.sh.
# shellcheck shell=bash disable=SC2154,SC2034 # variables shared with machine.sh, cases.sh and inside.sh

# torch_args GPUS: fills `gpu`; with a Python of the machine where there are GPUs, and NCCL kept to the loopback device, without
# NVLink multicast.
torch_args() {
    local dir
    gpu_args "$1"
    gpu+=(--shm-size 1g -e NCCL_DEBUG=INFO -e NCCL_DEBUG_FILE=/tmp/nccl.%p -e NCCL_NVLS_ENABLE=0 -e NCCL_SOCKET_IFNAME=lo -e NCCL_IB_DISABLE=1)
    gpu+=(-e TORCH_SYMM_MEM_DISABLE_MULTICAST=1 -e UV_USE_IO_URING=0 -e USE_LIBUV=0)
    [ -z "$sim" ] || return 0
    for dir in "${torch_mounts[@]}"; do gpu+=(-v "/host$dir:$dir:ro,bind"); done
    gpu+=(-e PYTHONDONTWRITEBYTECODE=1 -e HOME=/tmp "${torch_env[@]}")
}

# What NCCL says, line by line: into its own file, as it leaves its standard output in the C library's buffer.
nccl_said() { if [ -n "$sim" ]; then podman logs "$1" 2>&1; else podman exec "$1" sh -c 'cat /tmp/nccl.*'; fi; }
ways() { nccl_said "$1" | grep -o ' via [A-Za-z0-9/]*' | sort | uniq -c | awk '{printf "%s%s x%s", n++ ? ", " : "", $3, $1}'; }

# sums NAME LABEL LINES: the container prints 6 lines more than LINES, each process has had one sum all the time.
sums() {
    wait_for more_lines "$1" $(($3 + 6)) || { podman logs "$1" 2>&1 | tail -n 20 && return 1; }
    podman logs "$1" > "/logs/$2.out" 2>&1
    if grep -q -E 'CORRUPT|Traceback|CUDA error' "/logs/$2.out"; then say "$2: the sums differ, or CUDA failed" && return 1; fi
    [ "$(awk '$3 == "ok" {print $2, $5}' "/logs/$2.out" | sort -u | wc -l)" = "$(awk '$3 == "ok" {print $5}' "/logs/$2.out" | sort -u | wc -l)" ]
}

# refused NAME LABEL PATTERN: the checkpoint is, with this reason, and the container goes on. Sets `took`.
refused() {
    local from before archive=/var/lib/containers/refused.tar
    from=$(now)
    if pod container checkpoint --export "$archive" "$1" > "/logs/$2.refused" 2>&1; then
        say "$2: checkpointed" && return 1
    fi
    took=$(since "$from")
    say "$2: refused in $took s: $(grep -o 'process [0-9].*' "/logs/$2.refused" | head -n 1)"
    grep -q -E "$3" "/logs/$2.refused" || { cat "/logs/$2.refused" && return 1; }
    [ ! -s "$archive" ] || { say "$2: there is an archive" && return 1; }
    before=$(lines "$1")
    sums "$1" "$2" "$before"
}

# nccl_job VARIABLE=VALUE...: two ranks.
nccl_job() {
    local variable
    torch_args 2
    for variable in "$@"; do gpu+=(-e "$variable"); done
    if [ -n "$sim" ]; then job=(/cusim/cusim-client --mib 16 --procs 2 --gpus 0,1 --nccl); else job=("$python" /work/nccl.py 2); fi
    start job "${gpu[@]}" "$image" "${job[@]}"
}

nccl_refused() { # RUNTIME WAY VARIABLES LABEL
    local label=$4
    nccl_here "$label"
    low_level "$1"
    # shellcheck disable=SC2086
    nccl_job $3 || return
    refused job "$label" "shares GPU memory through NCCL.*$2" || return
    result "$(jq -n --arg case "$label" --arg runtime "$1" --argjson took "$took" --arg way "$(ways job)" \
        '{case: $case, ok: true, runtime: $runtime, transport: $way, refused_s: $took}')"
}

nccl_here() { # LABEL
    [ "$gpus" -ge 2 ] || skip "$1" "this machine has one GPU"
    [ -n "$sim$python" ] || skip "$1" "no Python with torch on this machine"
}

nccl_restored() { # RUNTIME VARIABLES LABEL: a transport that comes back
    local label=$3 archive=/var/lib/containers/job.tar before
    nccl_here "$label"
    # NCCL has TCP sockets of its own, whatever the transport.
    if criu --version | grep -qE 'Version: 4\.[01]' && [ "$(uname -r | awk -F. '{print $1 * 1000 + $2}')" -ge 6016 ] && [ -z "$sim" ]; then
        skip "$label" "CRIU before 4.2 cannot dump TCP sockets on this kernel"
    fi
    low_level "$1"
    # shellcheck disable=SC2086
    nccl_job $2 || return
    checkpoint job "$label" "$archive" || return
    before=$(lines job)
    pod rm -f -t 0 job > /dev/null || return
    restore job "$label" "$archive" || return
    sums job "$label" "$before" || return
    say "$label: restored, $(ways job)"
    result "$(jq -n --arg case "$label" --arg runtime "$1" --argjson save "$saved" --argjson load "$restored" --arg way "$(ways job)" \
        --argjson gap "$(gap "/logs/$label.out")" \
        '{case: $case, ok: true, runtime: $runtime, transport: $way, checkpoint: $save, restore: $load, longest_pause_s: $gap}')"
}

told() { podman logs "$1" 2>&1 | grep -c "^# $2 " || true; }
told_by_both() { [ "$(told "$1" "$2")" = 2 ]; }
p2p_times() { nccl_said "$1" | grep -c ' via P2P' || true; }

nccl_destroyed() { # RUNTIME LABEL: torch's defaults: refused; the process groups destroyed: checkpoint, rm, restore, made again
    local label=$2 archive=/var/lib/containers/job.tar before way times
    nccl_here "$label"
    low_level "$1"
    nccl_job || return
    refused job "$label" 'shares GPU memory through NCCL.*P2P/CUMEM' || return
    way=$(ways job) times=$(p2p_times job)
    [ "$times" -gt 0 ] || { say "$label: the transport is not P2P: $way" && return 1; }
    podman exec job touch /tmp/down || return
    wait_for told_by_both job down || return
    printf '[nvidia]\nsharing = "allow"\n' >> /etc/cryopod/config.toml
    checkpoint job "$label" "$archive" || return
    pod rm -f -t 0 job > /dev/null || return
    restore job "$label" "$archive" || return
    before=$(lines job)
    podman exec job touch /tmp/up || return
    wait_for told_by_both job up || { podman logs job 2>&1 | tail -n 20 && return 1; }
    sums job "$label" "$before" || return
    # The log goes on where it was.
    [ "$(p2p_times job)" -gt "$times" ] || { say "$label: not P2P again: $(ways job)" && return 1; }
    say "$label: $way before, $(ways job) afterwards"
    result "$(jq -n --arg case "$label" --arg runtime "$1" --argjson took "$took" --argjson save "$saved" --argjson load "$restored" --arg way "$way" \
        --arg again "$(ways job)" \
        '{case: $case, ok: true, runtime: $runtime, transport: $way, refused_s: $took, checkpoint: $save, restore: $load, transport_again: $again}')"
}

nccl_all() { # RUNTIME
    run_case "nccl-default-$1" nccl_destroyed "$1"
    run_case "nccl-ipc-$1" nccl_refused "$1" P2P/IPC NCCL_CUMEM_ENABLE=0
    run_case "nccl-cumem-host-$1" nccl_refused "$1" 'SHM in cuMem host memory' NCCL_P2P_DISABLE=1
    run_case "nccl-shm-$1" nccl_restored "$1" 'NCCL_P2P_DISABLE=1 NCCL_CUMEM_HOST_ENABLE=0'
    run_case "nccl-sockets-$1" nccl_restored "$1" 'NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1'
}

ipc() { # RUNTIME LABEL: a tensor passed by CUDA IPC
    local label=$2
    [ -n "$sim$python" ] || skip "$label" "no Python with torch on this machine"
    low_level "$1"
    torch_args 1
    if [ -n "$sim" ]; then job=(/cusim/cusim-client --mib 16 --procs 2 --gpus 0 --ipc); else job=("$python" /work/ipc.py); fi
    start job "${gpu[@]}" "$image" "${job[@]}" || return
    refused job "$label" 'uses GPU memory of process [0-9]+ .* by CUDA IPC' || return
    result "$(jq -n --arg case "$label" --arg runtime "$1" --argjson took "$took" '{case: $case, ok: true, runtime: $runtime, refused_s: $took}')"
}
