# hazards.sh LOW: what CRIU cannot dump is refused before the freeze: the container goes on, and the message names process,
# cause and remedy. What can be avoided by environment is, where the container says so at its creation.
low=$1
mkimage
low_level "$low"
fake_gpu_nodes
mkdir -p /srv/app /dev/infiniband
mknod -m 666 /dev/gdrdrv c 1 3 # in place of the real ones: the name counts
mknod -m 666 /dev/infiniband/uverbs0 c 1 3
cat > /srv/app/hold.py <<'PY'
import ctypes, mmap, os, struct, subprocess, sys, threading, time
kind = sys.argv[1]
libc = ctypes.CDLL(None, use_errno=True)

def mapped(path, size, flags):
    with open(path, "r+b", buffering=0) as file:
        return mmap.mmap(file.fileno(), size, flags)

def cuda(size):  # a process that has the driver's memory mapped; that of UVM if it is much
    return mapped("/dev/nvidia-uvm", size, mmap.MAP_PRIVATE)

if kind == "io_uring":
    params = ctypes.create_string_buffer(120)
    assert libc.syscall(425, 4, params) >= 0, os.strerror(ctypes.get_errno())
elif kind == "gdrdrv":
    held = open("/dev/gdrdrv")
elif kind == "rdma":
    held = open("/dev/infiniband/uverbs0")
elif kind == "notify":
    # A filter that allows everything, with a listener.
    class Filter(ctypes.Structure):
        _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint)]
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.POINTER(Filter))]
    libc.prctl(38, 1, 0, 0, 0)
    one = Filter(0x06, 0, 0, 0x7FFF0000)
    assert libc.syscall(317, 1, 8, ctypes.byref(Program(1, ctypes.pointer(one)))) >= 0, os.strerror(ctypes.get_errno())
elif kind == "traced":
    child = os.fork()
    if child == 0:
        while True:
            time.sleep(0.05)
    assert libc.ptrace(0x4206, child, 0, 0) == 0, os.strerror(ctypes.get_errno())
elif kind == "tcp":
    import socket
    server = socket.create_server(("10.9.9.9", 7000))
    client = socket.create_connection(("10.9.9.9", 7000))
    peer = server.accept()
elif kind == "queue":
    assert libc.mq_open(b"/queue", os.O_CREAT | os.O_RDWR, 0o600, None) >= 0, os.strerror(ctypes.get_errno())
elif kind == "queue_by_path":
    queue = libc.mq_open(b"/queue", os.O_CREAT | os.O_RDWR, 0o600, None)
    os.close(queue)
    held = open("/dev/mqueue/queue")
elif kind == "watch":
    assert libc.inotify_add_watch(libc.inotify_init(), b"/volume/watched", 0xFFF) >= 0, os.strerror(ctypes.get_errno())
elif kind == "uvm":
    held = cuda(4 << 20)
elif kind in ("mps", "mig"):  # which its environment tells
    held = cuda(1 << 20)
elif kind == "nccl":
    held = cuda(1 << 20), mapped("/dev/shm/nccl-test", 1 << 20, mmap.MAP_SHARED)
elif kind == "userfaultfd":
    assert libc.syscall(323, 1) >= 0, os.strerror(ctypes.get_errno())
elif kind in ("fuse", "vfio/vfio", "nvidia-fs0", "kvm", "uinput"):
    held = open("/dev/" + kind)
elif kind == "perf":  # a clock of this process, its time in the kernel left out
    attr = ctypes.create_string_buffer(128)
    struct.pack_into("IIQ", attr, 0, 1, 128, 0)
    struct.pack_into("Q", attr, 40, 1 << 5 | 1 << 6)
    assert libc.syscall(298, attr, 0, -1, -1, 0) >= 0, os.strerror(ctypes.get_errno())
