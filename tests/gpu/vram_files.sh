# vram_files.sh: the cases of VRAM files: checkpoints in place, two GPUs at once, suspend and resume, a chain of checkpoints of a
# training. Sourced by inside.sh.
# shellcheck shell=bash disable=SC2154,SC2034 # variables shared with machine.sh, cases.sh and inside.sh

vram() { # RUNTIME SIZE CONTENT on|off LEAVE LABEL: checkpoint and restore in place, without an archive
    local content=$3 mode=$4 leave=$5 label=$6 gap from took dir metadata before images save load
    low_level "$1"
    gpu_args "${on_gpus:-1}"
    job_command "$2" "$(seq -s , 0 $((${on_gpus:-1} - 1)))" "${content#random}"
    start job --annotation "dev.cryopod.vram=$mode" "${gpu[@]}" "$image" "${job[@]}" || return
    sleep 1
    from=$(now)
    # shellcheck disable=SC2086
    pod container checkpoint --print-stats --keep ${leave:+--leave-running} job > "/logs/$label.checkpoint.json" \
        2> "/logs/$label.checkpoint.err" || { cat "/logs/$label.checkpoint.err" && keep_logs job "$label" && return 1; }
    took=$(since "$from")
    keep_logs job "$label"
    dir=$(static_dir job)/checkpoint
    metadata=/logs/$label.cryopod.json
    images=$(du -sb "$dir" | cut -f1)
    [ "$(jq -r 'if .gpu.vram then "on" else "off" end' "$metadata")" = "$mode" ] || { say "$label: vram is not $mode" && return 1; }
    save=$(jq -n --argjson local "$took" --argjson images "$images" --slurpfile stats "/logs/$label.checkpoint.json" --slurpfile metadata "$metadata" '
        ($stats[0].container_statistics[0]) as $s | $metadata[0] as $c
        | {export_s: $local, plan_s: ($c.timings.plan_us / 1e6), dump_s: ($c.timings.dump_us / 1e6),
           durable_s: (($c.timings.durable_us // null) | if . then . / 1e6 else null end),
           frozen_s: (($s.criu_statistics.frozen_time // 0) / 1e6), image_bytes: $images, vram: $c.gpu.vram,
           processes: [$c.gpu.plugin_report.processes[] | .steps | map({(.step): (.micros / 1e6)}) | add]}')
    grep -h 'cryopod: ' "/logs/$label.dump.log" | sed "s/^/gpu-test: $label: /" || true
    if [ -n "$leave" ]; then
        before=$(lines job)
        verdict job "$label" "$before" || return
        gap=$(gap "/logs/$label.out")
        # What was copied once it went on comes back, too.
        podman kill job > /dev/null && wait_for state_is job exited || return
        before=$(lines job)
        pod container restore --keep job > "/logs/$label.said" 2>&1 || { cat "/logs/$label.said" && return 1; }
        verdict job "$label" "$before" || return
        load=null
    else
        before=$(lines job)
        from=$(now)
        pod container restore --print-stats --keep job > "/logs/$label.restore.json" 2> "/logs/$label.restore.err" ||
            { cat "/logs/$label.restore.err" && keep_logs job "$label" && return 1; }
        took=$(since "$from")
        keep_logs job "$label"
        grep -h 'cryopod: ' "/logs/$label.restore.log" | sed "s/^/gpu-test: $label: /" || true
        verdict job "$label" "$before" || return
        gap=$(gap "/logs/$label.out")
        load=$(jq -n --argjson local "$took" --slurpfile stats "/logs/$label.restore.json" \
            --arg log "$(grep -o -E 'process [0-9]+: [a-z]+ in [0-9]+ ms' "/logs/$label.restore.log" || true)" '
            ($stats[0].container_statistics[0]) as $s
            | {import_s: $local, criu_s: (($s.criu_statistics.restore_time // 0) / 1e6),
               processes: [$log | split("\n")[] | select(. != "") | capture("process (?<p>[0-9]+): (?<k>[a-z]+) in (?<v>[0-9]+) ms")
                 | {p, k, v: (.v | tonumber / 1000)}] | group_by(.p) | map(map({(.k): .v}) | add)}')
    fi
    result "$(jq -n --arg case "$label" --arg runtime "$1" --arg size "$2 $unit $content" --argjson save "$save" \
        --argjson load "$load" --argjson gap "$gap" \
        '{case: $case, ok: true, runtime: $runtime, size: $size, checkpoint: $save, restore: $load, longest_pause_s: $gap}')"
    jq -c '{case, checkpoint, restore, longest_pause_s}' <<< "$(tail -n 1 /out/results.jsonl)"
}

binaries=(/usr/local/bin/cryopod-runtime /usr/local/lib/cryopod/cryopod-cuda-agent /usr/local/lib/cryopod/cryopod_nvidia.so)
against() { # in place by this build and by GPU_TEST_OTHER's, in turns
    local rt=${runtimes%% *} i build
    mkdir /opt/work/this && cp "${binaries[@]}" /opt/work/this/
    for i in $(seq "$vram_runs"); do
        for build in this other; do
            cp -f "/opt/work/$build/cryopod-runtime" /usr/local/bin/
            cp -f "/opt/work/$build/"cryopod{-cuda-agent,_nvidia.so} /usr/local/lib/cryopod/
            run_case "against-$build.$i" vram "$rt" "$vram_size" random on ''
        done
    done
    cp -f /opt/work/this/cryopod-runtime /usr/local/bin/
    cp -f /opt/work/this/cryopod{-cuda-agent,_nvidia.so} /usr/local/lib/cryopod/
    medians
}

overlap() { # restores while the VRAM files are being read, and after, in turns
    local rt=${runtimes%% *} i
    for i in $(seq "$vram_runs"); do
        run_case "vram-overlap-on.$i" vram "$rt" "$vram_size" random on ''
        mount --bind /dev/null /dev/userfaultfd
        run_case "vram-overlap-off.$i" vram "$rt" "$vram_size" random on ''
        umount /dev/userfaultfd
    done
    medians
}

nothing_on_gpus() { [ -z "$(memory_on)" ]; }
no_process() { ! grep -qsE '[g]pujob|[c]usim-client|[v]ram-worker|[c]ryopod-cuda-agent' /proc/[0-9]*/cmdline; }
unreadable() { # RUNTIME SIZE LABEL: a damaged chunk, met while the driver restores: nothing is left; the whole checkpoint comes back
    local label=$3 dir shard end before from took
    low_level "$1"
    gpu_args 1
    job_command "$2" 0
    start job "${gpu[@]}" "$image" "${job[@]}" || return
    pod container checkpoint --keep job > "/logs/$label.said" 2>&1 || { cat "/logs/$label.said" && return 1; }
    dir=$(static_dir job)/checkpoint
    # A shard's last chunk is among the last of the memory.
    shard=$dir/vram-0000.img end=$(($(stat -c %s "$dir/vram-0000.img") - 4096))
    dd if="$shard" of=/tmp/whole bs=4096 count=1 iflag=skip_bytes skip="$end" status=none
    dd if=/dev/urandom of="$shard" bs=4096 count=1 oflag=seek_bytes seek="$end" conv=notrunc status=none
    before=$(lines job) from=$(now)
    if pod container restore --keep job > "/logs/$label.said" 2>&1; then say "$label: restored from a damaged chunk" && return 1; fi
    took=$(since "$from")
    keep_logs job "$label"
    grep -h 'cryopod: ' "/logs/$label.restore.log" | sed "s/^/gpu-test: $label: /" || true
    grep -q 'cryopod: Error: .*does not fit its digest' "/logs/$label.restore.log" || return
    wait_for no_process || return
    wait_for nothing_on_gpus || { memory_on && return 1; }
    dd if=/tmp/whole of="$shard" bs=4096 count=1 oflag=seek_bytes seek="$end" conv=notrunc status=none
    pod container restore --keep job > "/logs/$label.said" 2>&1 || { cat "/logs/$label.said" && return 1; }
    verdict job "$label" "$before" || return
    result "$(jq -n --arg case "$label" --arg runtime "$1" --arg size "$2 $unit" --argjson took "$took" \
        '{case: $case, ok: true, runtime: $runtime, size: $size, failed_after_s: $took}')"
}

vram_files() { # every way of the VRAM files, and each beside the way through CRIU
    local rt=${runtimes%% *} i
    for i in $(seq "$vram_runs"); do
        run_case "vram-random-on.$i" vram "$rt" "$vram_size" random on ''
        run_case "vram-running-on.$i" vram "$rt" "$vram_size" random on leave
        run_case "vram-half-on.$i" vram "$rt" "$vram_size" half on ''
        run_case "vram-zero-on.$i" vram "$rt" "$vram_size" zero on ''
        [ "$i" -gt "$vram_off_runs" ] || run_case "vram-random-off.$i" vram "$rt" "$vram_size" random off ''
    done
    if [ "$vram_off_runs" -gt 0 ]; then run_case vram-running-off vram "$rt" "$vram_size" random off leave; fi
    medians
}

medians() { # of the cases named CASE.1, CASE.2, ...
    local all
    all=$(jq -cs '
        def mid: map(select(. != null)) | sort | if length == 0 then null else .[(length - 1) / 2 | floor] end;
        [.[] | select(.ok and (.case | test("^(vram-[a-z]+-o[nf]+|against-[a-z]+)[.][0-9]+$")))] | group_by(.case | sub("[.][0-9]+$"; ""))
        | map({case: (.[0].case | sub("[.][0-9]+$"; "")), runs: length, size: .[0].size,
            frozen_s: (map(.checkpoint.frozen_s) | mid), checkpoint_s: (map(.checkpoint.export_s) | mid),
            dump_s: (map(.checkpoint.dump_s) | mid), durable_s: (map(.checkpoint.durable_s) | mid),
            pause_s: (map(.longest_pause_s) | mid), restore_s: (map(.restore.import_s) | mid),
            image_bytes: (map(.checkpoint.image_bytes) | mid)})' /out/results.jsonl)
    jq -c '.[]' <<< "$all"
    result "$(jq -n --argjson all "$all" '{case: "vram-medians", ok: true, medians: $all}')"
}

two_vrams() { # RUNTIME SIZE LABEL: one process on one GPU and two on two (GPU_TEST_MANY), in turn, in place; GiB a second of CRIU's dump
    local label=$3 n i
    [ "$gpus" -ge "$many" ] || skip "$label" "this machine has $gpus GPUs"
    for i in $(seq "$vram_runs"); do
        for n in 1 "$many"; do
            on_gpus=$n
            vram "$1" "$2" random on '' "$label-$n.$i" || return
            podman rm -f -t 0 job > /dev/null
        done
    done
    # shellcheck disable=SC2016
    result "$(jq -s --arg case "$label" --arg unit "$unit" --argjson size "$2" --argjson many "$many" '
        def mid: sort | .[(length - 1) / 2 | floor];
        def of(n): [.[] | select(.case | startswith("\($case)-\(n).")) | .checkpoint];
        def rate(n; seconds): [of(n)[] | n * $size / seconds] | mid;
        def both(seconds): {one: rate(1; seconds), two: rate($many; seconds)} | .ratio = .two / .one;
        {case: $case, ok: true, size: "\($many) x \($size) \($unit)", unit: "\($unit) a second",
         driver: both([.processes[].checkpoint] | max), dump: both(.dump_s), durable: both(.durable_s), podman: both(.export_s)}' \
        /out/results.jsonl)"
    say "$label: $(jq -c 'del(.ok)' <<< "$(tail -n 1 /out/results.jsonl)")"
}

# lines_of_each N: the fewest lines of one of N processes; 0 before all have printed.
lines_of_each() { podman logs job 2> /dev/null | awk -v n="$1" '$3 == "ok" {c[$5]++} END {for (p in c) {seen++; if (!m || c[p] < m) m = c[p]} print seen == n ? m : 0}'; }
all_printed() { [ "$(lines_of_each "$1")" -ge "$2" ]; }

processes() { # RUNTIME N LABEL: N processes of one container, spread over all GPUs, 8 MiB each: in place, left running, restored
    local label=$3 list i before way from took rows='[]'
    low_level "$1"
    gpu_args "$gpus"
    list=$(for ((i = 0; i < $2; i++)); do echo $((i % gpus)); done | paste -s -d ,)
    job=(/work/gpujob 0.0078125 8 "$list")
    [ -z "$sim" ] || job=(/cusim/cusim-client --mib 1 --gpus "$list" --procs "$2" --interval-ms 1000)
    pod run -d --name job "${gpu[@]}" "$image" "${job[@]}" > /dev/null || return
    wait_for all_printed "$2" 1 || { podman logs job | tail -n 5 && return 1; }
    for way in --leave-running ''; do
        from=$(now)
        # shellcheck disable=SC2086
        pod container checkpoint --keep $way job > "/logs/$label.said" 2>&1 || { cat "/logs/$label.said" && keep_logs job "$label" && return 1; }
        took=$(since "$from")
        keep_logs job "$label"
        rows=$(jq -c --arg way "${way:-ended}" --argjson took "$took" --slurpfile metadata "/logs/$label.cryopod.json" '$metadata[0] as $c
            | . + [{way: $way, took_s: $took, plan_s: ($c.timings.plan_us / 1e6), dump_s: ($c.timings.dump_us / 1e6),
                steps: ([$c.gpu.plugin_report.processes[] | .steps[]] | group_by(.step) | map({(.[0].step): (map(.micros) | max / 1e6)}) | add)}]' <<< "$rows")
        say "$label: $(jq -c '.[-1]' <<< "$rows")"
        [ -z "$way" ] || { before=$(lines_of_each "$2") && wait_for all_printed "$2" $((before + 2)) || return; }
    done
    before=$(lines_of_each "$2") from=$(now)
    pod container restore --keep job > "/logs/$label.said" 2>&1 || { cat "/logs/$label.said" && keep_logs job "$label" && return 1; }
    took=$(since "$from")
    wait_for all_printed "$2" $((before + 2)) || return
    verdict job "$label" 0 || return
    result "$(jq -n --arg case "$label" --arg runtime "$1" --argjson n "$2" --argjson gpus "$gpus" --argjson rows "$rows" --argjson took "$took" \
        '{case: $case, ok: true, runtime: $runtime, processes: $n, gpus: $gpus, runs: $rows, restore_s: $took}')"
    say "$label: $(tail -n 1 /out/results.jsonl)"
}

# at_once VERB NAME...: podman's checkpoint or restore of these containers in place, all at once; sets `took`.
at_once() {
    local verb=$1 name from bad=0 children=() && shift
    from=$(now)
    for name in "$@"; do
        pod container "$verb" --keep "$name" > "/logs/$name.said" 2>&1 &
        children+=($!)
    done
    for name in "${children[@]}"; do wait "$name" || bad=1; done
    took=$(since "$from")
    [ "$bad" = 0 ] || { for name in "$@"; do cat "/logs/$name.said" && keep_logs "$name" "$name"; done && return 1; }
}

two_containers() { # RUNTIME SIZE LABEL: one container with a GPU of two (GPU_TEST_MANY), and all at once, in turn, in place
    local label=$3 i n name rows='[]' save took before names all=()
    [ "$gpus" -ge "$many" ] || skip "$label" "this machine has $gpus GPUs"
    low_level "$1"
    for n in $(seq 0 $((many - 1))); do
        all+=("job$n")
        gpu_args 0
        gpu+=(--device "/dev/nvidia$(minor_of $n)")
        job_command "$2" 0
        start "job$n" --annotation dev.cryopod.vram=on "${gpu[@]}" "$image" "${job[@]}" || return
    done
    for i in $(seq "$vram_runs"); do
        for n in 1 "$many"; do
            names=("${all[@]:0:n}")
            before=$(lines "${names[-1]}")
            at_once checkpoint "${names[@]}" || return
            save=$took
            for name in "${names[@]}"; do keep_logs "$name" "$label-$n.$i.$name"; done
            at_once restore "${names[@]}" || return
            for name in "${names[@]}"; do keep_logs "$name" "$label-$n.$i.$name"; done
            verdict "${names[-1]}" "$label-$n.$i" "$before" || return
            rows=$(jq -c --argjson n "$n" --argjson s "$save" --argjson l "$took" '. + [{containers: $n, checkpoint_s: $s, restore_s: $l}]' <<< "$rows")
        done
    done
    # shellcheck disable=SC2016
    result "$(jq -n --arg case "$label" --arg size "$many x $2 $unit" --argjson many "$many" --argjson rows "$rows" '
        def mid(n; k): [$rows[] | select(.containers == n) | .[k]] | sort | .[(length - 1) / 2 | floor];
        {case: $case, ok: true, size: $size, runs: $rows, checkpoint_ratio: (mid($many; "checkpoint_s") / mid(1; "checkpoint_s")),
         restore_ratio: (mid($many; "restore_s") / mid(1; "restore_s"))}')"
    say "$label: $(tail -n 1 /out/results.jsonl)"
}

suspend_resume() { # RUNTIME SIZE LABEL: next to the driver's own calls, as often as $driver_runs says
    local label=$3 i from pid times='[]' before save load out in said driver=/opt/driver
    [ -z "$sim" ] || driver=/opt/cusim
    [ -x /opt/cusim/cusim-step ] || skip "$label" "cusim-step is not in the pack; build cryopod-simdriver in release"
    low_level "$1"
    gpu_args 1
    job_command "$2" 0
    start job "${gpu[@]}" "$image" "${job[@]}" || return
    pid=$(podman inspect --format '{{.State.Pid}}' job)
    for i in $(seq "$vram_runs"); do
        if [ "$i" -le "${driver_runs:-$vram_runs}" ]; then
            before=$(lines job)
            LD_LIBRARY_PATH=$driver /opt/cusim/cusim-step "$pid" lock checkpoint restore unlock > "/logs/$label.$i.driver" 2>&1 ||
                { cat "/logs/$label.$i.driver" && return 1; }
            save=$(awk '$1 == "checkpoint" {print $2}' "/logs/$label.$i.driver")
            load=$(awk '$1 == "restore" {print $2}' "/logs/$label.$i.driver")
            verdict job "$label" "$before" || return
        fi
        before=$(lines job)
        from=$(now)
        cryopod suspend job > "/logs/$label.$i.said" 2>&1 || { cat "/logs/$label.$i.said" && return 1; }
        out=$(since "$from")
        [ -z "$(memory_on)" ] || { say "$label: memory is left on GPU $(memory_on)" && return 1; }
        state_is job running || return
        from=$(now)
        cryopod resume job >> "/logs/$label.$i.said" 2>&1 || { cat "/logs/$label.$i.said" && return 1; }
        in=$(since "$from")
        verdict job "$label" "$before" || return
        said=$(paste -s -d ' ' "/logs/$label.$i.said")
        say "$label: driver $save and $load s; $said"
        times=$(jq -c --argjson d "$save" --argjson l "$load" --argjson o "$out" --argjson i "$in" --arg said "$said" \
            '. + [{driver_checkpoint_s: $d, driver_restore_s: $l, suspend_s: $o, resume_s: $i, said: $said}]' <<< "$times")
    done
    before=$(lines job)
    cryopod suspend --to /var/lib/containers/suspended job > "/logs/$label.files.said" 2>&1 &&
        cryopod resume job >> "/logs/$label.files.said" 2>&1 || { cat "/logs/$label.files.said" && return 1; }
    verdict job "$label" "$before" || return
    result "$(jq -n --arg case "$label" --arg runtime "$1" --arg size "$2 $unit" --argjson runs "$times" \
        --arg files "$(paste -s -d ' ' "/logs/$label.files.said")" '
        def mid(k): map(.[k]) | sort | .[(length - 1) / 2 | floor];
        {case: $case, ok: true, runtime: $runtime, size: $size, runs: $runs, files: $files,
            driver_checkpoint_s: ($runs | mid("driver_checkpoint_s")), suspend_s: ($runs | mid("suspend_s")),
            driver_restore_s: ($runs | mid("driver_restore_s")), resume_s: ($runs | mid("resume_s"))}
        | .suspend_times_faster = .driver_checkpoint_s / .suspend_s')"
    jq -c 'del(.runs)' <<< "$(tail -n 1 /out/results.jsonl)"
}

# one_loss_a_step FILE...: no step has two losses, and the first file's are all there.
one_loss_a_step() {
    cat "$@" | awk '$3 == "CORRUPT" {bad = 1} $3 == "ok" {if ($1 in loss && loss[$1] != $2) bad = 1; loss[$1] = $2} END {exit bad}'
}

chain() { # RUNTIME LABEL: a training with a checkpoint every few seconds, each building upon the one before; each restores
    local label=$2 id n dir=/var/lib/containers/chain every=${GPU_TEST_CHAIN_EVERY:-10} count=12 started static before rows='[]' row
    [ -n "$sim$python" ] || skip "$label" "no Python with torch on this machine"
    [ -z "$sim" ] || { every=1 && count=4; }
    low_level "$1"
    layers=$chain_layers
    train_command 1000000
    if [ -n "$sim" ]; then train=(/cusim/cusim-client --mib 100 --train-mib 8); fi
    mkdir -p "$dir"
    pod run -d --name whole "${gpu[@]}" "$image" "${train[@]}" > /dev/null || return
    start job --annotation dev.cryopod.parent=auto --annotation dev.cryopod.vram=on "${gpu[@]}" "$image" "${train[@]}" || return
    id=$(podman inspect --format '{{.Id}}' job)
    for n in $(seq "$count"); do
        started=$(now)
        cryopod-runtime checkpoint --leave-running --image-path "$dir/$n" --work-path /logs "$id" > "/logs/$label.$n.said" 2>&1 ||
            { cat "/logs/$label.$n.said" && return 1; }
        row=$(jq -c --argjson n "$n" --argjson took "$(since "$started")" '{n: $n, took_s: $took, dump_s: (.timings.dump_us / 1e6),
            durable_s: ((.timings.durable_us // 0) / 1e6), bytes: .gpu.vram.bytes, stored_bytes: .gpu.vram.stored_bytes,
            chunks: .gpu.vram.chunks, parent: .gpu.vram.parent, zero: .gpu.vram.zero}' "$dir/$n/cryopod.json") || return
        say "$label: $row"
        rows=$(jq -c --argjson row "$row" '. + [$row]' <<< "$rows")
        sleep "$(jq -n "[0, $every - $(since "$started")] | max")"
    done
    before=$(lines job)
    wait_for more_lines job $((before + 5)) || return
    # What the training had come to is in the logs; from here on it goes on from each checkpoint in turn.
    podman kill job > /dev/null && wait_for state_is job exited || return
    podman logs job > "/logs/$label.job.out" 2>&1
    podman logs whole > "/logs/$label.whole.out" 2>&1
    podman rm -f -t 0 whole > /dev/null
    one_loss_a_step "/logs/$label.whole.out" "/logs/$label.job.out" || { say "$label: the losses differ" && return 1; }
    static=$(static_dir job)
    for n in $(seq "$count"); do
        rm -rf "$static/checkpoint"
        ln -s "$dir/$n" "$static/checkpoint"
        before=$(lines job)
        pod container restore --keep job > "/logs/$label.restore.$n" 2>&1 || { cat "/logs/$label.restore.$n" && keep_logs job "$label.$n" && return 1; }
        wait_for more_lines job $((before + 3)) || return
        podman kill job > /dev/null && wait_for state_is job exited || return
    done
    rm -f "$static/checkpoint"
    podman logs job > "/logs/$label.job.out" 2>&1
    one_loss_a_step "/logs/$label.whole.out" "/logs/$label.job.out" || { say "$label: restored, the losses differ" && return 1; }
    result "$(jq -n --arg case "$label" --arg runtime "$1" --argjson rows "$rows" --argjson steps "$(lines job)" \
        --arg info "$(grep -h '^#' "/logs/$label.job.out" | head -n 1)" --argjson gap "$(gap "/logs/$label.whole.out")" \
        '{case: $case, ok: true, runtime: $runtime, info: $info, checkpoints: $rows, restored: ($rows | length), steps_compared: $steps}')"
    rm -rf "$dir"
}

memory_used() { # on the first GPU
    if [ -n "$sim" ]; then
        /opt/cusim/cusim-ctl --socket /run/cusim/server.sock status | jq '.gpus[0].pids | length'
    else
        chroot /host "$smi" --id=0 --query-gpu=memory.used --format=csv,noheader
    fi
}

kill_named() { # NAME: all processes of this name
    local comm
    for comm in /proc/[0-9]*/comm; do
        if [ "$(cat "$comm" 2> /dev/null)" = "$1" ]; then comm=${comm%/comm} && kill -KILL "${comm#/proc/}"; fi
    done 2> /dev/null
}

# meanwhile_killed KILL COMMAND...: runs it while, if KILL is not empty, something of it is killed at a random moment.
meanwhile_killed() {
    local kill=$1 code=0 names=(criu cryopod-cuda-ag cryopod-runtime "$runtime") && shift
    if [ -n "$kill" ]; then
        { sleep "0.$((RANDOM % 10))$((RANDOM % 10))" && kill_named "${names[RANDOM % 4]}"; } &
    fi
    "$@" >> "/logs/$label.said" 2>&1 || code=$?
    [ -z "$kill" ] || wait $!
    return $code
}

cycles() { # RUNTIME SIZE CYCLES KILLS LABEL: checkpoints and restores in place, of which some are killed; nothing is left on the GPU
    local runtime=$1 cycles=$3 label=$5 used before cycle failures=0 first second
    low_level "$1"
    gpu_args 1
    used=$(memory_used)
    job_command "$2" 0
    start job "${gpu[@]}" "$image" "${job[@]}" || return
    for ((cycle = 1; cycle <= cycles; cycle++)); do
        first='' second=''
        if [ $((cycle * $4 / cycles)) -gt $(((cycle - 1) * $4 / cycles)) ]; then [ $((RANDOM % 2)) = 0 ] && first=yes || second=yes; fi
        before=$(lines job)
        if ! meanwhile_killed "$first" pod container checkpoint --keep job; then
            [ -n "$first" ] || { tail -n 5 "/logs/$label.said" && keep_logs job "$label" && return 1; }
            failures=$((failures + 1))
            # The container goes on, or it had ended with a complete checkpoint when the runtime was killed.
            before=$(lines job)
            ! state_is job exited || pod container restore --keep job >> "/logs/$label.said" 2>&1
            wait_for more_lines job $((before + 3)) || { say "$label: cycle $cycle: it stands still after a killed checkpoint" && keep_logs job "$label" && return 1; }
            continue
        fi
        if ! meanwhile_killed "$second" pod container restore --keep job; then
            [ -n "$second" ] || { tail -n 5 "/logs/$label.said" && keep_logs job "$label" && return 1; }
            failures=$((failures + 1))
            pod container restore --keep job >> "/logs/$label.said" 2>&1 || { tail -n 5 "/logs/$label.said" && return 1; }
        fi
        wait_for more_lines job $((before + 3)) || { say "$label: cycle $cycle: it does not go on" && keep_logs job "$label" && return 1; }
    done
    verdict job "$label" "$(lines job)" || return
    pod rm -f -t 0 job > /dev/null || return
    used_as_before() { [ "$(memory_used)" = "$used" ]; }
    wait_for used_as_before || { say "$label: $used was used on the GPU, and $(memory_used) is" && return 1; }
    say "$label: $cycles cycles, $4 killed, of which $failures failed; GPU memory used before and after: $used"
    result "$(jq -n --arg case "$label" --arg runtime "$1" --arg size "$2 $unit" --argjson cycles "$cycles" --argjson kills "$4" --argjson failures "$failures" \
        '{case: $case, ok: true, runtime: $runtime, size: $size, cycles: $cycles, kills: $kills, failures: $failures}')"
}
