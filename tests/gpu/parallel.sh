# parallel.sh: the cases of jobs on several GPUs whose NCCL communicators the preload library takes down and makes again.
# Sourced by inside.sh.
# shellcheck shell=bash disable=SC2154,SC2034 # variables shared with machine.sh, cases.sh, sharing.sh and inside.sh

# parallel_job KIND RANKS: fills `job`, and `gpu` with what it needs.
parallel_job() {
    torch_args "$2"
    gpu+=(-e CUBLAS_WORKSPACE_CONFIG=:4096:8)
    job=("$python" /work/parallel.py "$1" "$parallel_steps" "$2")
}

numbers() { awk '$3 ~ /^(ok|CORRUPT)$/ {print $5, $1, $2, $3}' "$1" | sort -k 1,1 -k 2,2n; }
nccl_steps() { grep -h -o 'NCCL: [0-9]* communicator.*' "$@" | sed 's/NCCL: //' | paste -s -d ';'; }

# swap_gpus RANKS: from now on each GPU of a checkpoint is the next one of this host, and the last is the first.
swap_gpus() {
    local n map=''
    for ((n = 0; n < $1; n++)); do map+="${map:+,}/dev/nvidia$(minor_of $n)=/dev/nvidia$(minor_of $(((n + 1) % $1)))"; done
    printf '[gpu]\nmap = "%s"\n' "$map" >> /etc/cryopod/config.toml
}

# The numbers without a checkpoint: all programs at the same time, as their times do not matter.
parallel_wholes() { # RANKS
    local kind
    for kind in $parallel_kinds; do
        parallel_job "$kind" "$1"
        timeout 300 podman --runtime crun run --rm --name "whole-$kind" "${gpu[@]}" "$image" "${job[@]}" > "/logs/parallel-$kind.whole.out" 2>&1 &
    done
    wait
}

parallel() { # RUNTIME KIND RANKS LABEL: left running; checkpoint, rm, restore, twice, the second time onto other GPUs
    local rt=$1 kind=$2 ranks=$3 label=$4 archive=/var/lib/containers/job.tar want before rows='[]' times way
    want=/logs/parallel-$kind.whole.out
    [ "$(numbers "$want" | wc -l)" = $((parallel_steps * ranks)) ] || { tail -n 20 "$want" && return 1; }
    low_level "$rt"
    parallel_job "$kind" "$ranks"
    start job "${gpu[@]}" "$image" "${job[@]}" || return
    wait_for more_lines job $((parallel_steps * ranks / 6)) || return
    if [ "$kind" = ddp ]; then
        before=$(lines job)
        pod container checkpoint --leave-running --keep job > "/logs/$label.said" 2>&1 || { cat "/logs/$label.said" && keep_logs job "$label" && return 1; }
        keep_logs job "$label.running"
        wait_for more_lines job $((before + 4)) || { podman logs job 2>&1 | tail -n 20 && return 1; }
        # Paused first, as docker and containerd do it.
        before=$(lines job)
        pod pause job > /dev/null || return
        cryopod-runtime checkpoint --leave-running --image-path /var/lib/containers/paused "$(podman inspect -f '{{.Id}}' job)" > "/logs/$label.said" 2>&1 ||
            { cat "/logs/$label.said" && return 1; }
        pod unpause job > /dev/null && rm -r /var/lib/containers/paused
        wait_for more_lines job $((before + 4)) || { podman logs job 2>&1 | tail -n 20 && return 1; }
    fi
    way=$(ways job)
    for times in 1 2; do
        checkpoint job "$label.$times" "$archive" || return
        before=$(lines job)
        [ "$before" -lt $((parallel_steps * ranks)) ] || { say "$label: it was over before the checkpoint" && return 1; }
        pod rm -f -t 0 job > /dev/null || return
        [ "$times" = 1 ] || swap_gpus "$ranks"
        restore job "$label.$times" "$archive" || return
        wait_for more_lines job $((before + 4)) || { podman logs job 2>&1 | tail -n 20 && return 1; }
        say "$label, $times: $(nccl_steps "/logs/$label.$times.dump.log"); $(nccl_steps "/logs/$label.$times.restore.log")"
        rows=$(jq -c --argjson save "$saved" --argjson load "$restored" --arg down "$(nccl_steps "/logs/$label.$times.dump.log")" \
            --arg up "$(nccl_steps "/logs/$label.$times.restore.log")" '. + [{checkpoint: $save, restore: $load, down: $down, up: $up}]' <<< "$rows")
        low_level "$rt"
    done
    wait_for state_is job exited || return
    podman logs job > "/logs/$label.out" 2>&1
    cmp <(numbers "$want") <(numbers "/logs/$label.out") || { say "$label: the numbers differ" && tail -n 5 "/logs/$label.out" && return 1; }
    result "$(jq -n --arg case "$label" --arg runtime "$rt" --argjson ranks "$ranks" --argjson rows "$rows" --argjson n "$(numbers "$want" | wc -l)" \
        --arg way "$way" --argjson gap "$(gap "/logs/$label.out")" '{case: $case, ok: true, runtime: $runtime, ranks: $ranks, transport: $way, numbers_identical: $n,
            round_trips: $rows, checkpoint: $rows[0].checkpoint, restore: $rows[0].restore, longest_pause_s: $gap}')"
}

