# copies.sh: containers that are created from a checkpoint. Sourced by inside.sh.
# shellcheck shell=bash disable=SC2154,SC2034 # variables shared with inside.sh and cases.sh

log_of() { podman inspect -f '{{.HostConfig.LogConfig.Path}}' "$1"; }
answered() { grep -q ' ok ' "$1"; }

# first_answer NAME ARG...: starts a container; prints the seconds until it has written its first line.
first_answer() {
    local name=$1 from && shift
    from=$(now)
    pod run -d --name "$name" "$@" > "/logs/$label.$name.err" 2>&1 || { cat "/logs/$label.$name.err" >&2 && return 1; }
    wait_for answered "$(log_of "$name")" >&2 || return
    since "$from"
}

# served RUNTIME LAYERS WIDTH: a server that has answered, its checkpoint in the host's cache. Sets gpu, cold (its weights are
# read from files in memory), random (it makes them on the GPU) and pull.
served() {
    local from weights=/var/lib/containers/weights
    [ -n "$python" ] || skip "$label" "no Python with torch on this machine"
    low_level "$1"
    printf '[restore]\nallow = ["/var/lib/containers/copies"]\n[cache]\npath = "/var/lib/containers/cache"\n' >> /etc/cryopod/config.toml
    mkdir -p -m 755 /var/lib/containers/copies
    train_command 1 any
    gpu+=("${torch_env[@]}")
    mkdir -p "$weights"
    gpu+=(-v "$weights:/weights")
    random=$(first_answer maker "${gpu[@]}" "$image" "$python" /work/serve.py 1 unix "$2" "$3" /weights) || return
    [ "$(podman wait maker)" = 0 ] || { podman logs maker >&2; return 1; }
    pod rm maker > /dev/null || return
    cold=$(first_answer server "${gpu[@]}" "$image" "$python" /work/serve.py 1000000 unix "$2" "$3" /weights) || return
    wait_for more_lines server 60 || return
    checkpoint server "$label" "$archive" || return
    pod rm -f -t 0 server > /dev/null || return
    from=$(now)
    cryopod cache pull -q "$archive" > /dev/null || return
    pull=$(since "$from")
}

# copy NAME GPU: a copy on the GPU of this number; prints the seconds until its first answer.
copy() {
    local other
    other=/dev/nvidia$(minor_of "$2")
    first_answer "$1" --annotation dev.cryopod.restore="$archive" "${gpu[@]/#"/dev/nvidia$(minor_of 0)"/$other}" "$image" true
}

copies_two() { # RUNTIME LAYERS WIDTH LABEL: one copy, then one on each of two GPUs (GPU_TEST_MANY) at once
    local label=$4 archive=/var/lib/containers/copies/server.tar cold random pull one two i copying=()
    [ "$gpus" -ge "$many" ] || skip "$label" "this machine has $gpus GPUs"
    served "$1" "$2" "$3" || return
    copy first 0 > /tmp/first || return # whatever is read for the first time
    pod rm -f -t 0 first > /dev/null
    one=$(copy one 0) || return
    pod rm -f -t 0 one > /dev/null
    for ((i = 0; i < many; i++)); do
        copy "copy$i" "$i" > "/tmp/copy$i" &
        copying+=($!)
    done
    for i in "${copying[@]}"; do wait "$i" || return; done
    for ((i = 0; i < many; i++)); do
        wait_for more_lines "copy$i" 60 || return
        if podman logs "copy$i" 2>&1 | grep CORRUPT; then return 1; fi
    done
    two=$(cat /tmp/copy[0-9]* | sort -n | tail -n 1)
    result "$(jq -n --arg case "$label" --arg runtime "$1" --argjson save "$saved" --argjson cold "$cold" --argjson random "$random" --argjson pull "$pull" \
        --argjson one "$one" --argjson two "$two" --argjson many "$many" --arg info "$(grep '^#' "/logs/$label.out" | tr '\n' ' ')" \
        '{case: $case, ok: true, runtime: $runtime, checkpoint: $save, cold_s: $cold, cold_random_s: $random, cache_pull_s: $pull, one_s: $one, copies: $many, two_s: $two, times: ($two / $one), info: $info}')"
    rm -r /var/lib/containers/copies /var/lib/containers/weights
    cryopod cache prune -q
    jq -c '{case, cold_s, cold_random_s, one_s, copies, two_s, times, info}' <<< "$(tail -n 1 /out/results.jsonl)"
}

