# refused_before.sh LOW: checkpoints that fail in any case are refused before anything is frozen: a stopped GPU process,
# another user's process where CAP_SYS_RESOURCE is missing, a second checkpoint at the same time, an export that podman
# would refuse after it.
low=$1
mkimage
simulate "$low" --proc-root /run/simulated
mount --bind /run/simulated/driver /proc/driver
on_failure() { cat /tmp/said; }
saying() { "$@" > /tmp/said 2>&1; }
refused() { # NAME WANT COMMAND...
    local name=$1 want=$2 && shift 2
    if saying "$@"; then echo "$name: went through" && exit 1; fi
    check "$name: said" grep -qF -- "$want" /tmp/said
}
gpu=(--network none "${nodes[@]/#/--device=}" "${binds[@]/#/--volume=}" -e LD_LIBRARY_PATH=/cusim)
goes_on() { local now && now=$(ticks "$1") && wait_for ticked "$1" $((now + 3)); }

pod run -d --name job "${gpu[@]}" localhost/busybox /cusim/cusim-client --mib 10 > /dev/null
wait_for ticked job 3
pid=$(podman inspect -f '{{.State.Pid}}' job)
kill -STOP "$pid"
wait_for grep -q 'State:.T' "/proc/$pid/status"
refused 'a stopped GPU process' "it is stopped by a signal" pod container checkpoint -R --export /tmp/job.tar job
check 'with the remedy' grep -qF "kill -CONT $pid" /tmp/said
kill -CONT "$pid"
check 'it goes on' goes_on job
check 'continued, it is checkpointed' saying pod container checkpoint -R --export /tmp/job.tar job

# The first is held in the middle.
cat > /tmp/hold.sh <<'EOF'
#!/bin/bash
[ "$CRTOOLS_SCRIPT_ACTION" = pre-dump ] || exit 0
touch /tmp/reached
until [ -e /tmp/go-on ]; do sleep 0.02; done
EOF
chmod 755 /tmp/hold.sh
cp /etc/criu/default.conf /tmp/default.conf
echo 'action-script /tmp/hold.sh' >> /etc/criu/default.conf
mkdir /tmp/first /tmp/second
cryopod-runtime checkpoint --leave-running --image-path /tmp/first --work-path /tmp/first "$(podman inspect -f '{{.Id}}' job)" > /tmp/first.said 2>&1 &
first=$!
wait_for test -e /tmp/reached
refused 'a second checkpoint at the same time' 'a checkpoint or pause of it is under way' \
    cryopod-runtime checkpoint --leave-running --image-path /tmp/second --work-path /tmp/second "$(podman inspect -f '{{.Id}}' job)"
touch /tmp/go-on
check 'the first succeeds' wait $first
cp /tmp/default.conf /etc/criu/default.conf
check 'it goes on' goes_on job
podman rm -f -t 0 job > /dev/null

# Without a GPU, too: there the low-level runtime holds the lock.
pod run -d --name c1 --network none localhost/busybox "${counter[@]}" > /dev/null
wait_for counted c1 3
id=$(podman inspect -f '{{.Id}}' c1)
bundle=$(podman inspect -f '{{.OCIConfigPath}}' c1)
exec 7< "${bundle%/*}"
flock -n 7
mkdir /tmp/third
refused 'a second checkpoint without a GPU' 'a checkpoint or pause of it is under way' \
    cryopod-runtime checkpoint --leave-running --image-path /tmp/third --work-path /tmp/third "$id"
exec 7<&-

for kind in ipc pid network; do
    shared=(--network none "--$kind=container:c1")
    if [ $kind = network ]; then shared=(--network container:c1); fi
    pod run -d --name other "${shared[@]}" localhost/busybox "${counter[@]}" > /dev/null
    wait_for counted other 3
    for flag in --export -e; do
        refused "$kind of another container, $flag" "it is in the $kind namespace of another container" pod container checkpoint $flag /tmp/other.tar other
    done
    now=$(count other)
    check 'it goes on' wait_for counted other $((now + 3))
    podman rm -f -t 0 other > /dev/null
done
check 'without the namespace an export works' saying pod container checkpoint --export /tmp/c1.tar c1
podman rm -f -t 0 c1 > /dev/null

# CRIU dumps a container in a pod's user namespace, and cannot join that again.
podman pod create --name pod --network none --uidmap 0:100000:65536 --infra-image localhost/busybox --infra-command 'sleep 10000' > /dev/null
for device in '' --device=/dev/nvidia0; do
    pod run -d --name inside --pod pod ${device:+"$device"} localhost/busybox "${counter[@]}" > /dev/null
    wait_for counted inside 3
    refused "a pod's user namespace, $device" 'is in a user namespace that it shares' pod container checkpoint inside
    now=$(count inside)
    check 'it goes on' wait_for counted inside $((now + 3))
    podman rm -f -t 0 inside > /dev/null
done
podman pod rm -f -t 0 pod > /dev/null

# Another user, where CRIU may not read its limits.
without=(setpriv --bounding-set=-sys_resource --inh-caps=-sys_resource --)
pod run -d --name user --network none --device /dev/nvidia0 --user 1000 localhost/busybox "${counter[@]}" > /dev/null
wait_for counted user 3
refused 'another user without CAP_SYS_RESOURCE' 'runs as another user, and this host has no CAP_SYS_RESOURCE' \
    "${without[@]}" podman --runtime cryopod-runtime container checkpoint --export /tmp/user.tar user
now=$(count user)
check 'it goes on' wait_for counted user $((now + 3))
check 'check says so' sh -c "${without[*]} cryopod check > /tmp/said || true; grep -q CAP_SYS_RESOURCE /tmp/said"
podman rm -f -t 0 user > /dev/null
