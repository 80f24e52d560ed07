# volumes.sh LOW: in volumes, a checkpoint's files come back as far as the spec's user could open, make or remove them, which
# CRIU does as root. What a stranger has added to the images is refused, and nothing on the host differs afterwards.
low=$1
mkimage
low_level "$low"
fake_gpu_nodes
from=/srv/checkpoints
mkdir -p "$from" /srv/{app,fs,shared,closed}
mount -t tmpfs own /srv/fs # CRIU finds watched files there
mkdir -p /srv/fs/{own,beside}
printf '[restore]\nallow = ["%s"]\n' "$from" >> /etc/cryopod/config.toml
on_failure() { cat /tmp/said; }
mkdir -m 700 /srv/shared/private
echo secret > /srv/shared/key && chmod 600 /srv/shared/key
echo note > /srv/shared/note && cp /srv/shared/note /srv/shared/link_remap.7
mknod -m 666 /srv/shared/disk b 7 0
ln -s /shared/key /srv/fs/own/link
python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("/srv/shared/daemon.sock")'
# The container's user is root without a capability.
chown -R 1:1 /srv/shared
cat > /srv/app/hold.py <<'P'
import ctypes, os, socket, time
written, gone = open("/own/log", "w"), open("/own/gone", "w+")
gone.write("kept")
gone.flush()
os.unlink("/own/gone")
server = socket.socket(socket.AF_UNIX)
server.bind("/own/app.sock")
server.listen()
libc = ctypes.CDLL(None)
watch = libc.inotify_init()
assert libc.inotify_add_watch(watch, b"/own", 0x100) > 0
count = 0
while True:
    gone.seek(0)
    assert gone.read() == "kept"
    print(count, file=written, flush=True)
    print(count, flush=True)
    count += 1
    time.sleep(0.1)
P
python=(-v /usr:/usr:ro -v /usr/lib64:/lib64:ro -v /usr/lib/x86_64-linux-gnu:/lib/x86_64-linux-gnu:ro)
start() { # NAME ARG...
    pod run -d --name "$1" --cap-drop all --security-opt no-new-privileges --network none --device /dev/nvidia0 \
        -v /srv/fs/own:/own -v /srv/shared:/shared -v /srv/closed:/closed:ro \
        "${python[@]}" -v /srv/app:/app:ro \
        "${@:2}" localhost/busybox /usr/bin/python3 -B /app/hold.py > /dev/null 2> /tmp/said
}
check started start c1
wait_for counted c1 3
pod container checkpoint --keep c1 > /dev/null
cp -r "$(podman inspect -f '{{.StaticDir}}' c1)/checkpoint" "$from/plain"
podman rm -f -t 0 c1 > /dev/null
restore_of() { start copy --annotation "dev.cryopod.restore=$from/$1"; }
check 'what the user may have comes back' restore_of plain
now=$(count copy)
wait_for counted copy $((now + 3))
check 'its socket' podman exec copy /usr/bin/python3 -c 'import socket; socket.socket(socket.AF_UNIX).connect("/own/app.sock")'
podman rm -f -t 0 copy > /dev/null