copies() { # RUNTIME LAYERS WIDTH LABEL: a server, and two copies of its checkpoint from the host's cache
    local label=$4 archive=/var/lib/containers/copies/server.tar cold random pull warm=() digests=() i
    served "$1" "$2" "$3" || return
    for i in 1 2; do
        warm+=("$(copy "copy$i" 0)") || return
        wait_for more_lines "copy$i" 60 || return
    done
    for i in 1 2; do
        podman logs "copy$i" > "/logs/$label.copy$i.out" 2>&1
        if grep -q CORRUPT "/logs/$label.copy$i.out"; then say "$label: another answer to the same seed" && return 1; fi
        digests+=("$(awk '$3 == "ok" {print $2}' "/logs/$label.copy$i.out" | sort -u | sha256sum)")
    done
    [ "${digests[0]}" = "${digests[1]}" ] || { say "$label: the copies answer differently" && return 1; }
    result "$(jq -n --arg case "$label" --arg runtime "$1" --argjson save "$saved" --argjson cold "$cold" --argjson random "$random" --argjson pull "$pull" \
        --argjson warm "$(jq -n '$ARGS.positional | map(tonumber)' --args "${warm[@]}")" \
        --arg info "$(grep '^#' "/logs/$label.out" | tr '\n' ' ')" \
        '{case: $case, ok: true, runtime: $runtime, checkpoint: $save, cold_s: $cold, cold_random_s: $random, cache_pull_s: $pull, warm_s: $warm, info: $info}')"
    rm -r /var/lib/containers/copies /var/lib/containers/weights
    cryopod cache prune -q
    jq -c '{case, cold_s, cold_random_s, cache_pull_s, warm_s, info}' <<< "$(tail -n 1 /out/results.jsonl)"
}

elsewhere() { # RUNTIME LABEL: a training that `podman stop` ends, for another machine; or one that goes on from such a place
    local label=$2 dir=/var/lib/containers/elsewhere place=/var/lib/containers/elsewhere/place took
    [ -n "$sim$python" ] || skip "$label" "no Python with torch on this machine"
    low_level "$1"
    printf '[checkpoint]\nallow = ["%s"]\n[restore]\nallow = ["%s"]\n' "$place" "$place" >> /etc/cryopod/config.toml
    mkdir -p -m 755 "$place"
    steps=$([ -n "$sim" ] && echo 60 || echo 3000)
    train_command "$steps"
    [ -n "$sim" ] || { gpu+=("${torch_env[@]}") && train=("$python" /work/train.py "$steps" 2 512 1000); }
    gpu+=(--annotation dev.cryopod.on-stop=checkpoint --annotation dev.cryopod.grace_s=60 --annotation "dev.cryopod.checkpoint.to=$place" --annotation dev.cryopod.name=train)
    if [ ! -e /opt/work/elsewhere.tar.zst ]; then
        uninterrupted crun "$dir/whole.out" || { tail -n 5 "$dir/whole.out" && return 1; }
        pod run -d --name train "${gpu[@]}" "$image" "${train[@]}" > /dev/null || return
        wait_for more_lines train $((steps / 3)) || { podman logs train | tail -n 5 && return 1; }
        took=$(now)
        pod stop -t 60 train > /dev/null || return
        took=$(since "$took")
        podman logs train > "$dir/before.out" 2>&1
        # The list of what it has comes after its name.
        wait_for test -e "$place/train/000001/cryopod-files.json" || return
        [ "$(lines train)" -lt "$steps" ] || { say "the training was over before the stop" && return 1; }
        tar -C "$dir" -cf - . | zstd -q -T0 -19 --long=27 > /out/elsewhere.tar.zst
        say "$label: $(du -sm "$place" | cut -f 1) MiB in the place, $(stat -c %s /out/elsewhere.tar.zst) bytes to carry, stopped after $(lines train) steps in $took s"
        result "$(jq -n --arg case "$label" --arg runtime "$1" --argjson took "$took" '{case: $case, ok: true, runtime: $runtime, stop_s: $took}')"
        return
    fi
    zstd -q -dc --long=27 /opt/work/elsewhere.tar.zst | tar -C "$dir" -xf - || return
    took=$(now)
    pod run -d --name train --annotation "dev.cryopod.restore=latest:$place" "${gpu[@]}" "$image" "${train[@]}" > "/logs/$label.err" 2>&1 || { cat "/logs/$label.err" && return 1; }
    wait_for more_lines train 1 || { podman logs train | tail -n 5 && return 1; }
    took=$(since "$took")
    wait_for state_is train exited || return
    podman logs train > "/logs/$label.out" 2>&1
    cat "$dir/before.out" "/logs/$label.out" > "$dir/both.out"
    cmp <(losses "$dir/whole.out") <(losses "$dir/both.out") || { say "$label: the losses differ" && tail -n 3 "/logs/$label.out" && return 1; }
    say "$label: first step, number $(losses "/logs/$label.out" | sed -n '1s/ .*//p'), after $took s; $steps losses identical"
    result "$(jq -n --arg case "$label" --arg runtime "$1" --argjson took "$took" --argjson n "$steps" '{case: $case, ok: true, runtime: $runtime, warm_s: [$took], losses_identical: $n}')"
}
