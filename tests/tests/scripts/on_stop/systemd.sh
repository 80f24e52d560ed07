# systemd.sh: stops that are checkpoints, of systemd's units: examples/podman/job.container, and the same with a GPU. Each of two
# nodes has a systemd and a root of podman's storage of its own, and /mnt/place is that of both.
simulate crun
place=/mnt/place log=/var/log/cryopod-on-stop.log
mkdir -p "$place"
printf '[checkpoint]\nallow = ["%s"]\n[restore]\nallow = ["%s"]\n' "$place" "$place" >> /etc/cryopod/config.toml
units=/etc/containers/systemd
mkdir -p $units/{job,gpu}.container.d
cp /src/examples/podman/job.container $units/job.container
cp /src/examples/podman/job.container $units/gpu.container
# A unit's container, and with it its log, is removed when it has stopped: both nodes add to one file.
printf '[Container]\nPodmanArgs=--log-opt=path=/srv/%%N.log\n[Service]\nStandardError=append:/srv/said\n' |
    tee $units/job.container.d/log.conf > $units/gpu.container.d/log.conf
{
    printf '[Container]\nExec=/cusim/cusim-client\nEnvironment=LD_LIBRARY_PATH=/cusim\n'
    printf 'AddDevice=%s\n' "${nodes[@]}"
    printf 'Volume=%s\n' "${binds[@]}"
} > $units/gpu.container.d/gpu.conf
on_failure() {
    cat /srv/said $log
    for n in 1 2; do inside $n systemctl --no-pager status job gpu; done
    tail -n 5 /srv/*.log
}

# ---- two nodes ----
# The units of podman alone: those of the system would change what is the machine's, such as its sysctls.
rm -r {/usr/lib,/etc}/systemd/system/*.wants /usr/lib/systemd/system-generators/systemd-*
rm -f /etc/hostname
cp /proc/devices /srv/devices # the bed's, which a /proc of the node's own has not
inits=()
node() { # N: in namespaces of its own, with systemd as init
    mkdir "/sys/fs/cgroup/node$1"
    # shellcheck disable=SC2016 # the node's shell expands it
    unshare --mount --propagation private --pid --fork --kill-child --mount-proc --net --uts --ipc bash -euc '
        echo $$ > "/sys/fs/cgroup/node$1/cgroup.procs"
        exec unshare --cgroup bash -euc "$2" node "$1"' node "$1" '
        umount /sys/fs/cgroup
        mount -t cgroup2 cgroup2 /sys/fs/cgroup
        mount --bind /srv/devices /proc/devices
        for dir in /run /tmp /dev/shm /var/lib/containers /var/cache; do mount -t tmpfs node "$dir"; done
        hostname "node$1"
        ip link set lo up
        mount --bind /proc/sys /proc/sys
        mount -o remount,ro,bind /proc/sys # systemd raises limits of the machine
        exec env container=testbed /usr/lib/systemd/systemd --system --show-status=no --log-target=console --unit=basic.target' \
        > "/srv/node$1.log" 2>&1 &
    wait_for pgrep -P $! > /dev/null
    inits[$1]=$(pgrep -P $!)
    check "node $1 is up" wait_for inside "$1" systemctl is-active --quiet basic.target 2> /dev/null
    inside "$1" umount /proc/sys
    inside "$1" podman import -q /usr/local/share/testbed/busybox.tar docker.io/library/busybox > /dev/null
    inside "$1" mkdir /run/cusim
    inside "$1" /opt/build/cusim-server --socket "$sim" --dev-root /dev --gpus 2 --memory-mib 4096 > "/tmp/gpus$1" 2>&1 &
    wait_for inside "$1" /opt/build/cusim-ctl --socket "$sim" status > /dev/null 2>&1
}
inside() { nsenter --target "${inits[$1]}" --mount --pid --net --uts --ipc --cgroup "${@:2}"; } # NODE COMMAND...
does() { inside "$1" systemctl "${@:2}" > /tmp/said 2>&1; }
logs() { sed -n 's/^[^ ]* stdout F //p' "/srv/$1.log"; }
further() { # each has printed 3 lines more than when this began
    local job gpu
    job=$(logs job | wc -l) gpu=$(logs gpu | wc -l)
    wait_for lines job $((job + 3))
    wait_for lines gpu $((gpu + 3))
}
lines() { [ "$(logs "$1" | wc -l)" -ge "$2" ]; }
each_once() { # the numbers of both, from 0 on, and the sums
    local unit
    for unit in job gpu; do logs $unit | awk '$1 != NR - 1 { exit 1 }' || { logs $unit && return 1; }; done
    ! logs gpu | grep CORRUPT
}
state() { inside "$1" systemctl show -P ActiveState "$2"; } # NODE UNIT
nothing_left() { # NODE
    ! inside "$1" pgrep -f '^cryopod-(on-stop|lease) ' > /dev/null && [ -z "$(inside "$1" podman ps -aq)" ] &&
        [ -z "$(inside "$1" sh -c 'ls -A /run/cryopod; ls -d /sys/fs/cgroup/system.slice/*/libpod* 2> /dev/null')" ]
}

node 1
node 2
: > /srv/job.log
: > /srv/gpu.log
check 'node 1 starts' does 1 start job gpu
further
check 'and stops' does 1 stop job gpu
for unit in job gpu; do
    check "$unit has stopped, and not failed" test "$(state 1 $unit)" = inactive
    check 'by a checkpoint' test -e $place/$unit/000001/cryopod.json
done
check 'nothing is left' wait_for nothing_left 1
check 'node 2 starts' does 2 start job gpu
further
check 'each number once' each_once
check 'a restart there' does 2 restart job gpu
further
check 'each number once' each_once
if does 1 start job; then exit 1; fi
check 'node 1 has none meanwhile' says /srv/said 'it runs as container .* on node2'
check 'node 2 stops' does 2 stop job gpu
check 'node 1 starts again' does 1 start job gpu
further
check 'each number once' each_once
check 'and stops' does 1 stop job gpu
for n in 1 2; do check "nothing is left on node $n" wait_for nothing_left $n; done
