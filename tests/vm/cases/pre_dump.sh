# pre_dump.sh LOW: a container with GPU nodes that nothing has open is checkpointed in two steps under podman: its
# memory while it runs, then only what it has changed since, which takes soft-dirty tracking.
# runtimes: crun runc
low=$1
low_level "$low"
mkimage
# shellcheck disable=SC2016 # for the container's shell
pod run -d --name c1 --network none --device /dev/kfd --device /dev/dri/renderD128 localhost/busybox sh -c '
    held=$(head -c 6000000 /dev/urandom | base64)
    i=0; while :; do echo "$i $(echo "$held" | md5sum)"; i=$((i + 1)); sleep 1; done' > /dev/null
said() { pod logs c1 | tail -n 1 | cut -d' ' -f1; }
reached() { local n && n=$(said) && [ "${n:--1}" -ge "$1" ]; }
wait_for 120 reached 0

pod container checkpoint --pre-checkpoint --compress none --export /tmp/pre.tar c1 > /dev/null
wait_for 120 reached $(($(said) + 1)) # it has gone on
pod container checkpoint --with-previous --compress none --export /tmp/c1.tar c1 > /dev/null
before=$(said)
pod rm -f -t 0 c1 > /dev/null
# The memory is in the first part, and not once more in the second, which is the one with the seal.
pages() { tar -tvf "$1" | awk '/pages-[0-9]+.img/ {n += $3} END {print n + 0}'; }
echo "pages: $(pages /tmp/pre.tar), then $(pages /tmp/c1.tar)"
[ "$(pages /tmp/pre.tar)" -gt 6000000 ]
[ "$(pages /tmp/c1.tar)" -lt 6000000 ]
if tar -tf /tmp/pre.tar | grep cryopod.json; then exit 1; fi
tar -xOf /tmp/c1.tar checkpoint/cryopod.json | jq -e '.gpu.vendors == ["amd"]' > /dev/null

pod container restore --import-previous /tmp/pre.tar --import /tmp/c1.tar > /dev/null
wait_for 120 reached $((before + 2))
[ "$(pod logs c1 | cut -d' ' -f2 | sort -u | wc -l)" = 1 ] # the same sum all the time
pod logs c1 | cut -d' ' -f1 > /tmp/numbers
seq 0 "$(tail -n 1 /tmp/numbers)" | cmp - /tmp/numbers
echo "continued from $before"
