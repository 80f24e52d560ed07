# failed_restore.sh LOW: a restore that fails late leaves nothing: no process, mount, cgroup, firewall rule, directory, mount point.
low=$1
mkimage
low_level "$low"
printf '[mounts]\nallow = ["/srv/driver"]\n' >> /etc/cryopod/config.toml
fake_gpu_nodes
sed -i '/network-lock/d' /etc/criu/default.conf # CRIU's own lock, with iptables or nftables, where the kernel has them
mkdir -p /srv/driver && echo lib > /srv/driver/lib.so
bundle /tmp/b /bin/sh /job
echo 'while :; do sleep 0.1; done' > /tmp/b/rootfs/job
jq '.linux.devices = [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}] | .hooks.createRuntime = [{"path": "/srv/nvidia-ctk"}]' /tmp/b/config.json > /tmp/b/new && mv /tmp/b/new /tmp/b/config.json
cat > /srv/nvidia-ctk <<'HOOK'
#!/bin/bash
set -eu
pid=$(jq .pid)
nsenter -t "$pid" -m sh -c 'mkdir -p /tmp/b/rootfs/opt/x && touch /tmp/b/rootfs/opt/x/lib.so && mount --bind /srv/driver/lib.so /tmp/b/rootfs/opt/x/lib.so'
HOOK
chmod 755 /srv/nvidia-ctk
run() { # ID DIR PROGRAM
    (cd "$2" && cryopod-runtime run -d "$1" < /dev/null > /dev/null 2>&1)
    wait_for in_program "$1" "$3"
    init=$(cryopod-runtime state "$1" | jq .pid)
}
gone() { ! grep -q 'State:.[^ZX]' "/proc/$init/status" 2> /dev/null; } # an init process ends when all others have
run c1 /tmp/b sh
network=''
if ! cryopod-runtime checkpoint --image-path /tmp/i c1 > /tmp/said 2>&1; then
    # This kernel has no firewall: without CRIU's lock, then.
    echo 'network-lock skip' >> /etc/criu/default.conf
    network=' (no firewall in this kernel)'
    cryopod-runtime checkpoint --image-path /tmp/i c1
fi
cryopod-runtime delete --force c1 2> /dev/null || true
rm -rf /tmp/b/rootfs/opt
state() { # all that a restore could leave
    cat /proc/self/mountinfo | cut -d ' ' -f 4- | sort
    find /sys/fs/cgroup -type d 2> /dev/null | sort
    find /tmp/b /tmp/i | sort
    cat /tmp/b/config.json
    { iptables-save; ip6tables-save; nft list ruleset; } 2> /dev/null | grep -v '^#' || true
    ls -A /run/cryopod "/run/$low" 2> /dev/null || true
    ps -eo stat=,comm= | awk '$1 !~ /^Z/ && $2 !~ /^(ps|sort|bash|grep|cat|find|cut|ls|awk)$/ {print $2}' | sort
}
rm -f /tmp/i/restore.log
mkdir -p /tmp/w
wait_for gone
state > /tmp/before
# Late: CRIU has made the processes and mounts, then its last script says no.
printf '#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != %s ]\n' post-restore > /tmp/no.sh && chmod 755 /tmp/no.sh
cp /etc/criu/default.conf /tmp/default.conf
same() { state > /tmp/after && cmp -s /tmp/before /tmp/after; }
for stage in setup-namespaces post-setup-namespaces post-restore; do
    { cat /tmp/default.conf; echo "action-script /tmp/no.sh"; } > /etc/criu/default.conf
    printf '#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != %s ]\n' "$stage" > /tmp/no.sh
    if cryopod-runtime restore --detach --image-path /tmp/i --work-path /tmp/w --bundle /tmp/b c1 < /dev/null > /tmp/said 2>&1; then echo "$stage: restored"; exit 1; fi
    cryopod-runtime delete --force c1 > /dev/null 2>&1 || true # as every engine does
    wait_for same > /dev/null || { diff /tmp/before /tmp/after; echo "$stage: left behind"; cat /tmp/said; exit 1; }
    echo "ok: refused at $stage$network"
done
# The runtime alone cannot restore it at all: nobody provides the mount.
cp /tmp/default.conf /etc/criu/default.conf
mkdir /tmp/ws
if "$low" restore --detach --image-path /tmp/i --work-path /tmp/ws --bundle /tmp/b c1 < /dev/null > /tmp/said 2>&1; then echo "stock $low: restored"; exit 1; fi
grep -h -E 'No mapping for .* mountpoint' /tmp/ws/restore.log > /tmp/stock || { cat /tmp/said; grep Error /tmp/ws/restore.log; exit 1; }
"$low" delete --force c1 > /dev/null 2>&1 || true
echo "ok: stock $low: $(head -n 1 /tmp/stock | grep -o 'Error.*\|mnt:.*')"
# And then it works.
cp /tmp/default.conf /etc/criu/default.conf
cryopod-runtime restore --detach --image-path /tmp/i --work-path /tmp/w --bundle /tmp/b c1 < /dev/null > /tmp/said 2>&1 || { cat /tmp/said; grep Error /tmp/w/restore.log; exit 1; }
[ "$(cryopod-runtime exec c1 cat /opt/x/lib.so)" = lib ]
echo 'ok: the same archive restored'
cryopod-runtime delete --force c1 2> /dev/null || true

# Without a GPU, and with images that CRIU cannot restore.
bundle /tmp/p sleep 1000
run c2 /tmp/p sleep
cryopod-runtime checkpoint --image-path /tmp/j c2
cryopod-runtime delete --force c2 2> /dev/null || true
truncate -s -20 /tmp/j/fdinfo-2.img
wait_for gone
state > /tmp/before
if cryopod-runtime restore --detach --image-path /tmp/j --work-path /tmp/w --bundle /tmp/p c2 < /dev/null > /tmp/said 2>&1; then echo 'a damaged image: restored'; exit 1; fi
cryopod-runtime delete --force c2 > /dev/null 2>&1 || true
wait_for same > /dev/null || { diff /tmp/before /tmp/after; cat /tmp/said; exit 1; }
echo 'ok: without a GPU nothing is left either'
