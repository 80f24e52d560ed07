# amd_one.sh LOW: a process with buffers, a queue and an event on one AMD GPU is checkpointed by CRIU's own plugin, removed
# and restored: its sums go on, and the device nodes and rules inside are those from before.
# runtimes: crun runc
# needs: amd
. /src/tests/amd/lib.sh
low_level "$1"
trap 'pod rm -f -t 0 -a > /dev/null; no_machine' EXIT
machine radeon-1
plugin 4.1.1
amd_image

gpu_run c1 128 -- -m 8
wait_for rounds c1 3
gpus_of c1 > /tmp/before
pod container checkpoint --export /tmp/c1.tar.zst c1 > /dev/null || { cat /var/lib/containers/storage/overlay-containers/*/userdata/dump.log | tail -50; exit 1; }
before=$(count c1)
pod rm -f -t 0 c1 > /dev/null
pod container restore --import /tmp/c1.tar.zst > /dev/null
wait_for rounds c1 $((before + 5))
pod logs c1 > /tmp/numbers
seq 0 "$(tail -n 1 /tmp/numbers)" | cmp - /tmp/numbers
gpus_of c1 > /tmp/after
cat /tmp/before
cmp /tmp/before /tmp/after
