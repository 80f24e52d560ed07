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
# A CRIU that is killed when it has frozen the container: the container goes on.
mkdir /tmp/killed
cat > /tmp/killed/criu << 'END'
#!/bin/bash
if [ "$(cat /proc/$PPID/comm)" = podman ]; then PATH=${PATH#*:} exec criu "$@"; fi # its check
v1=/sys/fs/cgroup/freezer$(sed -n 's/^[0-9]*:freezer://p' "/proc/$(cat /tmp/init)/cgroup")/freezer.state
if [ -e "$v1" ]; then echo FROZEN > "$v1"; else echo 1 > "/sys/fs/cgroup$(sed -n 's/^0:://p' "/proc/$(cat /tmp/init)/cgroup")/cgroup.freeze"; fi
kill -KILL $$
END
chmod +x /tmp/killed/criu
pod inspect -f '{{.State.Pid}}' c1 > /tmp/init
if PATH=/tmp/killed:$PATH pod container checkpoint c1 > /tmp/said 2>&1; then exit 1; fi
grep "the container goes on running" /tmp/said
wait_for counted c1 $(($(count c1) + 5))
# A zombie that CRIU has restored has CRIU's privileges, and does not keep the container from another checkpoint.
pod run -d --name c2 --network none localhost/busybox sh -c '(exit 0) & exec tail -f /dev/null' > /dev/null
zombies() { pgrep -r Z -P "$(pod inspect -f '{{.State.Pid}}' c2)"; }
wait_for zombies > /dev/null
pod container checkpoint c2 > /dev/null
pod container restore c2 > /dev/null
zombies > /dev/null
pod container checkpoint c2 > /dev/null