elif kind == "bpf":  # a socket filter: return 0
    code = ctypes.create_string_buffer(struct.pack("<BBhiBBhi", 0xB7, 0, 0, 0, 0x95, 0, 0, 0))
    licence = ctypes.create_string_buffer(b"GPL")
    attr = ctypes.create_string_buffer(128)
    struct.pack_into("<IIQQ", attr, 0, 1, 2, ctypes.addressof(code), ctypes.addressof(licence))
    assert libc.syscall(321, 5, attr, 128) >= 0, os.strerror(ctypes.get_errno())
elif kind == "all":
    os.makedirs("/tmp/mps")
    open("/tmp/mps/control", "w").close()
    with open("/dev/shm/nccl-test", "w") as file:
        file.truncate(1 << 20)
    variables = {"mps": {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/mps"}, "mig": {"CUDA_VISIBLE_DEVICES": "MIG-1"}}
    kinds = ["uvm", "mps", "mig", "nccl", "nccl", "userfaultfd", "fuse", "vfio/vfio", "nvidia-fs0", "kvm", "uinput", "perf", "bpf"]
    for one in kinds:
        pipe = subprocess.Popen([sys.executable, sys.argv[0], one], env=os.environ | variables.get(one, {}), stdout=subprocess.PIPE).stdout
        assert pipe.readline() == b"0\n", one
        pipes = [*globals().get("pipes", []), pipe]
    threading.Thread(target=lambda: [pipe.read(4096) for _ in iter(int, 1) for pipe in pipes], daemon=True).start()
elif kind == "environment":
    print({k: v for k, v in os.environ.items() if k.startswith(("UV_", "NCCL_"))}, flush=True)
n = 0
while True:
    print(n, flush=True)
    n += 1
    time.sleep(0.1)
PY
python=(-v /usr:/usr:ro -v /usr/lib64:/lib64:ro -v /usr/lib/x86_64-linux-gnu:/lib/x86_64-linux-gnu:ro -v /srv/app:/app:ro -e PYTHONDONTWRITEBYTECODE=1)
start() { # KIND ARG...
    local kind=$1 && shift
    pod run -d --name c1 --network "${network:-none}" --security-opt seccomp=unconfined --device /dev/nvidia0 "${python[@]}" "$@" localhost/busybox \
        /usr/bin/python3 /app/hold.py "$kind" > /dev/null
    wait_for counted c1 2 || { printed c1; exit 1; }
}
refused() { # NAME KIND CAUSE REMEDY ARG...
    local name=$1 kind=$2 cause=$3 remedy=$4 now
    shift 4
    start "$kind" "$@"
    if pod container checkpoint --export /tmp/c1.tar c1 > /tmp/said 2>&1; then echo "$name: checkpointed"; exit 1; fi
    told "$name" "$cause" "$remedy"
    pod rm -f -t 0 c1 > /dev/null
}
told() { # NAME CAUSE REMEDY: refused, and nothing was frozen
    local want now
    for want in 'was refused and the container goes on running: ' 'process ' '(python3)' "$2" "$3"; do
        grep -qF -- "$want" /tmp/said || { echo "$1: not told: $want"; cat /tmp/said; exit 1; }
    done
    [ ! -s "$(podman inspect -f "{{.StaticDir}}" c1)/dump.log" ] || { echo "$1: CRIU has run"; exit 1; }
    now=$(count c1)
    wait_for counted c1 $((now + 3)) || { echo "$1: stands still"; exit 1; }
    [ "$(pod exec c1 echo responsive)" = responsive ]
    [ -z "$(ls -A /run/cryopod 2> /dev/null)" ]
    echo "ok: $1"
}
refused io_uring io_uring "has an io_uring" dev.cryopod.env.avoid=io_uring
refused GDRCopy gdrdrv '/dev/gdrdrv' dev.cryopod.env.avoid=gdrcopy --device /dev/gdrdrv
refused RDMA rdma 'RDMA verbs' NCCL_IB_DISABLE=1 --device /dev/infiniband/uverbs0
refused 'a seccomp supervisor' notify user-notify 'without that supervisor'
refused 'a traced process' traced 'is traced by process' 'detach the debugger'
refused 'a POSIX message queue' queue 'has a POSIX message queue open (descriptor ' 'close it before the checkpoint'
refused 'a POSIX message queue, by its path' queue_by_path '/dev/mqueue/queue)' 'close it before the checkpoint'
mkdir -p /srv/volume/watched
if ! criu_from 4.3; then # which finds it
    refused 'a watch in a volume' watch 'on overlay at /volume)' 'irmap-scan-path' -v /srv/app:/another -v /srv/volume:/volume
fi
start environment
if criu check --feature mem_dirty_track > /dev/null 2>&1; then echo 'a pre-dump: this kernel tracks memory'; else
    if pod container checkpoint --pre-checkpoint --export /tmp/pre.tar c1 > /tmp/said 2>&1; then echo 'a pre-dump without soft-dirty'; exit 1; fi
    grep -qF 'a pre-dump needs a kernel that tracks written pages (soft-dirty' /tmp/said || { cat /tmp/said; exit 1; }
    grep -qF 'without --pre-checkpoint' /tmp/said
    echo 'ok: a pre-dump'
fi
pod rm -f -t 0 c1 > /dev/null

# Many at once, with what the driver cannot checkpoint: all are told, each with its process and its remedy.
rm /dev/nvidia-uvm && mknod -m 666 /dev/nvidia-uvm c 1 5
mkdir -p /dev/vfio
mknod -m 666 /dev/vfio/vfio c 1 3
mknod -m 666 /dev/nvidia-fs0 c 1 3
rm -f /dev/kvm /dev/uinput
mknod -m 666 /dev/kvm c 1 3
mknod -m 666 /dev/uinput c 1 3
rm /dev/fuse && mknod -m 666 /dev/fuse c 1 3
start all --device /dev/nvidia-uvm --device /dev/vfio/vfio --device /dev/nvidia-fs0 --device /dev/fuse --device /dev/kvm --device /dev/uinput \
    --cap-add BPF --cap-add PERFMON --cap-add NET_ADMIN
if pod container checkpoint --export /tmp/c1.tar c1 > /tmp/said 2>&1; then echo "all: checkpointed"; exit 1; fi
tr '|' '\n' < /tmp/said > /tmp/lines
while IFS='|' read -r cause remedy; do
    grep -F -- "$cause" /tmp/lines | grep -E 'process [0-9]+ \(python3\): ' | grep -qF -- "$remedy" || { echo "all: not told: $cause, $remedy"; cat /tmp/lines; exit 1; }
done << 'REASONS'
it uses managed memory (UVM), 4 MiB|cudaMalloc instead of cudaMallocManaged
it is a client of NVIDIA MPS (/tmp/mps)|run it without MPS
it runs on a MIG instance (CUDA_VISIBLE_DEVICES)|give it a whole GPU
it shares GPU memory through NCCL with process |NCCL_P2P_DISABLE=1 NCCL_CUMEM_HOST_ENABLE=0
has a userfaultfd|close it before the checkpoint
serves a FUSE file system|mount it on the host
drives a device itself (VFIO)|without that device
uses GPUDirect Storage|without /dev/nvidia-fs
runs a virtual machine (KVM)|stop the virtual machine
makes an input device (/dev/uinput)|close it before the checkpoint
has a performance counter open (perf_event)|stop profiling
has a BPF program loaded|close it before the checkpoint
REASONS
[ "$(grep -c 'through NCCL' /tmp/lines)" = 1 ]
told 'twelve reasons at once' 'managed memory' 'cudaMalloc'
pod rm -f -t 0 c1 > /dev/null

ip addr add 10.9.9.9/32 dev lo
network=host refused "a TCP connection" tcp 'established TCP connection (10.9.9.9:' dev.cryopod.criu.tcp-close=true

# Output in a file of the host, as `crun run > file` leaves it.
bundle /tmp/b /bin/sh /job
echo 'i=0; while :; do echo $i; i=$((i + 1)); sleep 0.1; done' > /tmp/b/rootfs/job
jq '.linux.devices = [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}]' /tmp/b/config.json > /tmp/b/new && mv /tmp/b/new /tmp/b/config.json
(cd /tmp/b && cryopod-runtime run -d file < /dev/null > /srv/out.log 2>&1)
wait_for test -s /srv/out.log
if cryopod-runtime checkpoint --image-path /tmp/i1 file > /tmp/said 2>&1; then echo 'a file outside: checkpointed'; exit 1; fi
for want in 'goes on running: process ' '(sh)' 'descriptor 1: /srv/out.log' 'in pipes or a log of the engine'; do
    grep -qF -- "$want" /tmp/said || { echo "not told: $want"; cat /tmp/said; exit 1; }
done
lines=$(wc -l < /srv/out.log)
more() { [ "$(wc -l < /srv/out.log)" -gt $((lines + 2)) ]; }
wait_for more
echo 'ok: output in a file of the host'

# A seccomp profile with a listener outside, in the spec.
jq '.linux.seccomp.listenerPath = "/run/supervisor.sock"' /tmp/b/config.json > /tmp/b/new && mv /tmp/b/new /tmp/b/config.json
if cryopod-runtime checkpoint --image-path /tmp/i1 file > /tmp/said 2>&1; then echo 'a listener outside: checkpointed'; exit 1; fi
grep -qF 'goes on running: the container'"'"'s seccomp profile has a listener outside of it (/run/supervisor.sock); start the container with a seccomp profile without listener' /tmp/said || { cat /tmp/said; exit 1; }
lines=$(wc -l < /srv/out.log)
wait_for more
cryopod-runtime delete --force file
echo 'ok: a seccomp listener in the spec'

# What is avoided by environment, where the container asks for it when it is created.
start environment --annotation dev.cryopod.env.avoid=io_uring,nccl -e NCCL_SHM_DISABLE=0
pod exec c1 /usr/bin/python3 -c 'import os; print(sorted(e.decode() for e in open("/proc/1/environ","rb").read().split(b"\0") if e.startswith((b"UV_", b"NCCL_"))))' > /tmp/said
[ "$(cat /tmp/said)" = "['NCCL_NVLS_ENABLE=0', 'NCCL_P2P_DISABLE=1', 'NCCL_SHM_DISABLE=0', 'UV_USE_IO_URING=0']" ] || { cat /tmp/said; exit 1; }
[ "$(podman inspect -f '{{index .Config.Annotations "dev.cryopod.env.avoid"}}' c1)" = io_uring,nccl ]
jq -e '.annotations["dev.cryopod.env.set"] == "UV_USE_IO_URING=0 NCCL_P2P_DISABLE=1 NCCL_NVLS_ENABLE=0"' "$(podman inspect -f '{{.OCIConfigPath}}' c1)" > /dev/null
pod container checkpoint --export /tmp/c1.tar c1 > /dev/null
pod rm -f -t 0 c1 > /dev/null
pod container restore --import /tmp/c1.tar > /dev/null
now=$(count c1)
wait_for counted c1 $((now + 3))
pod rm -f -t 0 c1 > /dev/null
echo 'ok: environment that avoids them'
if pod run -d --name c1 --annotation dev.cryopod.env.avoid=iouring localhost/busybox true > /tmp/said 2>&1; then exit 1; fi
grep -q 'annotation dev.cryopod.env.avoid: .*iouring.* is not known; it takes io_uring, nccl' /tmp/said || { cat /tmp/said; exit 1; }
pod rm -f -t 0 c1 > /dev/null 2>&1 || true
if pod run -d --name c2 --device /dev/nvidia0 --annotation dev.cryopod.criu.action-script=/x localhost/busybox sleep 100 > /dev/null && pod container checkpoint c2 > /tmp/said 2>&1; then exit 1; fi
grep -q 'annotation dev.cryopod.criu.action-script: action-script is no CRIU option that an annotation may set' /tmp/said || { cat /tmp/said; exit 1; }
[ "$(podman inspect -f '{{.State.Status}}' c2)" = running ]
echo 'ok: annotations that cannot be followed'
