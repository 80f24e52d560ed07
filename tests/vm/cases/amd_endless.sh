# amd_endless.sh LOW: two machines on which the search of CRIU's plugin never ends (tests/amd/machines/endless-*.topology, found at
# random). cryopod refuses the checkpoint before the freeze, and the restore of one that was made all the same, with
# the reason. That the search does not end is tests/amd/predict's to show.
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
