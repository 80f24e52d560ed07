# refused.sh LOW: what a restore on this host would refuse is refused at the checkpoint, all of it at once, and the container
# goes on. The administrator can say that it is to be restored elsewhere.
low=$1
mkimage
low_level "$low"
fake_gpu_nodes
refused() { # NAME WANT...
    local name=$1 want now
    shift
    if pod container checkpoint --export /tmp/c1.tar c1 > /tmp/said 2>&1; then echo "$name: checkpointed" && exit 1; fi
    for want in 'the checkpoint was refused and the container goes on running' 'could not be restored on this host' "$@"; do
        grep -qF -- "$want" /tmp/said || { echo "$name: not told: $want" && cat /tmp/said && exit 1; }
    done
    [ ! -s /tmp/c1.tar ] && [ -z "$(ls -A /run/cryopod)" ]
    now=$(count c1)
    wait_for counted c1 $((now + 3))
    echo "ok: $name"
}
pod run -d --name c1 --network none --device /dev/nvidia0 --annotation dev.cryopod.gpu.map=/dev/nvidia0=/dev/nvidia7 \
    localhost/busybox "${counter[@]}" > /dev/null
wait_for counted c1 3
refused 'a map to a GPU that this host has not' 'this host has no GPU /dev/nvidia7'
mkdir -p /srv/data && echo x > /srv/data/file
root=/proc/$(podman inspect -f '{{.State.Pid}}' c1)
nsenter -t "${root#/proc/}" -m sh -c 'mkdir -p /data' 2> /dev/null || mkdir -p "$root/root/data"
# A mount that a hook could have made: the host's directory, put into the container's mount namespace.
cat > /tmp/graft.py <<'PY'
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(n, *a):
    r = libc.syscall(n, *a)
    if r < 0: sys.exit(f"{n}: {os.strerror(ctypes.get_errno())}")
    return r
tree = call(428, -100, sys.argv[2].encode(), 1)
ns = os.open(f"/proc/{sys.argv[1]}/ns/mnt", os.O_RDONLY)
if libc.setns(ns, 0x20000): sys.exit("setns")
call(429, tree, b"", -100, sys.argv[3].encode(), 4)
PY
python3 /tmp/graft.py "${root#/proc/}" /srv/data /data
refused 'with it, a mount that a restore may not make' 'this host has no GPU /dev/nvidia7' \
    "the mount /data cannot be provided: /srv/data is none of the driver's places" 'restore-here'
printf '[checks]\nrestore-here = false\n' >> /etc/cryopod/config.toml
pod container checkpoint --export /tmp/c1.tar c1 > /dev/null
[ -s /tmp/c1.tar ]
pod rm -f -t 0 c1 > /dev/null
echo 'ok: to be restored elsewhere: the administrator lifts it'