craft() { # CASE DIRECTORY
    python3 - "$@" <<'P'
import sys
sys.dont_write_bytecode = True
sys.path.insert(0, "/src/tests/tests/scripts/security")
import ctypes, glob, struct
from images import Image, decode, encode, field, get, put

case, directory = sys.argv[1:]
fown = [field(n, 0) for n in range(1, 6)]
opts = [field(n, 0) for n in range(1, 7)]
files = Image(f"{directory}/files.img")


def add(kind, number, *fields, id=900):
    files.messages.insert(0, [field(1, kind), field(2, id), field(number, [field(1, id), *fields])])


def opened(path, flags=0, id=900, *more):
    add(1, 3, field(2, flags), field(3, 0), field(5, fown), field(6, path), *more, id=id)


def held(path, flags=0):
    """The process has the file open."""
    opened(path, flags)
    table = Image(sorted(glob.glob(f"{directory}/fdinfo-*.img"))[0])
    table.messages.append([field(1, 900), field(2, 0), field(3, 1), field(4, 77)])
    table.write()


def sent(path):
    """A file that nobody has received yet."""
    opened(path)
    with open(f"{directory}/sk-queues.img", "wb") as out:
        message = encode([field(1, 1), field(2, 0), field(4, [field(1, 1), field(2, 900)])])
        out.write(struct.pack("<III", 0x54564319, 0x56264026, len(message)) + message)


def root_mount():
    mounts = Image(glob.glob(f"{directory}/mountpoints-*.img")[0])
    return next(get(m, 2) for m in mounts.messages if get(m, 7) in (b"/", b"./"))


def bound(path):
    add(8, 16, field(2, 77), field(3, 1), field(4, 10), field(5, 2), field(6, 0), field(7, 1), field(8, 0), field(9, fown), field(10, opts), field(11, path if isinstance(path, bytes) else path.encode()))


def lost(path, link=None, mode=0o100644, mount=None):
    """A file that has lost its name."""
    opened(path, 0, 900, *([field(7, 2 * mount)] if mount else []))
    if link:
        opened(link, id=901)
    with open(f"{directory}/remap-fpath.img", "wb") as out:
        remap = encode([field(1, 900), field(2, 901 if link else 9), field(3, 0 if link else 1)])
        out.write(struct.pack("<III", 0x54564319, 0x59133954, len(remap)) + remap)
    if not link:
        with open(f"{directory}/ghost-file-9.img", "wb") as out:
            out.write(struct.pack("<II", 0x54564319, 0x52583605))
            message = encode([field(1, 0), field(2, 0), field(3, mode)])
            out.write(struct.pack("<I", len(message)) + message)


def watched(*path, device=1, number=1, of=bytes(8)):
    words = struct.unpack("<16Q", of.ljust(128, b"\0"))
    handle = [field(1, len(of)), field(2, number), *[field(3, word) for word in words], *path]
    wd = [field(1, 900), field(2, 2), field(3, 256), field(4, 0), field(5, device), field(6, 1), field(7, handle)]
    add(11, 13, field(2, 0), field(4, fown), field(5, wd))


def outside():
    """The handle of a directory that is beside the volume, on its file system."""
    buffer, mount = ctypes.create_string_buffer(struct.pack("<Ii", 128, 0), 136), ctypes.c_int()
    libc = ctypes.CDLL(None)
    assert libc.name_to_handle_at(-100, b"/srv/fs/beside", buffer, ctypes.byref(mount), 0) == 0
    length, number = struct.unpack_from("<Ii", buffer.raw)
    mounts = Image(glob.glob(f"{directory}/mountpoints-*.img")[0])
    own = next(m for m in mounts.messages if get(m, 7).lstrip(b".") == b"/own")
    watched(device=get(own, 3), number=number, of=buffer.raw[8:8 + length])


def owned():
    first = next(m for m in files.messages if any(f[0] == 3 for f in m))
    reg = next(f for f in first if f[0] == 3)
    message = decode(reg[2])
    owner = next(f for f in message if f[0] == 5)
    owner[2] = encode([field(1, 5), field(2, 5), field(3, 9), field(4, 1), field(5, 1)])
    reg[2] = encode(message)


def port(number):
    add(2, 4, field(2, 78), field(3, 2), field(4, 1), field(5, 6), field(6, 10), field(7, number), field(8, 0), field(9, 2), field(10, 1),
        field(11, 0), field(12, 0), field(13, fown), field(14, opts))


def elsewhere():
    mounts = Image(glob.glob(f"{directory}/mountpoints-*.img")[0])
    own = next(m for m in mounts.messages if get(m, 7).lstrip(b".") == b"/shared")
    put(own, 7, "/elsewhere")
    mounts.write()


cases = {
    "key": lambda: held("/shared/key"),
    "link": lambda: held("/own/link"),
    "written": lambda: held("/shared/note", 1),
    "emptied": lambda: opened("/own/log", 0o1001),
    "node": lambda: held("/shared/disk"),
    "removed": lambda: lost("/shared/other", "/shared/note"),
    "removed-link": lambda: lost("/shared/other", "/shared/link_remap.7"),
    "deleted": lambda: lost("/shared/other"),
    "deleted-closed": lambda: lost("/closed/other"),
    "deleted-link": lambda: lost("/own/other", mode=0o120777),
    "directory": lambda: lost("/shared", mode=0o40777),
    "other-mount": lambda: lost("/shared/other", mount=root_mount()),
    "sent": lambda: sent("/own/link"),
    "no-text": lambda: bound(b"/\xff/../shared/daemon.sock"),
    "socket": lambda: bound("/shared/daemon.sock"),
    "watched": lambda: watched(field(4, "/shared/private")),
    "handle": outside,
    "owner": owned,
    "port": lambda: port(80),
    "elsewhere": elsewhere,
}
if case == "list":
    print(*cases)
else:
    cases[case]()
    files.write()
P
}
state() { find /srv/shared /srv/closed /srv/fs/own/log /run/cryopod -printf '%p %m %U %s %i\n' | sort; }
mkdir -p /run/cryopod
for case in $(craft list "$from/plain"); do
    rm -rf "$from/crafted" && cp -r "$from/plain" "$from/crafted"
    craft "$case" "$from/crafted"
    case $case in
        key | link | written | watched | sent) want="which the spec's user may not open" ;;
        # With runc, CRIU's processes are in the container's cgroup already.
        node) want='(the device node 7:0, which the spec does not give|shared/disk on restore: Operation not permitted)' ;;
        removed-link | deleted | deleted-closed | socket) want="which a restore makes anew .in /srv/.*, and the spec's user may not" ;;
        deleted-link) want='ghost-file-9.img: a deleted link' ;;
        directory) want='/shared, a deleted directory, is there again' ;;
        other-mount) want='/shared/other is made in another mount than the one that its path shows' ;;
        no-text) want='files.img: a path that is no UTF-8' ;;
        emptied) want='files.img: the file "/own/log" is to be made or emptied' ;;
        removed) want="files.img: \"/shared/note\", which CRIU would remove, is no link of CRIU's" ;;
        handle) want='a process watches a directory outside of the container, on the file system of /own' ;;
        owner) want='files.img: signals about a file are sent with the rights of user 5' ;;
        port) want='files.img: a socket with a privileged port' ;;
        elsewhere) want='the mount of /shared is at /elsewhere in the images' ;;
    esac
    state > /tmp/before
    if restore_of crafted; then echo "$case: restored" && exit 1; fi
    check "$case: refused" grep -Eq -- "$want|$hidden" /tmp/said
    podman rm -f -t 0 copy > /dev/null 2>&1 || true
    state > /tmp/after
    check "$case: the host is as before" diff /tmp/before /tmp/after
