# plain.sh LOW: the main job for a container without a GPU, through the wrapper.
low=$1
mkimage
low_level "$low"
pod run -d --name c1 --network none localhost/busybox "${counter[@]}" > /dev/null
wait_for counted c1 5
pod container checkpoint --export /tmp/c1.tar.zst c1 > /dev/null
before=$(count c1)
pod rm -f -t 0 c1 > /dev/null
# Untouched: no metadata, no directory of an operation.
if tar --zstd -tf /tmp/c1.tar.zst | grep cryopod.json; then exit 1; fi
[ ! -e /run/cryopod ]
pod container restore --import /tmp/c1.tar.zst > /dev/null
wait_for counted c1 $((before + 5))
pod logs c1 > /tmp/numbers
seq 0 "$(tail -n 1 /tmp/numbers)" | cmp - /tmp/numbers
echo "continued from $before"
