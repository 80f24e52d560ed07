# amd_endless.sh LOW: two machines on which the search of CRIU's plugin never ends (tests/amd/machines/endless-*.topology, found at
# random). cryopod foresees it: it refuses the checkpoint before the freeze, and the restore of one that was made all the same, with
# the reason. Without cryopod the restore does not end.
# long
# runtimes: crun
# needs: amd
. /src/tests/amd/lib.sh
start "$1" endless-a
minors=$(cd /dev/dri && echo renderD* | tr -dc '0-9 ')
gpu_run c1 "$minors" -- -b 1
wait_for rounds c1 3
if saved_or_not c1 /tmp/c1.tar.zst; then echo "a checkpoint without a way back was taken" && exit 1; fi
says /tmp/said "the container goes on running: .*CRIU's amdgpu plugin would never end"
stays c1
setting checks 'restore-here = false'
saved c1 /tmp/c1.tar.zst
not_back /tmp/c1.tar.zst "CRIU's amdgpu plugin would never end"
machine endless-b
predicts /tmp/c1.tar.zst 1
not_back /tmp/c1.tar.zst "CRIU's amdgpu plugin would never end"
# podman restores a container with a runtime of the same name only.
mkdir /tmp/stock
ln -s "$(type -P "$1")" /tmp/stock/cryopod-runtime
if timeout -s KILL 40 podman --runtime /tmp/stock/cryopod-runtime container restore --import /tmp/c1.tar.zst > /tmp/said 2>&1; then
    echo "the plugin's search has ended" && exit 1
fi
log=$(echo /var/lib/containers/storage/overlay-containers/*/userdata/restore.log)
[ -e "$log" ] || { cat /tmp/said && exit 1; }
tail -n 1 "$log"
grep -c 'Evaluating mapping nodes' "$log"
[ "$(grep -c 'Evaluating mapping nodes' "$log")" -gt 1000 ]
# What still searches has the KFD open. There is no other criu in this machine.
pkill -KILL -x criu || true
for kill in /sys/fs/cgroup/*/libpod-*/cgroup.kill /sys/fs/cgroup/libpod*/cgroup.kill; do
    if [ -e "$kill" ]; then echo 1 > "$kill"; fi
done