# agent_killed SECONDS: a checkpoint whose agent is killed so long after its start; whether it succeeds is not said.
agent_killed() {
    pod container checkpoint --leave-running --keep job > "/logs/$label.killed.$1" 2>&1 &
    sleep "$1"
    kill_named cryopod-cuda-ag
    wait $! || true
}

parallel_copy() { # RUNTIME RANKS LABEL: the agent killed at six moments, then a container that is created from the job's checkpoint
    local label=$3 archive=/var/lib/containers/copies/job.tar before after moment from took want=/logs/parallel-ddp.whole.out
    [ -e "$want" ] || { parallel_kinds=ddp parallel_wholes "$2" && [ -s "$want" ]; } || return
    low_level "$1"
    printf '[restore]\nallow = ["/var/lib/containers/copies"]\n' >> /etc/cryopod/config.toml
    mkdir -p -m 755 /var/lib/containers/copies
    parallel_job ddp "$2"
    start job "${gpu[@]}" "$image" "${job[@]}" || return
    for moment in 0.3 0.5 0.7 0.9 1.2 1.6; do
        before=$(lines job) from=$(now)
        agent_killed "$moment"
        wait_for more_lines job $((before + 2 * $2)) || { podman logs job 2>&1 | tail -n 20 && return 1; }
        say "$label: agent killed after $moment s: $(tail -n 1 "/logs/$label.killed.$moment" | cut -c -200); $(since "$from") s until it went on"
    done
    [ "$before" -lt $((parallel_steps * $2)) ] || { say "$label: it was over before the last kill" && return 1; }
    checkpoint job "$label" "$archive" || return
    before=$(lines job)
    podman logs job > "/logs/$label.job.out" 2>&1
    pod rm -f -t 0 job > /dev/null || return
    from=$(now)
    pod run -d --name copy --annotation dev.cryopod.restore="$archive" "${gpu[@]}" "$image" true > "/logs/$label.err" 2>&1 || { cat "/logs/$label.err" && return 1; }
    wait_for more_lines copy "$2" || { podman logs copy 2>&1 | tail -n 20 && return 1; }
    took=$(since "$from")
    wait_for state_is copy exited || return
    podman logs copy > "/logs/$label.copy.out" 2>&1
    after=$(numbers "/logs/$label.copy.out" | wc -l)
    [ $((before + after)) -ge $((parallel_steps * $2)) ] || { say "$label: $before and $after lines" && return 1; }
    cmp <(numbers "$want") <(cat "/logs/$label.job.out" "/logs/$label.copy.out" > /tmp/both; numbers /tmp/both | uniq) || { say "$label: the numbers differ" && return 1; }
    result "$(jq -n --arg case "$label" --arg runtime "$1" --argjson ranks "$2" --argjson save "$saved" --argjson took "$took" --argjson n "$after" \
        '{case: $case, ok: true, runtime: $runtime, ranks: $ranks, checkpoint: $save, copy_goes_on_s: $took, numbers_identical: $n}')"
    rm -r /var/lib/containers/copies
}

