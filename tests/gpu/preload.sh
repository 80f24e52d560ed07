# preload.sh: the cases of the preload library: what it hands over, programs with it, and what it costs. Sourced by inside.sh.
# shellcheck shell=bash disable=SC2154,SC2034 # variables shared with machine.sh, cases.sh and inside.sh

preload_ways() { # in place, left running, suspended, in an archive
    local rt=${runtimes%% *} i
    for i in $(seq "$vram_runs"); do
        run_case "vram-preload-on.$i" vram "$rt" "$vram_size" random on ''
        run_case "vram-running-on.$i" vram "$rt" "$vram_size" random on leave
    done
    medians
    run_case "preload-archive-$vram_size" archive "$rt" "$vram_size"
    driver_runs=1
    run_case preload-suspend suspend_resume "$rt" "$vram_size"
    unset driver_runs
}

# handed_over METADATA: bytes by the way that GPU memory took, as JSON.
handed_over() {
    jq -c '[.gpu.plugin_report.processes[].vram[]?] | {preload: ([.[] | select(.preload) | .bytes] | add // 0),
        driver: ([.[] | select(.preload | not) | .bytes] | add // 0)}' "$1"
}

preloaded_program() { # RUNTIME VARIABLE COMMAND... LABEL: as without the library, line by line, with a checkpoint in the middle
    local label=${*: -1} rt=$1 variable=$2 command=("${@:3:$#-3}") want dir ways frozen
    low_level "$rt"
    want=/logs/$label.whole.out
    timeout 300 podman --runtime crun run --rm --name program "${gpu[@]}" -e "$variable" "$image" "${command[@]}" > "$want" 2>&1 ||
        { tail -n 5 "$want" && return 1; }
    pod run -d --name program --annotation dev.cryopod.preload=on "${gpu[@]}" -e "$variable" "$image" "${command[@]}" > /dev/null || return
    wait_for more_lines program $(($(losses "$want" | wc -l) / 3)) || { podman logs program | tail -n 5 && return 1; }
    pod container checkpoint --print-stats --keep program > "/logs/$label.stats" 2> "/logs/$label.said" ||
        { cat "/logs/$label.said" && keep_logs program "$label" && return 1; }
    keep_logs program "$label"
    frozen=$(jq '.container_statistics[0].criu_statistics.frozen_time / 1e6' "/logs/$label.stats")
    ways=$(handed_over "/logs/$label.cryopod.json")
    [ "$(lines program)" -lt "$(losses "$want" | wc -l)" ] || { say "$label: it was over before the checkpoint" && return 1; }
    pod container restore --keep program > "/logs/$label.said" 2>&1 || { cat "/logs/$label.said" && keep_logs program "$label" && return 1; }
    wait_for state_is program exited || return
    podman logs program > "/logs/$label.out" 2>&1
    cmp <(losses "$want") <(losses "/logs/$label.out") || { say "$label: the lines differ" && return 1; }
    say "$label: $(losses "$want" | wc -l) lines identical; frozen $frozen s; bytes $ways"
    result "$(jq -n --arg case "$label" --arg runtime "$rt" --argjson ways "$ways" --argjson n "$(losses "$want" | wc -l)" \
        --arg info "$(grep '^#' "/logs/$label.out" | tr '\n' ' ')" --argjson gap "$(gap "/logs/$label.out")" \
        --argjson frozen "$frozen" '{case: $case, ok: true, runtime: $runtime, lines_identical: $n, bytes: $ways, info: $info,
            checkpoint: {frozen_s: $frozen}, longest_pause_s: $gap}')"
}

