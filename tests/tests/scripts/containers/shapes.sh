# shapes.sh LOW [WHICH]: a generator of container shapes: kinds of mounts x namespaces, each checkpointed and restored in place,
# imported after its removal, and copied. A checkpoint may be refused if the container goes on. One that succeeds is
# restored, always, with the same mounts and files.
#
# WHICH is `all`: every pair of a mount and a namespace, hours; a namespace: the pairs with it; `each`: every mount and every
# namespace once, also with a job on the simulated GPU, half an hour; `sample`: a few in which each container has many mounts.
low=$1
which=${2:-sample}
mkimage
simulate "$low"
mkdir -p /srv/checkpoints
printf '[restore]\nallow = ["/srv/checkpoints"]\n' >> /etc/cryopod/config.toml
mkdir -p /etc/containers/containers.conf.d
echo -e '[engine]\nruntime_supports_json = ["crun", "runc", "cryopod-runtime"]' > /etc/containers/containers.conf.d/json.conf

# ---- what is mounted ----
make_sources() { # a new volume is empty, as one on another host is; podman makes its own anew
    rm -rf /srv/fresh && mkdir -p /srv/fresh
    podman volume rm -f named > /dev/null
}
mkdir -p /srv/real/sub /srv/data /srv/deep/er /srv/tree/below /srv/shared
for dir in real real/sub data deep deep/er shared; do echo "$dir" > "/srv/$dir/file"; done
ln -sfn real /srv/link
ln -sfn link /srv/chain
ln -sfn real/file /srv/linked
mount -t tmpfs tmpfs /srv/tree/below
echo below > /srv/tree/below/file
mkfifo /srv/fifo
python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("/srv/socket")'
echo secret | podman secret create secret - > /dev/null
# shellcheck disable=SC2016
printf '#!/bin/sh\nshift\n"$@" &\nwait\n' > /srv/init
chmod 755 /srv/init
ln -sfn init /srv/init-link
declare -A mounts=(
    [none]=''
    [directory]='-v /srv/data:/m/directory'
    [read-only]='-v /srv/data:/m/read-only:ro'
    [file]='-v /srv/data/file:/m/file'
    [linked-directory]='-v /srv/link:/m/linked-directory'
    [linked-file]='-v /srv/linked:/m/linked-file:ro'
    [link-to-a-link]='-v /srv/chain:/m/link-to-a-link'
    [through-a-link]='-v /srv/chain/sub:/m/through-a-link'
    [below-another]='-v /srv/data:/m/outer -v /srv/deep:/m/outer/inner'
    [file-below-another]='-v /srv/deep:/m/around -v /srv/data/file:/m/around/inner'
    [below-a-new-volume]='-v /srv/fresh:/m/fresh -v /srv/deep:/m/fresh/a/b -v /srv/data/file:/m/fresh/c'
    [secret]='--secret secret'
    [tmpfs]='--tmpfs /m/tmpfs'
    [below-a-tmpfs]='--tmpfs /m/t -v /srv/data:/m/t/inner'
    [tmpfs-below-another]='-v /srv/deep:/m/d --mount type=tmpfs,destination=/m/d/er'
    [tree]='-v /srv/tree:/m/tree:rbind'
    [slave]='-v /srv/shared:/m/slave:rslave'
    [shared]='-v /srv/shared:/m/shared:rshared'
    [named-volume]='-v named:/m/named'
    [device]='-v /dev/zero:/m/zero'
    [socket]='-v /srv/socket:/m/socket'
    [fifo]='-v /srv/fifo:/m/fifo'
    [shm]='-v /srv/shared:/dev/shm/own'
    [etc]='-v /srv/data/file:/etc/hosts -v /srv/link/file:/etc/localtime:ro'
    [read-only-root]='--read-only --tmpfs /m/tmpfs'
    [overlay]='-v /srv/data:/m/overlay:O'
    [image]='--mount type=image,source=localhost/busybox,destination=/m/image'
    [init]='--init --init-path /srv/init-link'
)
range='net.ipv4.ping_group_range=1 0'
declare -A namespaces=(
    [own]='--network none --sysctl net.core.somaxconn=77'
    [host-network]='--network host'
    [network-by-path]='--network ns:/run/netns/shapes'
    [network-of-another]='--network container:other'
    [host-ipc]='--network none --ipc host'
    [shareable-ipc]='--network none --ipc shareable'
    [host-uts]='--network none --uts host'
    [host-cgroup]='--network none --cgroupns host'
    [user]="--network none --uidmap 0:100000:65536 --sysctl $range"
    [user-default]='--network none --uidmap 0:100000:65536'
    [host-pid]='--network none --pid host'
    [pod]='--pod pod'
    [pod-with-users]='--pod pod'
)
ip netns add shapes
prepare() { # NAMESPACE: what the container needs beside it
    case $1 in
        network-of-another) podman run -d --name other --network none localhost/busybox sleep 10000 > /dev/null ;;
        pod | pod-with-users)
            local users=()
            if [ "$1" = pod-with-users ]; then users=(--uidmap 0:100000:65536); fi
            podman pod create --name pod --network none "${users[@]}" --infra-image localhost/busybox --infra-command 'sleep 10000' > /dev/null
            ;;
    esac
}
put_away() {
    podman rm -f -t 0 shape > /dev/null 2>&1 || true
    case $1 in
        network-of-another) podman rm -f -t 0 other > /dev/null 2>&1 || true ;;
        pod*) podman pod rm -f -t 0 pod > /dev/null 2>&1 || true ;;
    esac
}

