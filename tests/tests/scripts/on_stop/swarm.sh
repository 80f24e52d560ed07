# swarm.sh PART: replicas that count and hold GPU memory move when their node is drained, and each goes on at its own count.
# PART `all`: then a rolling update, and a node that is lost.
place=/srv/place
mkdir -p "$place"
simulate runc
printf '[checkpoint]\nallow = [{ from = "%s", variable = true }]\n[restore]\nallow = [{ from = "%s", variable = true }]\n' \
    "$place" "$place" >> /etc/cryopod/config.toml
# Swarm gives a service no devices. As NVIDIA's runtime, this one puts them into the bundle.
cat > /usr/local/bin/gpu-runtime << 'T'
#!/bin/bash
bundle='' previous=''
for word; do
    if [ "$previous" = --bundle ]; then bundle=$word; fi
    previous=$word
done
if [[ " $* " == *" create "* ]] && [ "$bundle" ]; then
    for node in /dev/nvidiactl /dev/nvidia-uvm /dev/nvidia0 /dev/nvidia1; do
        echo "$node $((0x$(stat -c %t $node))) $((0x$(stat -c %T $node)))"
    done | jq -R 'split(" ") | {path: .[0], type: "c", major: .[1] | tonumber, minor: .[2] | tonumber, fileMode: 438, uid: 0, gid: 0}' |
        jq -s '{linux: {devices: ., resources: {devices: map({allow: true, type, major, minor, access: "rwm"})}}}' |
        jq -s '.[1] as $gpu | .[0] | .linux.devices += $gpu.linux.devices
            | .linux.resources.devices += $gpu.linux.resources.devices' "$bundle/config.json" - > "$bundle/new.json" &&
        mv "$bundle/new.json" "$bundle/config.json"
fi
exec cryopod-runtime "$@"
T
chmod +x /usr/local/bin/gpu-runtime
swarm_runtime /usr/local/bin/gpu-runtime
service=count
on_failure() {
    on 1 service ps count
    cat /var/log/cryopod-on-stop.log
    tail -q -n 5 /tmp/node*.log
}
cat /proc/devices > /srv/devices # the bed's, which a /proc of the node's own has not
# shellcheck disable=SC2016 # the node's shell expands it
swarm 'mount --bind /srv/devices /proc/devices; mkdir /run/cusim; /opt/build/cusim-server --socket /run/cusim/server.sock --dev-root /dev --gpus 2 --memory-mib 4096 > /tmp/gpus 2>&1 &
    until /opt/build/cusim-ctl --socket /run/cusim/server.sock status > /dev/null 2>&1; do sleep 0.05; done'

mounts=()
for bind in "${binds[@]}"; do mounts+=(--mount "type=bind,source=${bind%:*},target=${bind#*:}"); done
all() { # NODE...: TIME count.SLOT. LINE
    local n id name
    for n; do
        on "$n" ps -a --filter label=com.docker.swarm.service.name=count --format '{{.ID}} {{.Names}}' | while read -r id name; do
            on "$n" logs --timestamps "$id" 2> /dev/null | sed "s/ / ${name%.*}. /"
        done
    done | sort
}
each_once() { # SLOT: what its replicas have printed, one after the other
    ! grep CORRUPT /tmp/all && awk -v slot="count.$1." \
        '$2 == slot { if (n++ && $3 != last + 1) bad = 1; last = $3 } END { exit bad || !n }' /tmp/all
}
beyond() { # LINES: each replica has printed more than /tmp/before has
    all 1 2 3 > /tmp/all
    local slot
    for slot in 1 2 3 4; do
        [ "$(grep -c " count.$slot\." /tmp/all || true)" -ge $(($(grep -c " count.$slot\." /tmp/before || true) + $1)) ] || return 1
    done
}
go_on() { # each replica, at its own count
    local slot
    all 1 2 3 > /tmp/before
    wait_for beyond 3
    for slot in 1 2 3 4; do
        each_once $slot || { echo "replica $slot:" && cat /tmp/all && return 1; }
    done
}
: > /tmp/before
check 'a service of 4' on 1 service create -d -q --name count --network host --no-resolve-image --replicas 4 --restart-delay 1s \
    --stop-grace-period 60s --env LD_LIBRARY_PATH=/cusim "${mounts[@]}" \
    --env CRYOPOD_ON_STOP=checkpoint --env CRYOPOD_CHECKPOINT_TO=$place --env CRYOPOD_GRACE_S=60 --env CRYOPOD_LEASE_S=5 \
    --env CRYOPOD_RESTORE=latest:$place --env CRYOPOD_RESTORE_OTHERWISE=start \
    --env 'CRYOPOD_NAME={{.Service.Name}}.{{.Task.Slot}}' busybox /cusim/cusim-client
check '4 run' wait_for running 4 1 2 3
check 'they count' wait_for beyond 3
moved=$(replicas 2 count | wc -l)
check 'node 2 has some' test "$moved" -ge 1
check 'drain' on 1 node update --availability drain node2
check 'they move' wait_for running 4 1 3
check 'node 2 has none' wait_for running 0 2
check 'each goes on at its own count' go_on
check 'by a checkpoint each' test "$(ls -d $place/*/000001 | wc -l)" = "$moved"
if [ "$1" = all ]; then
    checkpoints() { [ "$(ls -d $place/*/0* | wc -l)" = "$1" ]; }
    check 'a rolling update' on 1 service update -d -q --force --update-parallelism 2 --update-delay 0s count
    check 'checkpoints each' wait_for checkpoints $((moved + 4))
    check '4 run' wait_for running 4 1 3
    check 'each goes on at its own count' go_on

    # ---- a node is lost ----
    kill -KILL "${nodes[3]}"
    check 'a lost node' wait_for running 4 1
    warm() { # each replica on node 1 began where a checkpoint ended
        local id first
        for id in $(replicas 1 count); do
            first=$(on 1 logs "$id" 2> /dev/null | head -n 1 | cut -d ' ' -f 1)
            [ "${first:-0}" -gt 0 ] || return 1
        done
    }
    check 'its replicas go on from their last checkpoints' wait_for warm
fi
