# engines.sh: docker, ctr and the CRI beside podman: checkpoint and restore as their users call them, with the store and without
# it, and copies. Sourced by inside.sh.
# shellcheck shell=bash disable=SC2154,SC2034 # variables shared with inside.sh and cases.sh

engines=/var/lib/containers/engines # on the file system that podman has, too
containerd_pid='' dockerd_pid=''

# engines_up: containerd and dockerd, with cryopod's shim in place of containerd's, as `cryopod setup docker` makes it.
engines_up() {
    [ -z "$containerd_pid" ] || return 0
    mkdir -p "$engines"/{tmp,docker,cryopod,out} /etc/containerd /usr/local/sbin
    [ -e /var/lib/cryopod ] || ln -s "$engines/cryopod" /var/lib/cryopod
    ln -sf /usr/local/bin/containerd-shim-cryopod-v2 /usr/local/sbin/containerd-shim-runc-v2
    cat > /etc/containerd/config.toml << T
version = 3
root = "$engines/containerd"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "localhost/pause:latest"
[plugins."io.containerd.cri.v1.runtime"]
  disable_apparmor = true
  restrict_oom_score_adj = true
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.cryopod]
  runtime_type = "io.containerd.cryopod.v2"
  pod_annotations = ["dev.cryopod.restore", "dev.cryopod.store"]
  container_annotations = ["dev.cryopod.restore", "dev.cryopod.store"]
T
    # Where this cgroup has no controller of the CPU, no container can have the shares that each pod has.
    grep -qw cpu /sys/fs/cgroup/cgroup.subtree_control || cat > /usr/local/sbin/runc << 'T'