preload_calls() { # RUNTIME LABEL: calls by address, frees and forks as without the library, also while checkpoints leave it running
    local label=$2 want=/logs/$2.whole.out rounds=200 n id
    [ -z "$sim" ] || skip "$label" "the simulated driver launches no kernels"
    low_level "$1"
    gpu_args 1
    timeout 300 podman --runtime crun run --rm --name calls "${gpu[@]}" "$image" /work/pointers "$rounds" > "$want" 2>&1 ||
        { grep -v ' ok ' "$want" | tail -n 5 && return 1; }
    pod run -d --name calls --annotation dev.cryopod.preload=on "${gpu[@]}" "$image" /work/pointers "$rounds" > /dev/null || return
    id=$(podman inspect --format '{{.Id}}' calls)
    for n in 1 2 3; do
        wait_for more_lines calls $((n * rounds / 5)) || { podman logs calls | tail -n 5 && return 1; }
        cryopod-runtime checkpoint --leave-running --image-path "/var/lib/containers/calls.$n" --work-path /logs "$id" > "/logs/$label.said" 2>&1 ||
            { cat "/logs/$label.said" && keep_logs calls "$label" && return 1; }
        rm -rf "/var/lib/containers/calls.$n"
        [ "$(lines calls)" -lt "$rounds" ] || { say "$label: it was over before checkpoint $n" && return 1; }
    done
    wait_for state_is calls exited || return
    podman logs calls > "/logs/$label.out" 2>&1
    cmp <(losses "$want") <(losses "/logs/$label.out") || { grep -v ' ok ' "/logs/$label.out" | tail -n 5 && return 1; }
    # The library says once that CUDA IPC fails, and nothing else is an error.
    [ "$(grep -c 'dev.cryopod.preload' "/logs/$label.out")" = 1 ] && ! grep -q '^error: ' "/logs/$label.out" || { grep -v ' ok ' "/logs/$label.out" | tail -n 5 && return 1; }
    say "$label: $(losses "$want" | wc -l) rounds as without; $(grep '^#' "/logs/$label.out")"
    result "$(jq -n --arg case "$label" --arg runtime "$1" --argjson n "$(losses "$want" | wc -l)" --arg info "$(grep '^#' "/logs/$label.out")" \
        --argjson gap "$(gap "/logs/$label.out")" '{case: $case, ok: true, runtime: $runtime, rounds: $n, info: $info, longest_pause_s: $gap}')"
}

digests_agree() { # LABEL: digests that the GPU makes are the blake3 crate's
    [ -n "$(type -P digests)" ] || skip "$1" "cryopod-cuda's example digests is not in the pack; build it in release"
    digests /usr/lib/x86_64-linux-gnu/libcuda.so.1 $([ -n "$sim" ] && echo 0 || echo 8) | tee "/logs/$1.out" || return
    result "$(jq -n --arg case "$1" --arg said "$(cat "/logs/$1.out")" '{case: $case, ok: true, info: $said}')"
}

left_running() { # RUNTIME LABEL: a training with the library goes on from a checkpoint, and another one from its images: the same losses
    local label=$2 want=/logs/$2.whole.out
    [ -n "$sim$python" ] || skip "$label" "no Python with torch on this machine"
    low_level "$1"
    train_command "$steps"
    uninterrupted crun "$want" || { tail -n 5 "$want" && return 1; }
    pod run -d --name train "${annotations[@]}" "${gpu[@]}" "$image" "${train[@]}" > /dev/null || return
    wait_for more_lines train $((steps / 3)) || { podman logs train | tail -n 5 && return 1; }
    pod container checkpoint --leave-running --print-stats --keep train > "/logs/$label.stats" 2> "/logs/$label.said" ||
        { cat "/logs/$label.said" && keep_logs train "$label" && return 1; }
    [ "$(lines train)" -lt "$steps" ] || { say "$label: it was over before the checkpoint" && return 1; }
    keep_logs train "$label"
    grep -h 'cryopod: ' "/logs/$label.dump.log" | sed "s/^/gpu-test: $label: /" || true
    wait_for state_is train exited || return
    podman logs train > "/logs/$label.out" 2>&1
    cmp <(losses "$want") <(losses "/logs/$label.out") || { say "$label: the losses differ" && return 1; }
    pod container restore --keep train > "/logs/$label.said" 2>&1 || { cat "/logs/$label.said" && return 1; }
    wait_for state_is train exited || return
    # The log has the steps after the checkpoint twice.
    cmp <(losses "$want") <(podman logs train 2>&1 | awk '$3 == "ok" {print $1, $2}' | sort -un) || { say "$label: the restored one's losses differ" && return 1; }
    result "$(jq -n --arg case "$label" --arg runtime "$1" --arg info "$(grep '^#' "/logs/$label.out" | tr '\n' ' ')" \
        --argjson gap "$(gap "/logs/$label.out")" --argjson usual "$(gap "$want")" --argjson n "$(losses "$want" | wc -l)" \
        '{case: $case, ok: true, runtime: $runtime, size: "torch", losses_identical: $n, info: $info, longest_pause_s: $gap, longest_without_s: $usual}')"
    say "$label: $(tail -n 1 /out/results.jsonl | jq -c '{losses_identical, info, longest_pause_s, longest_without_s}')"
}

