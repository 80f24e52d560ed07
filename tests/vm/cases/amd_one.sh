# amd_one.sh LOW: a process with buffers, a queue and an event on one AMD GPU is checkpointed by CRIU's own plugin, removed
# and restored: its sums go on, and the device nodes and rules inside are those from before.
# runtimes: crun
# needs: amd
. /src/tests/amd/lib.sh
start "$1" radeon-1
kfd=$(awk '$2 == "kfd" {print $1}' /proc/devices)
cryopod check --json > /tmp/check.json || { cat /tmp/check.json; exit 1; }
jq -e '.ok
    and any(.checks[]; .name == "AMD driver" and (.found | endswith(", 1 GPU(s)")))
    and any(.checks[]; .name == "AMD plugin" and .status == "ok")
    and any(.checks[]; .name == "cgroups" and .found == "v2")' /tmp/check.json > /dev/null ||
    { cat /tmp/check.json; exit 1; }

gpu_run c1 128 -- -m 8
wait_for rounds c1 3
gpus_of c1 128 129 > /tmp/before
saved c1 /tmp/c1.tar.zst
predicts /tmp/c1.tar.zst 0
[ "$(cryopod inspect --json /tmp/c1.tar.zst | jq .gpu.vram_bytes)" = $((2 * 8 << 20)) ] # the client's two buffers
tar --zstd -xOf /tmp/c1.tar.zst checkpoint/cryopod.json > /tmp/metadata.json
jq -e --arg low "$1" --argjson kfd "$kfd" '
    .container.low_level == $low and .gpu.vendors == ["amd"] and (.gpu.processes | length) == 1
    and [.gpu.nodes[] | [.path, .vendor, .role, .major, .minor, .allowed]] == [
        ["/dev/kfd", "amd", "control", $kfd, 0, true],
        ["/dev/dri/renderD128", "amd", "render", 226, 128, true]]' /tmp/metadata.json > /dev/null ||
    { cat /tmp/metadata.json; exit 1; }
back c1 /tmp/c1.tar.zst
gpus_of c1 128 129 > /tmp/after
cat /tmp/before
cmp /tmp/before /tmp/after