#!/bin/bash
for ((i = 1; i < $#; i++)); do
    config=${*:i+1:1}/config.json
    if [ "${!i}" = --bundle ] && jq 'del(.linux.resources.cpu)' "$config" > "$config.part"; then mv "$config.part" "$config"; fi
done
exec /usr/sbin/runc "$@"
T
    [ ! -e /usr/local/sbin/runc ] || chmod +x /usr/local/sbin/runc
    export CONTAINERD_SUPPRESS_DEPRECATION_WARNINGS=1
    TMPDIR=$engines/tmp containerd > /logs/containerd.log 2>&1 &
    containerd_pid=$!
    wait_for ctr version > /dev/null 2>&1 || { tail -n 20 /logs/containerd.log && return 1; }
    if [ -x /usr/sbin/dockerd ]; then dockerd_up || return; fi
    podman save -q --format oci-archive -o "$engines/machine.oci" "$image" || return
    ctr images import "$engines/machine.oci" > /dev/null || return
    # Pods: they need an image of their own, whose program waits, and the host's names.
    touch /etc/hosts /etc/resolv.conf
    mkdir -p "$engines/pause/bin" && cp /usr/bin/busybox "$engines/pause/bin/" || return
    tar -C "$engines/pause" -c . | podman import -q --change 'CMD ["/bin/busybox", "sleep", "1000000"]' - localhost/pause > /dev/null || return
    podman save -q --format oci-archive -o "$engines/pause.oci" localhost/pause || return
    local image
    for image in machine pause; do ctr --namespace k8s.io images import "$engines/$image.oci" > /dev/null || return; done
    # A pod's mounts bring those below them along.
    mkdir -p "$engines/usr" && mount --bind "$usr" "$engines/usr" && mount --make-private "$engines/usr"
}

dockerd_up() {
    dockerd --containerd /run/containerd/containerd.sock --data-root "$engines/docker" --exec-opt native.cgroupdriver=cgroupfs --bridge none \
        --userland-proxy=false --iptables=false --ip6tables=false --experimental --add-runtime cryopod=/usr/local/bin/cryopod-runtime > /logs/dockerd.log 2>&1 &
    dockerd_pid=$!
    wait_for docker version > /dev/null 2>&1 || { tail -n 20 /logs/dockerd.log && return 1; }
    docker import /tmp/machine.tar machine > /dev/null
}

engines_down() {
    [ -n "$containerd_pid" ] || return 0
    kill $dockerd_pid "$containerd_pid"
    wait $dockerd_pid "$containerd_pid" 2> /dev/null
    umount "$engines/usr"
    dockerd_pid='' containerd_pid=''
}

# engine_args: fills `docker_args` and `ctr_args` with what a container needs to use the first GPU.
engine_args() {
    local node pair target
    docker_args=(--runtime cryopod --network none --security-opt seccomp=unconfined)
    # ctr's shares of the CPU would need a controller, which this cgroup may not have.
    ctr_args=(--null-io --cpu-shares 0 --runtime io.containerd.cryopod.v2)
    for node in /dev/nvidiactl /dev/nvidia-uvm /dev/nvidia-uvm-tools "/dev/nvidia$(minor_of 0)"; do
        if [ -e "$node" ]; then docker_args+=(--device "$node") ctr_args+=(--device "$node"); fi
    done
    for pair in "$usr:/usr" /opt/work:/work "$@" $([ -n "$sim" ] && echo /opt/cusim:/cusim || echo /opt/driver:/driver); do
        docker_args+=(--mount "type=bind,src=${pair%%:*},dst=${pair#*:},readonly,bind-recursive=disabled")
        ctr_args+=(--mount "type=bind,src=${pair%%:*},dst=${pair#*:},options=bind:ro")
    done
    for pair in "$engines/out:/out" $([ -z "$sim" ] || echo /run/cusim:/run/cusim); do
        docker_args+=(-v "$pair")
        ctr_args+=(--mount "type=bind,src=${pair%%:*},dst=${pair#*:},options=bind:rw")
    done
    target=$([ -n "$sim" ] && echo /cusim || echo /driver)
    docker_args+=(-e "LD_LIBRARY_PATH=$target")
    ctr_args+=(--env "LD_LIBRARY_PATH=$target")
}

# engine_run ENGINE NAME ARG... -- COMMAND...: a container whose output is in $engines/out/NAME.
engine_run() {
    local engine=$1 name=$2 args=() && shift 2
    while [ "$1" != -- ]; do args+=("$1") && shift; done
    # shellcheck disable=SC2016
    set -- sh -c 'out=$1; shift; exec "$@" >> "/out/$out" 2>&1' sh "$name" "${@:2}"
    : > "$engines/out/$name"
    case $engine in
        podman) pod run -d --name "$name" "${gpu[@]}" -v "$engines/out:/out" "${args[@]}" "$image" "$@" ;;
        docker) docker run -d --name "$name" "${docker_args[@]}" "${args[@]}" machine "$@" ;;
        ctr) ctr run -d "${ctr_args[@]}" "${args[@]}" localhost/machine:latest "$name" "$@" ;;
    esac > "/logs/$label.$name.run" 2>&1 || { cat "/logs/$label.$name.run" && return 1; }
}

# The CRI writes time, stream and F before each line.
engine_output() { sed 's/^[^ ]* stdout F //' "$engines/out/$1"; }
engine_lines() { grep -c -E ' (ok|CORRUPT) ' "$engines/out/$1" || true; }
engine_more() { [ "$(engine_lines "$1")" -ge "$2" ]; }

# engine_checkpoint ENGINE NAME: as its users call it; the container ends.
engine_checkpoint() {
    case $1 in
        podman) pod container checkpoint "$2" ;;
        docker) docker checkpoint create "$2" cp ;;
        ctr) ctr containers checkpoint --task --image --rw "$2" localhost/checkpoint:1 ;;
    esac > "/logs/$label.checkpoint" 2>&1 || { cat "/logs/$label.checkpoint" && return 1; }
}

ctr_stopped() { [ "$(ctr tasks ls | awk -v id="$1" '$1 == id {print $3}')" = STOPPED ]; }
docker_ended() { [ "$(docker inspect -f '{{.State.Running}}' "$1")" = false ]; }

engine_end() { # ENGINE NAME: after a checkpoint
    case $1 in
        docker) wait_for docker_ended "$2" ;;
        ctr)
            ctr tasks kill -s SIGKILL "$2" 2> /dev/null
            wait_for ctr_stopped "$2" && { ctr tasks delete "$2" > /dev/null 2>&1 || true; } && ctr containers rm "$2"
            ;;
    esac
}

