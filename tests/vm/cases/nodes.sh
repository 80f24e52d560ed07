# nodes.sh LOW: the kernel's own /dev/kfd and render node are found; a podman container that has both is checkpointed,
# removed, restored, and goes on, with the same nodes and the same device rules. Nothing has the nodes open.
# long
# runtimes: crun runc
low=$1
low_level "$low"
kfd=$(awk '$2 == "kfd" {print $1}' /proc/devices)
[ "$kfd" -ge 234 ] # a dynamic one
cryopod check --json > /tmp/check.json || { cat /tmp/check.json; exit 1; }
jq -e --arg kfd "/dev/kfd is $kfd:0" '.ok
    and any(.checks[]; .name == "AMD driver" and (.found | contains($kfd)))
    and any(.checks[]; .name == "cgroups" and .found == "v2")' /tmp/check.json > /dev/null ||
    { cat /tmp/check.json; exit 1; }

mkimage
pod run -d --name c1 --network none --cap-add mknod --device /dev/kfd --device /dev/dri/renderD128 \
    localhost/busybox "${counter[@]}" > /dev/null
# Nodes that the container was not given: the machine's second render node, a card, memory.
pod exec c1 sh -c 'mknod /dev/other c 226 129; mknod /dev/card c 226 0; mknod /dev/mem c 1 1'
rules() { # what comes of opening each
    # shellcheck disable=SC2016
    pod exec c1 sh -c 'for node in dri/renderD128 kfd null other card mem; do
        if (: <> /dev/$node) 2> /tmp/said; then echo "$node opens"; else echo "$node $(sed "s/.*: //" /tmp/said)"; fi
    done'
}
rules > /tmp/before
wait_for counted c1 5
pod container checkpoint --export /tmp/c1.tar.zst c1 > /dev/null
before=$(count c1)
pod rm -f -t 0 c1 > /dev/null

tar --zstd -xOf /tmp/c1.tar.zst checkpoint/cryopod.json > /tmp/metadata.json
jq -e --arg low "$low" --argjson kfd "$kfd" '
    .container.low_level == $low and .gpu.vendors == ["amd"] and .gpu.processes == []
    and [.gpu.nodes[] | [.path, .vendor, .role, .major, .minor, .allowed]] == [
        ["/dev/kfd", "amd", "control", $kfd, 0, true],
        ["/dev/dri/renderD128", "amd", "render", 226, 128, true]]' /tmp/metadata.json > /dev/null ||
    { cat /tmp/metadata.json; exit 1; }

pod container restore --import /tmp/c1.tar.zst > /dev/null
wait_for counted c1 $((before + 5))
pod logs c1 > /tmp/numbers
seq 0 "$(tail -n 1 /tmp/numbers)" | cmp - /tmp/numbers
[ "$(pod exec c1 stat -c %t:%T /dev/kfd /dev/dri/renderD128)" = "$(printf '%x:0\ne2:80' "$kfd")" ]
rules > /tmp/after
cat /tmp/before
cmp /tmp/before /tmp/after || { cat /tmp/after; exit 1; }
grep -q '^dri/renderD128 opens$' /tmp/after
[ "$(grep -c -E '^(other|card|mem) Operation not permitted$' /tmp/after)" = 3 ]
echo "continued from $before"