# answering FILE FROM: the slowest answer since line FROM, in seconds; fails where one was wrong.
answering() {
    podman logs server > "$1" 2>&1
    if grep -q CORRUPT "$1" || ! state_is server running; then tail -n 5 "$1" >&2 && return 1; fi
    gap <(grep ' ok ' "$1" | tail -n "+$2")
}

serving() { # RUNTIME LAYERS WIDTH LABEL: a server that is asked all the time: checkpoints that leave it running, suspend, one that ends it
    local label=$4 n from took usual slowest said step one all='[]' args back command id metadata dir=/var/lib/containers/serving
    [ -n "$sim$python" ] || skip "$label" "no Python with torch on this machine"
    low_level "$1"
    if [ -n "$sim" ]; then
        gpu_args 1
        job_command "$vram_size" 0
        command=("${job[@]}")
    else
        train_command "$steps" any
        gpu+=(--shm-size 2g "${torch_env[@]}")
        command=("$python" /work/serve.py 1000000 unix "$2" "$3")
    fi
    mkdir -p "$dir"
    pod run -d --name server "${annotations[@]}" --annotation dev.cryopod.parent=auto "${gpu[@]}" "$image" "${command[@]}" > /dev/null || return
    wait_for more_lines server 60 || { podman logs server | tail -n 5 && return 1; }
    id=$(podman inspect --format '{{.Id}}' server)
    n=$(lines server)
    sleep 3
    usual=$(answering "/logs/$label.out" "$n") || return
    for step in first second suspend suspend end; do
        n=$(lines server) metadata=$dir/$step/cryopod.json
        case $step in
            first | second) args=(cryopod-runtime checkpoint --leave-running --image-path "$dir/$step" --work-path /logs "$id") ;;
            suspend) args=(cryopod suspend server) ;;
            end) args=(podman --runtime cryopod-runtime container checkpoint --keep server) ;;
        esac
        from=$(now)
        "${args[@]}" > "/logs/$label.said" 2>&1 || { cat "/logs/$label.said" && keep_logs server "$label" && return 1; }
        took=$(since "$from")
        case $step in
            end) keep_logs server "$label" && metadata=/logs/$label.cryopod.json ;;
            first | second) mv /logs/dump.log "/logs/$label.dump.log" ;;
        esac
        from=$(now)
        case $step in
            suspend) cryopod resume server >> "/logs/$label.said" 2>&1 || { cat "/logs/$label.said" && return 1; } ;;
            end) podman --runtime cryopod-runtime container restore --keep server >> "/logs/$label.said" 2>&1 || { cat "/logs/$label.said" && return 1; } ;;
        esac
        back=$(since "$from")
        wait_for more_lines server $((n + 100)) || return
        slowest=$(answering "/logs/$label.out" "$n") || return
        said=$([ "$step" = suspend ] || jq -c '{timings, vram: .gpu.vram}' "$metadata")
        case $step in
            suspend) say "$label: $(paste -s -d ' ' "/logs/$label.said")" ;;
            *) grep -h 'cryopod: ' "/logs/$label.dump.log" | sed "s/^/gpu-test: $label: /" || true ;;
        esac
        one=$(jq -nc --arg step "$step" --argjson took "$took" --argjson back "$back" --argjson slowest "$slowest" \
            --argjson said "${said:-null}" '{step: $step, took_s: $took, back_s: $back, slowest_answer_s: $slowest, said: $said}')
        say "$label: $one"
        all=$(jq -c --argjson one "$one" '. + [$one]' <<< "$all")
    done
    # What is not in the second checkpoint comes from the first.
    n=$(lines server)
    podman kill server > /dev/null && wait_for state_is server exited || return
    rm -rf "$(static_dir server)/checkpoint" && ln -s "$dir/second" "$(static_dir server)/checkpoint"
    pod container restore --keep server > "/logs/$label.said" 2>&1 || { cat "/logs/$label.said" && return 1; }
    wait_for more_lines server $((n + 60)) || return
    answering "/logs/$label.out" "$n" > /dev/null || return
    podman kill server > /dev/null && rm -r "$(static_dir server)/checkpoint" "$dir"
    result "$(jq -n --arg case "$label" --arg runtime "$1" --argjson usual "$usual" --argjson steps "$all" \
        --arg info "$(grep '^#' "/logs/$label.out" | tr '\n' ' ')" --argjson n "$(lines server)" \
        '{case: $case, ok: true, runtime: $runtime, slowest_without_s: $usual, steps: $steps, answers: $n, info: $info}')"
}

