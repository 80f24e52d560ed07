# amd_large.sh: more GPU memory than 64 MiB goes into VRAM files: compressed, and in a second checkpoint only what has changed. It
# is restored from both, and where a chunk is damaged, not.
# long
# runtimes: crun
# needs: amd
. /src/tests/amd/lib.sh
start "$1" vega-2

gpu_run c1 '128 129' -- -m 24
wait_for rounds c1 3
saved_or_not c1 /tmp/c1.tar.zst --leave-running || { cat /tmp/said; exit 1; }
stays c1
cryopod inspect --json /tmp/c1.tar.zst > /tmp/c1.json
bytes=$((4 * (24 << 20) + 2 * 8)) # each file begins with its length
jq -e --argjson bytes $bytes '.gpu.vram.bytes == $bytes and .gpu.vram.stored_bytes < $bytes * 6 / 10' /tmp/c1.json > /dev/null ||
    { jq .gpu.vram /tmp/c1.json; exit 1; }
mkdir /tmp/parent
tar --zstd -C /tmp/parent -xf /tmp/c1.tar.zst checkpoint
[ -e /tmp/parent/checkpoint/vram-0000.img ] && [ -z "$(ls /tmp/parent/checkpoint/amdgpu-pages-* 2> /dev/null)" ]

setting vram 'parent = "/tmp/parent/checkpoint"' 'parents = ["/tmp/parent"]'
saved c1 /tmp/c2.tar.zst
cryopod inspect --json /tmp/c2.tar.zst > /tmp/c2.json
# The client changes a word of each buffer.
jq -e '.gpu.vram.stored_bytes < 10000000 and .gpu.vram.parent > 40' /tmp/c2.json > /dev/null || { jq .gpu.vram /tmp/c2.json; exit 1; }
jq -c '.gpu.vram | {bytes, stored_bytes, zero, parent}' /tmp/c1.json /tmp/c2.json
predicts /tmp/c2.tar.zst 0
back c1 /tmp/c2.tar.zst
[ -z "$(find / -xdev -name '.cryopod-amd-*' 2> /dev/null)" ]
saved c1 /tmp/c3.tar.zst
machine mi210-4 # another model
not_back /tmp/c3.tar.zst device_id
machine vega-2
damage /tmp/parent/checkpoint/vram-0000.img 100000
not_back /tmp/c3.tar.zst 'nothing was started: the GPU memory: .*damaged'