# ---- one container ----
tried=0 refused=0 restored=0 engine=0 lost=()
declare -A reasons
words() { # sets `options` to the words of a mount's or a namespace's options; that of --sysctl has a blank
    options=()
    local word
    for word in ${1//$range/@range}; do options+=("${word/@range/$range}"); done
}
run_shape() { # OPTION...
    pod run -d --name shape "${workload[@]}" "${arguments[@]}" "$@" localhost/busybox "${command[@]}" > /dev/null 2> /tmp/said
}
shown() { # the mounts of the container below /m and elsewhere, with the first line of each file; settings of the network
    # shellcheck disable=SC2016
    podman exec shape sh -c 'cut -d" " -f5 /proc/self/mountinfo | grep -v -e ^/proc -e ^/sys -e "^/dev/\(nvidia\|null\)" | sort -u
        for f in /m/*/file /m/*/*/file /m/file /m/linked-file /m/fresh/c /m/fresh/a/b/file /run/secrets/secret /etc/localtime; do
            if [ -f "$f" ]; then echo "$f $(head -n 1 "$f")"; fi
        done
        cat /proc/sys/net/ipv4/ping_group_range /proc/sys/net/core/somaxconn' 2>&1
}
progress() { case $job in counter) count shape ;; *) ticks shape ;; esac; }
past() { local n && n=$(progress) && [ "${n:--1}" -ge "$1" ]; }
goes_on() { local n && n=$(progress) && within 60 past $((${n:-0} + 3)) && ! printed shape | grep -q CORRUPT; }
why() { # the line that says it
    { grep -h -o -E 'cryopod: .*' /tmp/said || tail -n 1 /tmp/said; } | tail -n 1 | sed -E "s/[0-9a-f]{64}/ID/g; s/$(podman inspect -f '{{.Id}}' shape 2> /dev/null || echo none)/ID/g" | cut -c 1-400
}
standing() { # what the engine says of the container, and what each of its processes does
    local id pid
    id=$(podman inspect -f '{{.Id}}' shape)
    podman inspect -f 'is {{.State.Status}}, {{.State.ExitCode}}, since {{.State.FinishedAt}}; conmon {{.State.ConmonPid}}' shape
    echo "printed '$(printed shape | tail -n 2 | tr '\n' ' ')';"
    grep -l -e "$id" /proc/[0-9]*/cgroup | while IFS=/ read -r _ _ pid _; do
        echo "$pid $(sed -n 's/^\(Name\|State\|TracerPid\|SigPnd\|ShdPnd\|SigBlk\):\t//p' "/proc/$pid/status" | tr '\n' ' ')" \
            "at $(cat "/proc/$pid/wchan") $(cat "/proc/$pid/syscall");"
    done
    find /sys/fs/cgroup -path "*$id*" -name cgroup.freeze -exec grep -H 1 {} +
}
lose() { # REASON
    lost+=("$1")
    outcome+=' LOST'
}
refuse() { # CELL: the checkpoint did not succeed, so the container must be there
    if goes_on; then
        refused=$((refused + 1))
        outcome+=' refused'
        reasons[$(why | sed -E 's/process [0-9]+/process N/g; s,/proc/[0-9]+,/proc/N,g')]+=" $1"
    else
        lose "$1: the checkpoint failed and the container is gone: $(why)"
    fi
}
judge() { # CELL WAY COMMAND...: the restore
    local cell=$1 way=$2 after && shift 2
    if ! "$@" > /tmp/said 2>&1; then
        lose "$cell, $way: $(why)"
    elif ! goes_on; then
        lose "$cell, $way: it stands still: $(standing 2>&1 | tr '\n' ' ')"
    elif after=$(shown) && [ "$after" != "$before" ]; then
        lose "$cell, $way: $(diff <(echo "$before") <(echo "$after") | tr '\n' ' ')"
    else
        restored=$((restored + 1))
        outcome+=" restored"
        return 0
    fi
    podman rm -f -t 0 shape > /dev/null 2>&1 || true
    return 1
}
cell() { # MOUNTS NAMESPACE: MOUNTS are names of kinds, with blanks between
    local name="$1 x $2" kind archive=/srv/checkpoints/shape.tar
    arguments=()
    for kind in $1; do words "${mounts[$kind]}" && arguments+=("${options[@]}"); done
    words "${namespaces[$2]}" && arguments+=("${options[@]}")
    if [ "$job" = gpu ]; then name="$name, GPU"; fi
    tried=$((tried + 1))
    outcome=''
    make_sources
    put_away "$2"
    prepare "$2"
    if ! run_shape; then # not every engine can run every shape
        engine=$((engine + 1))
        echo "not started: $name: $(tail -n 1 /tmp/said | cut -c 1-150)"
        put_away "$2"
        return 0
    fi
    wait_for past 3
    before=$(shown)
    # With the host's IPC podman keeps its own locks, files of the host's /dev/shm, with a checkpoint, and puts them back as
    # they were: it then waits for ever, with stock runtimes as well.
    if [ "$2" = host-ipc ]; then
        outcome=' (podman cannot)'
    elif pod container checkpoint shape > /tmp/said 2>&1; then
        judge "$name" 'in place' pod container restore shape || { run_shape && wait_for past 3; }
    else
        refuse "$name, in place"
    fi
    rm -f $archive
    local into=()
    if [[ "$2" == pod* ]]; then into=(--pod pod); fi
    if pod container checkpoint --export $archive shape > /tmp/said 2>&1; then
        podman rm -f -t 0 shape > /dev/null
        make_sources
        judge "$name" import pod container restore "${into[@]}" --import $archive && podman rm -f -t 0 shape > /dev/null
        chmod go-w $archive
        make_sources
        judge "$name" copy run_shape --annotation dev.cryopod.restore=$archive || true
    else
        refuse "$name, export"
    fi
    echo "$name:$outcome"
    put_away "$2"
}
with_counter() {
    job=counter workload=(--device /dev/nvidia0) command=("${counter[@]}")
}
with_gpu() {
    job=gpu command=(/cusim/cusim-client --mib 8 --interval-ms 100)
    workload=("${nodes[@]/#/--device=}" "${binds[@]/#/--volume=}" -e LD_LIBRARY_PATH=/cusim)
}