preload_programs() {
    local rt=${runtimes%% *} kind allocator
    if [ -z "$python" ]; then
        no_python() { skip "$1" "no Python with torch on this machine"; }
        run_case preload-programs no_python
        return
    fi
    train_command 60
    gpu+=(-e PATH=/work/bin:/usr/local/bin:/usr/bin:/bin)
    for kind in $programs; do
        allocator=${kind%/*} layers=2
        [ "$allocator" = "$kind" ] || layers=${kind#*/}
        case $kind in
            # A step of JAX takes 60 ms.
            jax | cupy) run_case "preload-$kind" preloaded_program "$rt" "ARRAYS=$kind" "$python" /work/arrays.py "$kind" 400 ;;
            *) run_case "preload-torch-${allocator//:/-}-$layers" preloaded_program "$rt" "PYTORCH_CUDA_ALLOC_CONF=$allocator" "$python" /work/train.py 60 "$layers" ;;
        esac
    done
}

# Runs a command in a container that has the library, with and without it, in turns.
in_turns='n=$1 && shift
for i in $(seq "$n"); do
    for preload in off on on off; do
        library=$LD_PRELOAD
        [ $preload = on ] || library=
        rm -f /tmp/rendezvous
        echo "== $preload"
        LD_PRELOAD=$library "$@" || exit
    done
done'

# cost LABEL TIMES COMMAND...: for each rate that the command tells, as `# rate WHAT NUMBER` or by lines with their time, the ratio with
# the library to without; as JSON.
cost() {
    local out=/logs/$1.out err=/logs/$1.err times=$2 && shift 2
    timeout 400 podman --runtime cryopod-runtime run --rm "${gpu[@]}" "$image" sh -c "$in_turns" sh "$times" "$@" > "$out" 2> "$err" ||
        { tail -n 5 "$err" >&2 && return 1; }
    awk 'function steps(from) {
            from = int(n / 5) # the first fifth is not counted
            if (n > 1) printf "%s steps %.4f\n", preload, (n - 1 - from) / (at[n - 1] - at[from])
            n = 0
        }
        $1 == "==" {steps(); preload = $2} /^# rate/ {print preload, $3, $4} $3 == "ok" {at[n++] = $4} END {steps()}' "$out" |
        jq -nRc 'def of(i): [.[] | select(.preload == i) | .rate];
            def mid: sort | (.[(length - 1) / 2 | floor] + .[length / 2 | floor]) / 2;
            [inputs | split(" ") | {preload: .[0], what: .[1], rate: (.[2] | tonumber)}] | group_by(.what)[]
            | {what: .[0].what, median: ((of("on") | mid) / (of("off") | mid)), best: ((of("on") | max) / (of("off") | max)), off: of("off"), on: of("on")}'
}

costs_are() { # LABEL JSON...
    say "$1:"
    jq -c . <<< "$2"
    result "$(jq -s --arg case "$1" '{case: $case, ok: true, cost: .}' <<< "$2")"
}

preload_cost() { # LABEL: what a container loses by the library while nothing happens
    local all='' what command times
    [ -z "$sim" ] || skip "$1" "the simulated driver launches no kernels"
    low_level "${runtimes%% *}"
    train_command 60
    for what in $costs; do
        times=1
        case $what in
            launches) command=(/work/launches 2) times=3 ;;
            train) command=("$python" /work/train.py 60 4) ;;
            serve) command=("$python" /work/serve.py 80 unix) ;;
        esac
        [ -n "$python" ] || [ "$what" = launches ] || continue
        all+=$(cost "$what" "$times" "${command[@]}" | jq -c --arg what "$what" '.what = $what')$'\n' || return
    done
    costs_are "$1" "$all"
}

