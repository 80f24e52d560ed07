# amd_one.sh LOW: a process with buffers, a queue and an event on one AMD GPU is checkpointed by CRIU's own plugin, removed
# and restored: its sums go on, and the device nodes and rules inside are those from before.
# runtimes: crun
# needs: amd
. /src/tests/amd/lib.sh
start "$1" radeon-1

gpu_run c1 128 -- -m 8
wait_for rounds c1 3
gpus_of c1 128 129 > /tmp/before
saved c1 /tmp/c1.tar.zst
predicts /tmp/c1.tar.zst 0
[ "$(cryopod inspect --json /tmp/c1.tar.zst | jq .gpu.vram_bytes)" = $((2 * 8 << 20)) ] # the client's two buffers
back c1 /tmp/c1.tar.zst
gpus_of c1 128 129 > /tmp/after
cat /tmp/before
cmp /tmp/before /tmp/after
