ls -la /dev/kfd /dev/dri; grep -E 'kfd|drm' /proc/devices
for i in 128 129 130; do ls -la /sys/dev/char/226:$i/device/driver /sys/dev/char/226:$i/device/vendor || true; done
cat /sys/class/kfd/kfd/topology/nodes/*/properties | head -50
cryopod check --json || true
cat /sys/fs/cgroup/cgroup.controllers; cat /proc/self/cgroup; cat /proc/uptime; dmesg | tail -20