parallel_random() { # RUNTIME RANKS LABEL: many checkpoints at random moments of a job whose ranks are out of step
    local label=$3 before n took=()
    low_level "$1"
    parallel_steps=1000000
    parallel_job uneven "$2"
    # A log of NCCL's grows while the job runs on; CRIU would not restore from images of before.
    gpu+=(-e NCCL_DEBUG=WARN -e NCCL_DEBUG_FILE=)
    start job "${gpu[@]}" "$image" "${job[@]}" || return
    for n in $(seq "$parallel_rounds"); do
        sleep "0.$((RANDOM % 9))"
        before=$(lines job)
        pod container checkpoint --leave-running --keep job > "/logs/$label.said" 2>&1 || { cat "/logs/$label.said" && keep_logs job "$label" && return 1; }
        keep_logs job "$label"
        took+=("$(nccl_steps "/logs/$label.dump.log")")
        wait_for more_lines job $((before + 4)) || { podman logs job 2>&1 | tail -n 20 && return 1; }
    done
    podman logs job > "/logs/$label.out" 2>&1
    if grep -q -E 'CORRUPT|Traceback' "/logs/$label.out"; then say "$label: a sum is wrong" && return 1; fi
    # From the last images, too.
    podman kill job > /dev/null && wait_for state_is job exited || return
    before=$(lines job)
    pod container restore --keep job > "/logs/$label.said" 2>&1 || { cat "/logs/$label.said" && keep_logs job "$label" && return 1; }
    wait_for more_lines job $((before + 4)) || { podman logs job 2>&1 | tail -n 20 && return 1; }
    if podman logs job 2>&1 | grep -q -E 'CORRUPT|Traceback'; then say "$label: a sum is wrong after the restore" && return 1; fi
    printf '%s\n' "${took[@]}" > "/logs/$label.steps"
    result "$(jq -n --arg case "$label" --argjson n "$parallel_rounds" --arg steps "$(sort "/logs/$label.steps" | tail -n 3 | paste -s -d '|')" \
        '{case: $case, ok: true, checkpoints: $n, some: $steps}')"
}

parallel_apart() { # RUNTIME RANKS LABEL: no moment is found in time; the job goes on
    local label=$3 before from took
    low_level "$1"
    parallel_steps=1000000
    printf '[nccl]\nquiesce_s = 3\n' >> /etc/cryopod/config.toml
    parallel_job apart "$2"
    pod run -d --name job "${gpu[@]}" "$image" "${job[@]}" > /dev/null || return
    wait_for more_lines job 2 || { podman logs job | tail -n 5 && return 1; }
    sleep 2
    from=$(now)
    if pod container checkpoint --keep job > "/logs/$label.said" 2>&1; then say "$label: checkpointed" && return 1; fi
    took=$(since "$from")
    say "$label: refused in $took s: $(grep -o "NCCL's ranks did not.*" "/logs/$label.said" | head -n 1)"
    grep -q "NCCL's ranks did not come level within 3 s" "/logs/$label.said" || { cat "/logs/$label.said" && return 1; }
    before=$(lines job)
    wait_for more_lines job $((before + 2)) || { podman logs job 2>&1 | tail -n 20 && return 1; }
    result "$(jq -n --arg case "$label" --argjson took "$took" '{case: $case, ok: true, refused_s: $took}')"
}

parallel_cost() { # RUNTIME RANKS LABEL: what the library costs while nothing happens
    local label=$3 libnccl='' dir calls steps
    [ -z "$sim" ] || skip "$label" "the simulated driver has no NCCL to measure"
    low_level "$1"
    parallel_job cost "$2"
    for dir in "${torch_mounts[@]}"; do libnccl=${libnccl:-$(find "/host$dir" -name libnccl.so.2 | head -n 1)}; done
    calls=$(cost "$label-calls" 3 /work/allreduce "${libnccl#/host}" "$2") && steps=$(cost "$label-torch" 1 "${job[@]}") || return
    costs_are "$label" "$calls $steps"
}

parallel_all() { # RUNTIME RANKS
    local kind
    if [ "$gpus" -lt "$2" ] || [ -z "$python" ]; then
        not_here() { skip "$1" "it needs $2 GPUs and a Python with torch"; }
        run_case "parallel-$2" not_here "$2"
        return
    fi
    parallel_wholes "$2"
    for kind in $parallel_kinds; do run_case "parallel-$kind-$2-$1" parallel "$1" "$kind" "$2"; done
}