done

# Before the freeze: a file that the host has replaced in a volume that the container may only read.
echo old > /srv/closed/model
pod run -d --name c1 --network none --device /dev/nvidia0 -v /srv/closed:/closed:ro localhost/busybox \
    sh -c 'exec 3< /closed/model && exec "$@"' sh "${counter[@]}" > /dev/null
wait_for counted c1 3
rm /srv/closed/model
if pod container checkpoint --export /tmp/c1.tar c1 > /tmp/said 2>&1; then echo 'replaced: checkpointed' && exit 1; fi
check 'a deleted file of a read-only volume: refused before the freeze' grep -q 'could not be restored.* has /closed/model open or bound' /tmp/said
now=$(count c1)
check 'it goes on' wait_for counted c1 $((now + 3))
podman rm -f -t 0 c1 > /dev/null

# The same, mapped: nothing has it open.
cp /usr/lib/x86_64-linux-gnu/libz.so.1 /srv/closed/library
pod run -d --name c1 --network none --device /dev/nvidia0 -v /srv/closed:/closed:ro "${python[@]}" localhost/busybox \
    /usr/bin/python3 -Bc 'import ctypes, time
ctypes.CDLL("/closed/library")
while True: print(0, flush=True); time.sleep(0.1)' > /dev/null
wait_for counted c1 0
rm /srv/closed/library
if pod container checkpoint --export /tmp/c1.tar c1 > /tmp/said 2>&1; then echo 'mapped: checkpointed' && exit 1; fi
check 'a deleted library: refused before the freeze' grep -q 'could not be restored.* has /closed/library open or bound' /tmp/said