case $which in
    sample)
        with_counter
        cell 'directory read-only file linked-directory linked-file link-to-a-link through-a-link below-another tree slave named-volume device' own
        cell 'below-a-new-volume secret tmpfs below-a-tmpfs init' own
        cell 'linked-directory secret' user
        cell tree user-default
        with_gpu
        cell 'linked-file below-a-new-volume secret' network-by-path
        ;;
    *)
        mapfile -t kinds < <(printf '%s\n' "${!mounts[@]}" | sort)
        spaces=("$which")
        case $which in all | each) mapfile -t spaces < <(printf '%s\n' "${!namespaces[@]}" | sort) ;; esac
        for namespace in "${spaces[@]}"; do
            for kind in "${kinds[@]}"; do
                once=''
                if [ "$kind" = none ] || [ "$namespace" = own ]; then once=1; fi
                if [ -n "$once" ] || [ "$which" != each ]; then with_counter && cell "$kind" "$namespace"; fi
                if [ -n "$once" ]; then with_gpu && cell "$kind" "$namespace"; fi
            done
        done
        ;;
esac

echo "shapes under $low: $tried tried in three ways each, $engine not started by the engine, $restored restored, $refused refused, ${#lost[@]} lost"
for reason in "${!reasons[@]}"; do echo "refused: $reason:${reasons[$reason]}" | cut -c 1-1500; done
if [ ${#lost[@]} != 0 ]; then printf 'LOST: %s\n' "${lost[@]}" && exit 1; fi
test "$restored" -gt 0
if [ "$which" = sample ]; then test "$refused" = 0; fi
test -z "$(ls -A /run/cryopod)"
