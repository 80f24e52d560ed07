# criu_errors.sh LOW: what CRIU fails on is refused before the freeze. Each container is checkpointed twice: by cryopod, which
# refuses and leaves it running, and by LOW alone with the same CRIU options, where CRIU does fail: so the refusal is right.
# Where CRIU fails at the restore only, LOW restores, too.
low=$1
low_level "$low"
fake_gpu_nodes
mkdir -p /srv/app /x
mount -t tmpfs x /x
bundle /x/base true
cat > /srv/app/hold.py <<'PY'
import ctypes, mmap, os, select, socket, sys, threading, time
kind = sys.argv[1]
libc = ctypes.CDLL(None, use_errno=True)
keep = []

def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def ready():
    open("/app/ready", "w").close()

def sleep():
    while True:
        time.sleep(0.05)

def child(what=lambda: None):
    pid = os.fork()
    if pid == 0:
        what()
        sleep()
    return pid

def stream():
    one = socket.socket(socket.AF_UNIX)
    one.connect("/app/host.sock")
    keep.append(one)

def protocol():
    for family, kind, number in ((2, 1, 262), (40, 1, 0), (44, 3, 0)):  # MPTCP, vsock, XDP: what the kernel has
        try:
            return keep.append(socket.socket(family, kind, number))
        except OSError:
            pass
    sys.exit("no such socket")

def nested(flag):
    def enter():
        check(libc.unshare(flag))
        open("/app/entered", "w").close()
    child(enter)
    while not os.path.exists("/app/entered"):
        time.sleep(0.01)

def pid_namespace():
    check(libc.unshare(0x20000000))
    child()

def left_namespace():
    outer = os.open("/proc/self/ns/uts", os.O_RDONLY)
    check(libc.unshare(0x04000000))
    keep.append(os.open("/proc/self/ns/uts", os.O_RDONLY))
    check(libc.setns(outer, 0))
    os.close(outer)

def first_thread():
    def others():
        threading.Thread(target=sleep).start()
        libc.syscall(60, 0)
    pid = child(others)
    while open(f"/proc/{pid}/stat").read().rsplit(") ", 1)[1][0] != "Z":
        time.sleep(0.01)

def shared_memory():
    stack = mmap.mmap(-1, 1 << 20)
    top = ctypes.addressof(ctypes.c_char.from_buffer(stack)) + (1 << 20) - 64
    libc.clone.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    check(libc.clone(ctypes.cast(libc.pause, ctypes.c_void_p), top, 0x100 | 17, None))
    keep.append(stack)

def descriptors():
    import resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    one = os.open("/dev/null", 0)
    try:
        while True:
            os.dup(one)
    except OSError:
        os.mknod("/app/ready")  # needs no descriptor
        sleep()

def system_v():
    segment = check(libc.shmget(0, 1 << 20, 0o1600))
    libc.shmat.restype = ctypes.c_void_p
    libc.shmat(segment, None, 0)
    libc.shmctl(segment, 0, None)

def epoll():
    poll = select.epoll()
    read, write = os.pipe()
    poll.register(read, select.EPOLLIN)
    child()
    os.close(read)
    keep.extend([poll, write])

def socket_path():
    server = socket.socket(socket.AF_UNIX)
    server.bind("/tmp/s")
    keep.extend([server, os.open("/tmp/s", 0o10000000)])

def watch(path):
    keep.append(check(libc.inotify_init()))
    check(libc.inotify_add_watch(keep[-1], path, 0xFFF))

def watch_deleted():  # its descriptor keeps the watch
    os.mkdir("/tmp/d")
    keep.append(os.open("/tmp/d", os.O_RDONLY))
    watch(b"/tmp/d")
    os.rmdir("/tmp/d")

def watch_covered():
    os.mkdir("/tmp/w")
    watch(b"/tmp/w")
    check(libc.mount(b"t", b"/tmp/w", b"tmpfs", 0, None))

def covered():
    os.makedirs("/tmp/a")
    keep.append(open("/tmp/a/x", "w"))
    check(libc.mount(b"t", b"/tmp/a", b"tmpfs", 0, None))

def deleted():
    keep.append(open("/tmp/ghost", "w+b"))
    keep[-1].write(b"x" * (3 << 20))
    keep[-1].flush()
    os.unlink("/tmp/ghost")

def deleted_map():
    deleted()
    keep[-1] = mmap.mmap(keep[-1].fileno(), 3 << 20)