engine_restore() { # ENGINE NAME
    case $1 in
        podman) pod container restore "$2" ;;
        docker) docker start --checkpoint cp "$2" ;;
        ctr) ctr containers restore --rw --live "$2" localhost/checkpoint:1 ;;
    esac > "/logs/$label.restore" 2>&1 || { cat "/logs/$label.restore" && return 1; }
}

engine_clear() {
    podman rm -f -t 0 -a > /dev/null 2>&1
    [ -z "$dockerd_pid" ] || docker rm -f $(docker ps -aq) > /dev/null 2>&1
    local id
    for id in $(ctr containers ls -q); do
        ctr tasks kill -s SIGKILL "$id" > /dev/null 2>&1 && wait_for ctr_stopped "$id"
        ctr tasks delete "$id" > /dev/null 2>&1
        ctr containers rm "$id" > /dev/null 2>&1
    done
    for id in $(ctr --namespace k8s.io containers ls -q 'labels."io.cri-containerd.kind"==sandbox'); do cri_end "$id" > /dev/null 2>&1; done
    ctr snapshots rm job > /dev/null 2>&1 # of a container that could not be started
    ctr images rm --sync localhost/checkpoint:1 > /dev/null 2>&1
    rm -f "$engines"/out/*
    printf '[store]\ngrace_s = 0\n' > /tmp/clean.toml
    CRYOPOD_CONFIG=/tmp/clean.toml cryopod store prune --unused -q || true
}

# engine_verdict NAME LINES: it has printed 5 lines more, nothing is corrupt, and the sum is what it was.
engine_verdict() {
    wait_for engine_more "$1" $(($2 + 5)) || return
    engine_output "$1" > "/logs/$label.out"
    if grep -q -E 'CORRUPT|rror' "/logs/$label.out"; then say "$label: the memory has changed, or CUDA failed" && return 1; fi
    [ "$(awk '/ ok / {print $2}' "/logs/$label.out" | sort -u | wc -l)" = 1 ]
}

engine_trip() { # ENGINE SIZE STORE LABEL: STORE on, off, or the default
    local engine=$1 label=$4 from save load before entries
    low_level runc
    if [ "$3" != default ]; then printf '[store]\nuse = "%s"\n' "$3" >> /etc/cryopod/config.toml; fi
    gpu_args 1
    engine_args
    job_command "$2" 0
    engine_run "$engine" job -- "${job[@]}" || return
    wait_for engine_more job 3 || { tail -n 5 "$engines/out/job" && return 1; }
    from=$(now)
    engine_checkpoint "$engine" job || return
    save=$(since "$from")
    engine_end "$engine" job || return
    before=$(engine_lines job)
    entries=$(cryopod store ls --json | jq length)
    from=$(now)
    engine_restore "$engine" job || return
    load=$(since "$from")
    engine_verdict job "$before" || return
    result "$(jq -n --arg case "$label" --arg size "$2 $unit" --argjson save "$save" --argjson load "$load" --argjson entries "$entries" \
        --argjson gap "$(gap "/logs/$label.out")" '{case: $case, ok: true, runtime: "runc", size: $size, store_entries: $entries,
            checkpoint: {export_s: $save}, restore: {import_s: $load}, longest_pause_s: $gap}')"
    say "$label: checkpoint $save s, restore $load s, $entries entries in the store"
}

engine_left_running() { # SIZE LABEL: podman's checkpoint of a container that goes on, as it does under ctr and the CRI
    local label=$2 from save
    low_level runc
    gpu_args 1
    engine_args
    job_command "$1" 0
    engine_run podman job -- "${job[@]}" || return
    wait_for engine_more job 3 || return
    from=$(now)
    pod container checkpoint --leave-running job > "/logs/$label.checkpoint" 2>&1 || { cat "/logs/$label.checkpoint" && return 1; }
    save=$(since "$from")
    engine_verdict job "$(engine_lines job)" || return
    result "$(jq -n --arg case "$label" --arg size "$1 $unit" --argjson save "$save" --argjson gap "$(gap "/logs/$label.out")" \
        '{case: $case, ok: true, runtime: "runc", size: $size, checkpoint: {export_s: $save}, longest_pause_s: $gap}')"
    say "$label: checkpoint $save s"
}

engine_copies() { # ENGINE SIZE LABEL: containers that begin at a checkpoint, from the host's cache
    local engine=$1 label=$3 archive=$engines/copies/job.tar from times=() i
    low_level runc
    printf '[restore]\nallow = ["%s/copies"]\n[cache]\npath = "%s/cache"\n' "$engines" "$engines" >> /etc/cryopod/config.toml
    mkdir -p -m 755 "$engines/copies"
    gpu_args 1
    engine_args
    job_command "$2" 0
    engine_run "$engine" job -- "${job[@]}" || return
    wait_for engine_more job 3 || return
    cryopod export job -e "${engine/ctr/containerd}" --leave-running -q --replace -o "$archive" > "/logs/$label.export" 2>&1 || { cat "/logs/$label.export" && return 1; }
    engine_clear
    cryopod cache pull -q "$archive" > /dev/null || return
    for i in 1 2 3; do
        # The process goes on to write where its checkpoint did.
        : > "$engines/out/job"
        from=$(now)
        engine_run "$engine" job --annotation "dev.cryopod.restore=$archive" -- "${job[@]}" || return
        wait_for engine_more job 1 || return
        times+=("$(since "$from")")
        engine_verdict job 1 || return
        engine_clear
    done
    result "$(jq -n --arg case "$label" --arg size "$2 $unit" --argjson warm "$(jq -n '$ARGS.positional | map(tonumber)' --args "${times[@]}")" \
        '{case: $case, ok: true, runtime: "runc", size: $size, warm_s: $warm}')"
    say "$label: first line after ${times[*]} s"
    rm -rf "$engines/copies" "$engines/cache"
}

# cri METHOD JSON
cri() { GRPC_LIMIT=600 grpc.sh /run/containerd/containerd.sock "runtime.v1.RuntimeService/$1" "$2"; }

# cri_start NAME [ANNOTATION VALUE]: a pod with one container, both called NAME; its output is in $engines/out/NAME. Sets pod and container.
cri_start() {
    local sandbox devices
    : > "$engines/out/$1"
    devices=$(printf '%s\n' /dev/nvidiactl /dev/nvidia-uvm /dev/nvidia-uvm-tools "/dev/nvidia$(minor_of 0)" | while read -r node; do
        if [ -e "$node" ]; then echo "$node"; fi
    done | jq -Rnc '[inputs | [8, [[1, .], [2, .], [3, "rwm"]]]]')
    # On the host's network, so that no plugin of the CNI is needed.
    sandbox=$(jq -nc --arg name "$1" --arg out "$engines/out" --arg key "${2:-}" --arg value "${3:-}" '[[1, [[1, $name], [2, $name], [3, "ns"]]], [3, $out],
        [8, [[2, [[1, [[1, 2], [2, 1], [3, 1]]]]]]]] + if $key == "" then [] else [[7, [[1, $key], [2, $value]]]] end')
    pod=$(cri RunPodSandbox "[[1,$sandbox],[2,\"cryopod\"]]") || return
    container=$(cri CreateContainer "$(jq -nc --arg pod "$pod" --argjson sandbox "$sandbox" --argjson devices "$devices" --arg usr "$engines/usr" \
        --arg name "$1" --arg sim "$sim" '[[1, $pod], [2, [[1, [[1, $name]]], [2, [[1, "localhost/machine:latest"]]]]
        + ($ARGS.positional | map([3, .])) + $devices + [[11, $name], [6, [[1, "LD_LIBRARY_PATH"], [2, if $sim == "" then "/driver" else "/cusim" end]]]]
        + ([[$usr, "/usr", 1], ["/opt/work", "/work", 1]] + if $sim == "" then [["/opt/driver", "/driver", 1]]
            else [["/opt/cusim", "/cusim", 1], ["/run/cusim", "/run/cusim", 0]] end | map([7, [[1, .[1]], [2, .[0]], [3, .[2]]]]))],
        [3, $sandbox]]' --args -- "${job[@]}")") || return
    cri StartContainer "[[1,\"$container\"]]" > /dev/null
}
cri_end() { cri StopPodSandbox "[[1,\"$1\"]]" > /dev/null && cri RemovePodSandbox "[[1,\"$1\"]]" > /dev/null; }

# cri_trip SIZE STORE LABEL: a pod, its checkpoint, and two more that begin there, at the same time.
cri_trip() {
    local label=$3 archive=$engines/copies/job.tar from save pods=() pod container loads=() times=() entries i
    low_level runc
    printf '[restore]\nallow = [{ from = "%s/copies", kubernetes = ["ns"] }]\n[cache]\npath = "%s/cache"\n' "$engines" "$engines" >> /etc/cryopod/config.toml
    rm -rf "$engines/copies" && mkdir -m 755 "$engines/copies"
    job_command "$1" 0
    cri_start job dev.cryopod.store "$2" || return
    wait_for engine_more job 3 || { tail -n 5 "$engines/out/job" && return 1; }
    from=$(now)
    cri CheckpointContainer "[[1,\"$container\"],[2,\"$archive\"],[3,600]]" > /dev/null || return
    save=$(since "$from")
    engine_verdict job "$(engine_lines job)" || return
    entries=$(cryopod store ls --json | jq length)
    cri_end "$pod" || return
    for i in 1 2; do
        from=$(now)
        cri_start "copy$i" dev.cryopod.restore "$archive" || return
        pods+=("$pod") loads+=("$(since "$from")")
        wait_for engine_more "copy$i" 1 || return
        times+=("$(since "$from")")
    done
    for i in 1 2; do
        engine_verdict "copy$i" "$(engine_lines "copy$i")" || return
        [ "$(awk '/ ok / {print $2}' "/logs/$label.out" | sort -u)" = "$(engine_output job | awk '/ ok / {print $2}' | sort -u)" ] || { say "$label: copy $i has another sum" && return 1; }
        [ "$(engine_output "copy$i" | awk 'NR == 1 {print $1}')" -ge 3 ] || { say "$label: copy $i began anew" && return 1; }
    done
    for i in 0 1; do cri_end "${pods[i]}" || return; done
    result "$(jq -n --arg case "$label" --arg size "$1 $unit" --argjson save "$save" --argjson entries "$entries" --argjson load "${loads[0]}" \
        --argjson archive "$(stat -c %s "$archive")" --argjson warm "$(jq -n '$ARGS.positional | map(tonumber)' --args "${times[@]}")" \
        '{case: $case, ok: true, runtime: "runc", size: $size, store_entries: $entries, checkpoint: {export_s: $save, archive_bytes: $archive},
            restore: {import_s: $load}, warm_s: $warm}')"
    say "$label: checkpoint $save s, $entries entries in the store; two copies: started after ${loads[*]} s, first line after ${times[*]} s"
    rm -rf "$engines"/{copies,cache,cryopod/store} # nobody says where the CRI's archives are
}

engine_case() { # LABEL FUNCTION ARG...
    run_case "$@"
    engine_clear
}

# engine_part ENGINE: beside podman in place, in the same run
engine_part() {
    local size
    if ! type containerd "${1/cri/ctr}" > /dev/null 2>&1; then
        (skip "$1" "dist/gpu-engines.tar.zst has no $1; pack.sh engines makes it")
        return
    fi
    engines_up || { failed=$((failed + 1)) && return; }
    for size in $sizes; do
        engine_case "podman-$size-in-place" engine_trip podman "$size" default
        [ "$1" = docker ] || engine_case "podman-$size-left-running" engine_left_running "$size"
        if [ "$1" = cri ]; then
            engine_case "cri-$size" cri_trip "$size" off
            engine_case "cri-$size-store" cri_trip "$size" on
            continue
        fi
        engine_case "$1-$size" engine_trip "$1" "$size" default
        engine_case "$1-$size-again" engine_trip "$1" "$size" default
        engine_case "podman-$size-in-place-again" engine_trip podman "$size" default
    done
    [ "$1" != cri ] || return 0
    for size in $store_off_sizes; do engine_case "$1-$size-store-off" engine_trip "$1" "$size" off; done
    engine_case "podman-2-copies" engine_copies podman 2
    engine_case "$1-2-copies" engine_copies "$1" 2
}