turns() { # RUNTIME LAYERS WIDTH LABEL: a server that is suspended without a copy kept and with one; then two that take turns
    local label=$4 command=() how from to start began out in slow said runs='[]' switches='[]' names instead=()
    low_level "$1"
    if [ -n "$sim" ] || [ -z "$python" ]; then
        gpu_args 1
        job_command "$vram_size" 0
        command=("${job[@]}")
    else
        train_command 1 any
        gpu+=(--shm-size 2g "${torch_env[@]}")
        command=("$python" /work/serve.py 1000000 unix "$2" "$3")
    fi
    serve() {
        pod run -d --name "$1" "${annotations[@]}" "${gpu[@]}" "$image" "${command[@]}" > /dev/null &&
            wait_for more_lines "$1" 60 || { podman logs "$1" | tail -n 5 && return 1; }
    }
    # No answer differs from an earlier one to the same question.
    right() {
        podman logs "$1" > "/logs/$label.$1.out" 2>&1
        ! grep -q CORRUPT "/logs/$label.$1.out" && { [ "${command[1]}" != /work/serve.py ] ||
            awk '$3 == "ok" {k = $1 % 50; if (k in was && was[k] != $2) bad = 1; was[k] = $2} END {exit bad}' "/logs/$label.$1.out"; }
    }
    log_of() { podman inspect --format '{{.HostConfig.LogConfig.Path}}' "$1"; }
    # answers LOG LINES: waits for more lines than these.
    answers() {
        local end=$((SECONDS + 60))
        until [ "$(wc -l < "$1")" -gt "$2" ]; do
            [ "$SECONDS" -lt "$end" ] || { say "$label: no answer" && return 1; }
            sleep 0.002
        done
    }
    said() { "$@" > "/logs/$label.said" 2>&1 || { cat "/logs/$label.said" && return 1; }; }
    # away NAME and back NAME set `out`, and `in` with the time to the first answer `slow`; both add to `said`.
    away() {
        start=$(now)
        said cryopod suspend "$1" || return
        out=$(since "$start") said=$(paste -s -d ' ' "/logs/$label.said")
    }
    back() {
        local log n
        log=$(log_of "$1") n=$(wc -l < "$(log_of "$1")") start=$(now)
        said cryopod resume "${instead[@]}" "$1" || return
        in=$(since "$start")
        answers "$log" "$n" || return
        slow=$(since "$start") said+=" $(paste -s -d ' ' "/logs/$label.said")"
    }
    serve one || return
    sleep 3
    for how in without without without first kept kept kept; do
        [ "$how" != first ] || printf '[suspend]\nkeep = 64\n' >> /etc/cryopod/config.toml
        away one && { [ -z "$(memory_on)" ] || { say "$label: memory is left on GPU $(memory_on)" && return 1; }; } && back one || return
        say "$label: $how: $out and $in s, answers after $slow s; $said"
        runs=$(jq -c --arg how "$how" --argjson out "$out" --argjson in "$in" --argjson slow "$slow" --arg said "$said" \
            '. + [{how: $how, suspend_s: $out, resume_s: $in, answers_s: $slow, said: $said}]' <<< "$runs")
        sleep 2
        right one || { say "$label: $how: an answer is wrong" && return 1; }
    done
    away one && serve two || return
    sleep 3
    away two && back one || return
    for how in apart at-once; do
        for names in 'one two' 'two one' 'one two' 'two one'; do
            read -r from to <<< "$names"
            sleep 2
            began=$(now) said='' instead=()
            if [ "$how" = apart ]; then away "$from" || return; else instead=(--instead-of "$from"); fi
            back "$to" || return
            slow=$(since "$began")
            right "$to" || { say "$label: an answer is wrong" && return 1; }
            say "$label: $how: $to answers $slow s after $from had to stop; $said"
            switches=$(jq -c --arg how "$how" --argjson slow "$slow" '. + [{how: $how, switch_s: $slow}]' <<< "$switches")
        done
    done
    cryopod top --json > "/logs/$label.top.json"
    result "$(jq -n --arg case "$label" --arg runtime "$1" --argjson runs "$runs" --argjson switches "$switches" \
        --argjson kept "$(jq '[.[] | select(.step == "copy kept").done_bytes]' "/logs/$label.top.json")" '
        def mid(k): map(.[k]) | sort | .[(length - 1) / 2 | floor];
        def of(how): $runs | map(select(.how == how)) | {suspend_s: mid("suspend_s"), resume_s: mid("resume_s"), answers_s: mid("answers_s")};
        {case: $case, ok: true, runtime: $runtime, without: of("without"), first: of("first"), kept: of("kept"),
            switch_s: ($switches | map(select(.how == "apart")) | mid("switch_s")),
            switch_at_once_s: ($switches | map(select(.how == "at-once")) | mid("switch_s")), kept_bytes: $kept, runs: $runs, switches: $switches}')"
    jq -c 'del(.runs, .switches)' <<< "$(tail -n 1 /out/results.jsonl)"
}