def mounted(kind):
    os.makedirs("/tmp/m")
    check(libc.mount(b"none", b"/tmp/m", kind, 0, None))

def secret():
    fd = check(libc.syscall(447, 0))
    os.ftruncate(fd, 1 << 16)
    keep.append(mmap.mmap(fd, 1 << 16))
    os.close(fd)

def everything():  # that CRIU does dump
    first, second = socket.socketpair()
    server = socket.socket(socket.AF_UNIX)
    server.bind("/tmp/inside.sock")
    server.listen()
    waiting, accepted, gone = (socket.socket(socket.AF_UNIX) for _ in range(3))
    for one in (accepted, gone):
        one.connect("/tmp/inside.sock")
        keep.append(server.accept()[0])
    keep.pop().close()
    waiting.connect("/tmp/inside.sock")
    watch(b"/etc")
    watch(b"/")
    watch(b"/dev/shm")
    child(lambda: check(libc.unshare(0x20000)))
    keep.append(os.pidfd_open(child()))
    poll = select.epoll()
    read, write = os.pipe()
    again = os.dup(read)
    poll.register(read, select.EPOLLIN)
    poll.register(second, select.EPOLLIN)
    os.close(read)
    deleted()
    deleted_map()
    if os.fork() == 0:
        os._exit(0)
    os.mkfifo("/tmp/fifo")
    keep.extend([first, second, server, waiting, accepted, gone, poll, again, write, os.open("/tmp/fifo", os.O_RDWR)])
    keep.append(os.open("/proc/self/ns/uts", os.O_RDONLY))
    keep.append(os.open("/", os.O_RDONLY))
    keep.append(open("/etc/passwd"))
    system_v()

{
    "stream": stream,
    "protocol": protocol,
    "user": lambda: nested(0x10000000),
    "uts": lambda: nested(0x04000000),
    "net": lambda: nested(0x40000000),
    "pid": pid_namespace,
    "left": left_namespace,
    "thread": first_thread,
    "memory": shared_memory,
    "descriptors": descriptors,
    "sysv": system_v,
    "fsopen": lambda: keep.append(check(libc.syscall(430, b"tmpfs", 0))),
    "epoll": epoll,
    "path": socket_path,
    "watch": lambda: watch(b"/tmp"),
    "watch_deleted": watch_deleted,
    "watch_covered": watch_covered,
    "covered": covered,
    "deleted": deleted,
    "deleted_map": deleted_map,
    "ramfs": lambda: mounted(b"ramfs"),
    "secret": secret,
    "block": lambda: keep.append(os.open("/app/block", os.O_RDONLY | os.O_NONBLOCK)),
    "nothing": lambda: None,
    "everything": everything,
}[kind]()
ready()
sleep()
PY
python3 - <<'PY' &
import os, socket
server = socket.socket(socket.AF_UNIX)
server.bind("/srv/app/host.sock")
server.listen()
open("/srv/app/listens", "w").close()
held = []
while True:
    held.append(server.accept())
