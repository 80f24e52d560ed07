# gpu_nodes.sh LOW: a podman container with GPU device nodes that no process has open is recognised, recorded,
# exported, removed, restored from the archive, and goes on counting; and what a restore refuses.
low=$1
mkimage
low_level "$low"
fake_gpu_nodes
pod run -d --name c1 --network none --device /dev/nvidia0 --device /dev/nvidiactl --device /dev/kfd \
    --device /dev/dri/renderD128 localhost/busybox "${counter[@]}" > /dev/null
wait_for counted c1 5
pod container checkpoint --export /tmp/c1.tar.zst c1 > /dev/null
before=$(count c1)
pod rm -f -t 0 c1 > /dev/null
[ -z "$(ls -A /run/cryopod)" ]

tar --zstd -xOf /tmp/c1.tar.zst checkpoint/cryopod.json > /tmp/metadata.json
jq -e --arg low "$low" '
    .schema == "1.0" and .container.low_level == $low and .container.leave_running == false
    and .gpu.vendors == ["nvidia", "amd"] and .gpu.processes == [] and .gpu.plugins == []
    and [.gpu.nodes[] | [.path, .vendor, .role, .source, .major, .minor, .allowed]] == [
        ["/dev/nvidia0", "nvidia", "gpu", "device", 195, 0, true],
        ["/dev/nvidiactl", "nvidia", "control", "device", 195, 255, true],
        ["/dev/kfd", "amd", "control", "device", 510, 0, true],
        ["/dev/dri/renderD128", "amd", "render", "device", 226, 128, true]]
    and .timings.dump_us > 0' /tmp/metadata.json > /dev/null || { cat /tmp/metadata.json; exit 1; }

pod container restore --import /tmp/c1.tar.zst > /dev/null
wait_for counted c1 $((before + 5))
# It went on, and did not begin again: no number came twice, none was left out.
pod logs c1 > /tmp/numbers
seq 0 "$(tail -n 1 /tmp/numbers)" | cmp - /tmp/numbers
[ "$(pod exec c1 stat -c %t:%T /dev/nvidia0)" = c3:0 ]
[ -z "$(ls -A /run/cryopod)" ]
echo "continued from $before"

# A container that runs on is recorded as such.
pod container checkpoint --leave-running --export /tmp/c2.tar.zst c1 > /dev/null
tar --zstd -xOf /tmp/c2.tar.zst checkpoint/cryopod.json | jq -e .container.leave_running > /dev/null
now=$(count c1)
wait_for counted c1 $((now + 3))
pod rm -f -t 0 c1 > /dev/null

# metadata that this version cannot know, and one that is damaged: refused, and the archive stays what it was.
refused() { # EDIT MESSAGE
    local sum
    rm -rf /tmp/unpacked && mkdir /tmp/unpacked && tar --zstd -xf /tmp/c1.tar.zst -C /tmp/unpacked
    sed -i "$1" /tmp/unpacked/checkpoint/cryopod.json
    tar --zstd -cf /tmp/edited.tar.zst -C /tmp/unpacked .
    sum=$(sha256sum < /tmp/edited.tar.zst)
    if pod container restore --import /tmp/edited.tar.zst > /tmp/said 2>&1; then
        echo "restored in spite of: $1"
        exit 1
    fi
    grep -F -- "$2" /tmp/said | grep -q cryopod.json || { echo "$1:" && cat /tmp/said && exit 1; }
    [ "$(sha256sum < /tmp/edited.tar.zst)" = "$sum" ]
    pod rm -f -t 0 c1 > /dev/null
}
refused 's/"schema": "1.0"/"schema": "9.0"/' 'schema 9.0 is newer'
refused 's/"vendors": /"vendrs": /' 'missing field `vendors`'
refused '$d' 'EOF while parsing'
[ -z "$(ls -A /run/cryopod)" ]
