# hybrid.sh: podman with crun where v1 and v2 cgroups are side by side and no cgroup namespace is around: restored.
mkimage
low_level crun
fake_gpu_nodes
pod run -d --name c1 --network none --cgroup-parent "$TESTBED_CGROUP_PARENT/engine" --device /dev/nvidia0 \
    localhost/busybox "${counter[@]}" > /dev/null
wait_for counted c1 3
cgroups() { cat "/proc/$(podman inspect -f '{{.State.Pid}}' c1)/cgroup"; }
cgroups > /tmp/before
pod container checkpoint --export /tmp/c1.tar c1 > /dev/null
last=$(count c1)
podman rm -f -t 0 c1 > /dev/null
pod container restore --import /tmp/c1.tar > /dev/null
wait_for counted c1 $((last + 3))
cgroups > /tmp/after
grep -q "^0::$TESTBED_CGROUP_PARENT/engine/" /tmp/after
diff /tmp/before /tmp/after
podman rm -f -t 0 c1 > /dev/null
echo 'ok: restored'

# What podman shows of a restore that fails is the cause, and not the first line with "Error" of CRIU's log. crun prints
# that log on standard error; podman reads the runtime's log instead if it knows that it is JSON.
mkdir -p /etc/containers/containers.conf.d
echo -e '[engine]\nruntime_supports_json = ["crun", "runc", "cryopod-runtime"]' > /etc/containers/containers.conf.d/json.conf
mkdir /tmp/broken && tar -C /tmp/broken -xf /tmp/c1.tar
rm /tmp/broken/checkpoint/pages-1.img
tar -C /tmp/broken -cf /tmp/broken.tar .
if pod container restore --import /tmp/broken.tar > /tmp/said 2>&1; then echo 'restored what is damaged' && exit 1; fi
grep -q 'the checkpoint is untouched: CRIU: Error' /tmp/said && ! grep -q RLIMIT /tmp/said || { cat /tmp/said && exit 1; }
echo 'ok: the cause is shown'
