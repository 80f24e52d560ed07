# amd_endless.sh LOW: a machine on which the search of CRIU's plugin never ends (tests/amd/machines/endless-*.topology, found at
# random): the time limit of the restore ends it, and the archive stays.
# long
# runtimes: crun
# needs: amd
. /src/tests/amd/lib.sh
# It writes past its buffer as it goes on, which the C library may see first.
ended='search for GPUs does not end|stopped by signal 6'
start "$1" endless-a
minors=$(cd /dev/dri && echo renderD* | tr -dc '0-9 ')
gpu_run c1 "$minors" -- -b 1
wait_for rounds c1 3
saved c1 /tmp/c1.tar.zst
setting limits 'restore_s = 60'
not_back /tmp/c1.tar.zst "$ended"
machine endless-b
not_back /tmp/c1.tar.zst "$ended"
if pgrep -x criu; then echo "CRIU goes on searching" && exit 1; fi