PY
listener=$!
wait_for test -e /srv/app/listens
mkfifo /x/fifo
sleep 100000 > /x/fifo &
writer=$!
(sleep 100000 | script -q -c 'sleep 100000' /dev/null > /dev/null 2>&1) &
n=0
start() { # KIND [JQ]: a container of this kind, in $id; its spec changed by JQ
    n=$((n + 1))
    id=c$n dir=/x/c$n
    mkdir -p $dir/up $dir/work $dir/rootfs
    mount -t overlay o -o lowerdir=/x/base/rootfs,upperdir=$dir/up,workdir=$dir/work $dir/rootfs
    rm -f /srv/app/ready /srv/app/entered
    jq --arg kind "$1" '.process.args = ["/usr/bin/python3", "/app/hold.py", $kind] | .process.env += ["PYTHONDONTWRITEBYTECODE=1"]
        | .mounts += [["/usr", "/usr", "ro"], ["/usr/lib64", "/lib64", "ro"], ["/usr/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu", "ro"],
                      ["/srv/app", "/app", "rw"] | {destination: .[1], source: .[0], type: "bind", options: ["bind", .[2]]}]
        | .linux.maskedPaths = [] | .linux.readonlyPaths = []
        | .linux.devices = [{path: "/dev/nvidia0", type: "c", major: 195, minor: 0}] | .linux.resources.devices = [{allow: true, access: "rwm"}]
        | .process.capabilities[] = ["CAP_SYS_ADMIN", "CAP_NET_ADMIN", "CAP_NET_RAW", "CAP_DAC_OVERRIDE", "CAP_MKNOD", "CAP_KILL"]
        | del(.process.capabilities.ambient) | del(.process.capabilities.inheritable) | del(.process.rlimits) | del(.linux.seccomp)
        | .root.path = "rootfs"' /x/base/config.json | jq "${2:-.}" > $dir/config.json
    (cd $dir && cryopod-runtime run -d $id < "${input:-/dev/null}" > >(cat > $dir/said) 2>&1) || { echo "$1: does not run"; cat $dir/said; exit 1; }
    within 60 test -e /srv/app/ready || { echo "$1: is not ready"; cat $dir/said; return 1; }
}
end() {
    cryopod-runtime delete --force $id
    umount -l $dir/rootfs
}
running() { [ "$(cryopod-runtime state $id | jq -r .status)" = running ]; }
control() { # NAME CRIU-ERROR: without cryopod CRIU fails on it
    local log=dump.log
    cp /etc/criu/default.conf /x/default.conf
    printf '%s\n' "${limit:-ghost-limit 2G}" link-remap file-locks ext-unix-sk skip-in-flight tcp-established >> /etc/criu/default.conf
    local flags=(--file-locks --ext-unix-sk --tcp-established)
    # runc 1.3 switches these off where its command line does not say otherwise.
    if [[ "$low $(runc --version)" == runc*1.[3-9].* ]]; then flags+=(--link-remap --tcp-skip-in-flight); fi
    if timeout 120 "$low" checkpoint --image-path $dir/img --work-path $dir/img "${flags[@]}" $id > /x/said 2>&1; then
        [ -n "${restores:-}" ] || { echo "$1: CRIU does not fail: the refusal is wrong"; exit 1; }
        "$low" delete --force $id > /dev/null 2>&1 || true # as runc does not remove it itself
        if (cd $dir && timeout 120 "$low" restore -d --image-path $dir/img --work-path $dir/img "${flags[@]:0:3}" $id < /dev/null > /x/said 2>&1); then
            echo "$1: CRIU restores it: the refusal is wrong"
            exit 1
        fi
        log=restore.log
    elif [ -n "${restores:-}" ]; then
        echo "$1: CRIU fails at the dump, not at the restore"
        exit 1
    fi
    mv /x/default.conf /etc/criu/default.conf
    grep -aqE -- "$2" $dir/img/$log || { echo "$1: CRIU fails on something else"; grep -a 'Error (' $dir/img/$log; cat /x/said; exit 1; }
}
refused() { # NAME CAUSE REMEDY CRIU-ERROR KIND [JQ]
    start "$5" "${6:-.}"
    if cryopod-runtime checkpoint --image-path $dir/i --work-path $dir/i $id > /x/said 2>&1; then echo "$1: checkpointed"; exit 1; fi
    for want in 'was refused and the container goes on running: ' "$2" "$3"; do
        grep -qF -- "$want" /x/said || { echo "$1: not told: $want"; cat /x/said; exit 1; }
    done
    [ ! -e $dir/i/dump.log ] || { echo "$1: CRIU has run"; exit 1; }
    running || { echo "$1: is no longer running"; exit 1; }
    control "$1" "$4"
    end
    echo "ok: $1"
}
watches_something() {
    local pid && pid=$(cryopod-runtime state $id | jq .pid)
    grep -hs '^inotify wd:1 ' /proc/$pid/fdinfo/* > /x/said
}
watches() { # the container's process watches its /tmp
    watches_something && grep -q "$(printf ' ino:%x ' "$(stat -c %i $dir/rootfs/tmp)")" /x/said
}
restored() { # KIND [AFTERWARDS]: it is not refused, and CRIU restores it
    start "$1"
    cryopod-runtime checkpoint --image-path $dir/i --work-path $dir/i $id > /x/said 2>&1 || { echo "$1: refused or failed"; cat /x/said; exit 1; }
    (cd $dir && cryopod-runtime restore -d --image-path $dir/i --work-path $dir/i $id < /dev/null > /x/said 2>&1) || { cat /x/said; grep -a 'Error (' $dir/i/restore.log; exit 1; }
    running
    "${2:-running}" || { echo "$1: is not as it was"; cat /x/said; exit 1; }
    end
}
refused 'a Unix connection to the host' 'is connected to a process outside of the container through a Unix socket (/srv/app/host.sock)' 'close the connection' 'Dangling connection|External socket is used|half of stream' stream
refused 'a socket of another protocol' 'has a socket that CRIU cannot dump (' 'TCP' 'Unsupported proto|Unknown socket collected' protocol
refused 'a user namespace' 'is in a user namespace of its own' 'without that sandbox' 'nested user namespace' user
refused 'a UTS namespace' 'is in a UTS namespace of its own' 'without that sandbox' 'nested uts namespace' uts
refused 'a PID namespace' 'is in a PID namespace of its own' 'without that sandbox' 'nested pid namespace' pid
if [ "$low" = runc ]; then # whose CRIU leaves out the network namespace
    refused 'a network namespace' 'is in a network namespace of its own' 'without that sandbox' 'more than one netns' net
fi
refused 'a namespace that nobody is in' 'has a namespace open in which no process of the container is' 'close it' 'No NS ID with kid' left
refused 'a first thread that has ended' 'its first thread has ended and others run on' 'pthread_join' 'Zombies with threads' thread
refused 'memory of two processes' 'shares its memory with process' 'wait until it has ended' "Can't make VM id" memory
refused 'no descriptor left' 'has 0 of 64 file descriptors left' 'ulimit nofile' 'Too many open files' descriptors
refused 'System V memory of the host' 'has System V shared memory mapped' 'ipc=private' "doesn't live in IPC ns" sysv '.linux.namespaces |= map(select(.type != "ipc"))'
refused 'a file of the kernel' 'has a file open that CRIU cannot dump (anon_inode:[fscontext])' 'close it' 'anon_inode:\[fscontext' fsopen
refused 'an epoll file' 'which this process has closed and another still has open' 'EPOLL_CTL_DEL' 'Dump eventpoll' epoll
refused 'the path of a socket' 'holds the path of a Unix socket open (/tmp/s, O_PATH)' 'close it' 'Bad file descriptor' path
lost='watches files that CRIU cannot find again (inotify or fanotify, on overlay at /)'
if criu_from 4.3; then # which searches all of overlayfs, and saves deleted files that a process has open
    restored watch watches
    restored watch_deleted watches_something
    restores=1 refused 'a watch of a directory that a mount covers' "$lost" 'another mount covers them' 'Unable to open inotify by handle' watch_covered
else
    for kind in watch watch_deleted watch_covered; do
        refused "inotify on overlayfs: $kind" "$lost" 'irmap-scan-path' "Can't dump that handle" $kind
    done
fi
refused 'a file that a mount covers' 'has /tmp/a/x open' 'unmount what covers it' "Can't link remap" covered
refused 'a file system that CRIU does not know' 'the mount /tmp/m is of a file system of the container' 'unmount it' 'unsupported id' ramfs
limit='ghost-limit 1M'
annotated='.annotations["dev.cryopod.criu.ghost-limit"] = "1M"'
refused 'a large deleted file' 'has a deleted file of 3 MiB open (/tmp/ghost)' 'ghost-limit=SIZE' "Can't dump ghost file" deleted "$annotated"
refused 'the same, mapped and closed' 'has a deleted file of 3 MiB open (/tmp/ghost)' 'ghost-limit=SIZE' "Can't dump ghost file" deleted_map "$annotated"
limit=
input=/x/fifo refused 'a named pipe of the host as input' 'has a file outside the container open (descriptor 0: /x/fifo)' 'in pipes or a log' "Can't lookup mount" nothing
wait_for test -e /dev/pts/0
input=/dev/pts/0 refused 'a terminal of the host as input' 'has a file outside the container open (descriptor 0: /dev/pts/0)' 'in pipes or a log' "Can't lookup mount" nothing

# Where the kernel has secret memory at all.
if start secret; then
    end
    refused 'secret memory' 'has secret memory (memfd_secret)' 'start it without' 'secretmem' secret
else
    end
    echo 'ok: secret memory, which this kernel does not have'
fi

# The remedy for a watch: CRIU finds it, and the container is restored.
printf '[criu.options]\nirmap-scan-path = "/tmp"\n' >> /etc/cryopod/config.toml
restored watch watches
low_level "$low"
echo 'ok: a watch in a directory that CRIU searches'

# What looks alike and is dumped is not refused.
restored everything
echo 'ok: nothing is refused that CRIU dumps'
kill $listener $writer
