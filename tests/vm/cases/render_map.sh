# render_map.sh LOW: a container with the KFD and a render node is restored with dev.cryopod.gpu.map's pair for the
# machine's other render node, whose driver is another: inside, both its own name and the old one are that node, it
# opens, and what was allowed before is denied.
# runtimes: crun runc
# sample: runc
low=$1
low_level "$low"
[ -c /dev/dri/renderD129 ]
mkimage
pod run -d --name c1 --network none --device /dev/kfd --device /dev/dri/renderD128 localhost/busybox "${counter[@]}" > /dev/null
wait_for counted c1 5
pod container checkpoint --export /tmp/c1.tar.zst c1 > /dev/null
before=$(count c1)
pod rm -f -t 0 c1 > /dev/null
sum=$(sha256sum < /tmp/c1.tar.zst)

printf '[gpu]\nmap = "/dev/dri/renderD128=/dev/dri/renderD129"\n' >> /etc/cryopod/config.toml
pod container restore --import /tmp/c1.tar.zst > /dev/null
wait_for counted c1 $((before + 5))
pod logs c1 > /tmp/numbers
seq 0 "$(tail -n 1 /tmp/numbers)" | cmp - /tmp/numbers
[ "$(sha256sum < /tmp/c1.tar.zst)" = "$sum" ]
kfd=$(awk '$2 == "kfd" {print $1}' /proc/devices)
found=$(pod exec c1 stat -c %t:%T /dev/kfd /dev/dri/renderD128 /dev/dri/renderD129 | xargs)
[ "$found" = "$(printf '%x:0 e2:81 e2:81' "$kfd")" ] || { echo "nodes: $found"; exit 1; }
pod exec c1 sh -c ': <> /dev/dri/renderD129 && : <> /dev/dri/renderD128'
pod exec --privileged c1 mknod /dev/old c 226 128
if pod exec c1 sh -c ': <> /dev/old' > /tmp/said 2>&1; then echo 'the old node is still allowed' && exit 1; fi
grep -q 'not permitted' /tmp/said || { cat /tmp/said; exit 1; }
echo "continued from $before"
