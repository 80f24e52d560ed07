# crafted.sh LOW: images that a stranger has changed byte by byte are refused in one line, which names the
# image, before anything is started; the host's files, mounts and names are as before. Each case is one change to the
# images of a container that has little: CHOWN and KILL, no-new-privileges.
low=$1
mkimage
low_level "$low"
from=/srv/checkpoints
mkdir -p "$from" /srv/data /srv/below
printf '[restore]\nallow = ["%s"]\n' "$from" >> /etc/cryopod/config.toml
on_failure() { cat /tmp/said; }
# runc and crun read the same spec; what the wrapper compares with it is the same for a copy and in place.
limits=(--cap-drop all --cap-add CHOWN --cap-add KILL --security-opt no-new-privileges --network none
    -v /srv/data:/data:ro --tmpfs /scratch --tmpfs /scratch/own)
start() { # NAME ARG...
    local name=$1 && shift
    pod run -d --name "$name" "${limits[@]}" "$@" localhost/busybox "${counter[@]}" > /dev/null 2> /tmp/said
}
save() { # CONTAINER: its images in $from
    pod container checkpoint --keep "$1" > /dev/null
    cp -r "$(podman inspect -f '{{.StaticDir}}' "$1")/checkpoint" "$from/$1"
    podman rm -f -t 0 "$1" > /dev/null
}
start root
wait_for counted root 3
save root

craft() { # CASE DIRECTORY
    python3 - "$@" <<'P'
import glob, os, shutil, struct, sys
sys.dont_write_bytecode = True
sys.path.insert(0, "/src/tests/tests/scripts/security")
from images import Image, decode, encode, field, get, put

case, directory = sys.argv[1:]
up = "../" * 12


def image(name):
    return Image(sorted(glob.glob(f"{directory}/{name}"))[0])


def inner(message, *path):
    """Opens nested messages; returns the innermost, and a function that puts it back."""
    if not path:
        return message, lambda: None
    at = next(f for f in message if f[0] == path[0])
    nested = decode(at[2])
    last, put_back = inner(nested, *path[1:])

    def close():
        put_back()
        at[2] = encode(nested)

    return last, close


def change(name, path, change):
    of = image(name)
    for message in of.messages:
        if path and not any(f[0] == path[0] for f in message):
            continue
        last, close = inner(message, *path)
        change(last)
        close()
    of.write()


def mount(at, **changes):
    """Changes the mount at a path, or adds one there like that of /dev."""
    of = image("mountpoints-*.img")
    found = [m for m in of.messages if get(m, 7).lstrip(b".") == at.encode()]
    if not found:
        like = next(m for m in of.messages if get(m, 7).lstrip(b".") == b"/dev")
        root = next(m for m in of.messages if get(m, 7) in (b"/", b"./"))
        found = [[list(f) for f in like]]
        of.messages.insert(0, found[0])
        put(found[0], 2, 9999)
        put(found[0], 4, get(root, 2))
        put(found[0], 7, at)
    for number, value in changes.items():
        put(found[0], int(number[1:]), value)
    of.write()


def again(at, **changes):
    """Mounts what is at a path once more, over itself."""
    of = image("mountpoints-*.img")
    like = next(m for m in of.messages if get(m, 7).lstrip(b".") == at.encode())
    new = [list(f) for f in like]
    put(new, 4, get(like, 2))
    put(new, 2, 9998)
    for number, value in changes.items():
        put(new, int(number[1:]), value)
    of.messages.insert(0, new)
    of.write()


def new_image(name, magic, *messages):
    with open(f"{directory}/{name}", "wb") as out:
        out.write(struct.pack("<II", 0x54564319, magic))
        for message in messages:
            data = encode(message)
            out.write(struct.pack("<I", len(data)) + data)


def cgroup(what):
    def add(controller):
        at = next(f for f in controller if f[0] == 2)
        tree = decode(at[2])
        what(tree)
        at[2] = encode(tree)

    change("cgroup.img", [2], add)


perms = [field(1, 0o4777), field(2, 1000), field(3, 1000)]
owner = [field(1, 0o755), field(2, 0), field(3, 0)]
creds = [5, 10]


def sets(**changes):
    return lambda m: [put(m, int(n[1:]), v) for n, v in changes.items()]


def words(message, number, low, high):
    message[:] = [f for f in message if f[0] != number] + [field(number, low), field(number, high)]


def first_file(message):
    files = image("files.img")
    files.messages.insert(0, message)
    files.write()


fown = [field(n, 0) for n in range(1, 6)]
opts = [field(n, 0) for n in range(1, 7)]
cases = {
    # C1: properties and directories of cgroups
    "cgroup-property": lambda: cgroup(lambda t: t.append(field(2, [field(1, "new"), field(4, owner),
        field(3, [field(1, up + "srv/victim"), field(2, "crafted"), field(3, perms)])]))),
    "cgroup-directory": lambda: cgroup(lambda t: t.append(field(2, [field(1, up + "srv/made"), field(4, owner)]))),
    "cgroup-root": lambda: cgroup(lambda t: put(t, 1, up + "srv")),
    "cgroup-of-process": lambda: change("cgroup.img", [1, 2], lambda m: put(m, 2, "/../other")),
    # C2: what is mounted, and where
    "mount-root": lambda: mount("/evil", f6="/../../../.."),
    "mount-link": lambda: mount("/evil", f6="/pts"),
    "mount-point": lambda: mount("/../evil"),
    "mount-twice": lambda: again("/dev", f2=get(image("mountpoints-*.img").messages[0], 2)),
    "mount-other-root": lambda: mount("/", f2=9997, f3=4242),
    # C3: the host's disk
    "mount-disk": lambda: mount("/disk", f1=16, f3=7 << 20, f8="/dev/loop0", f14="ext4", f18="CRIU:EXTERNAL_DEV"),
    "mount-auto": lambda: mount("/auto", f8="/etc", f18="CRIU:AUTOGENERATED"),
    "mount-new": lambda: mount("/auto", f1=16, f8="/dev/loop0", f14="ext4", f3=4243),
    # C4: flags that CRIU reads otherwise
    "mount-no-sb-flags": lambda: mount("/data", f17=None),
    "mount-writable": lambda: mount("/data", f5=0, f17=0),
    "mount-elsewhere": lambda: again("/data", f5=0, f7="./scratch/own"),
    # C6
    "apparmor": lambda: new_image("apparmor.img", 0x59423047, [field(1, [field(1, "../../x"), field(2, [field(1, "p"), field(2, b"x")])])]),
    # H1, H2, H3, H4
    "capabilities": lambda: change("core-1.img", creds, lambda m: words(m, 11, 1 << 21, 0)),
    "bounding": lambda: change("core-1.img", creds, lambda m: words(m, 12, 0xFFFFFFFF, 0x1FF)),
    "ambient": lambda: change("core-1.img", creds, lambda m: words(m, 19, 1 << 2, 0)),
    "no-new-privileges": lambda: change("core-1.img", creds, sets(f18=0)),
    "uid": lambda: change("core-1.img", creds, sets(f1=7, f3=7, f5=7, f7=7)),
    "root-of-user": lambda: None,  # the copy's spec says user 1000
    "group": lambda: change("core-1.img", creds, lambda m: m.append(field(14, 4))),
    "securebits": lambda: change("core-1.img", creds, sets(f13=1)),
    "proc-sys": lambda: again("/proc/sys", f5=0, f17=0),
    "proc-root": lambda: mount("/evil", f1=1, f3=get(next(m for m in image("mountpoints-*.img").messages if get(m, 7).lstrip(b".") == b"/proc"), 3), f6="/1/root", f8="proc"),
    "proc-whole": lambda: again("/proc/sys", f6="/"),
    "proc-unmasked": lambda: again("/proc/sys", f6="/keys", f7="./proc/keys"),
    "seccomp": lambda: change("core-1.img", [5], sets(f11=0, f12=None)),
    # CRIU takes it in place of the thread's
    "old-seccomp": lambda: change("core-1.img", [3], sets(f11=0)),
    "userns": lambda: (new_image("userns-7.img", 0x55474906, [field(1, [field(1, 0), field(2, 0), field(3, 4294967295)])]),
        change("ids-1.img", [], lambda m: put(m, 10, 7))),
    # open files, deleted files
    "packet-socket": lambda: first_file([field(1, 10), field(2, 900), field(6, [field(1, 900), field(2, 3), field(3, 768), field(4, 2), field(5, 1), field(6, fown), field(7, opts),
        field(8, 0), field(9, 0), field(10, 0), field(11, 0), field(12, 0), field(13, 0), field(14, 0), field(15, 0)])]),
    "tun": lambda: first_file([field(1, 15), field(2, 900), field(11, [field(1, 900)])]),
    "path": lambda: first_file([field(1, 1), field(2, 900), field(3, [field(1, 900), field(2, 0), field(3, 0), field(5, fown), field(6, "/../etc/shadow")])]),
    "device": lambda: new_image("ghost-file-9.img", 0x52583605, [field(1, 0), field(2, 0), field(3, 0o60666), field(6, 0x0700)]),
    "setuid": lambda: new_image("ghost-file-9.img", 0x52583605, [field(1, 0), field(2, 0), field(3, 0o104755)]),
    # what only one parser understands
    "unknown-image": lambda: new_image("strange.img", 0x59423047),
    "old-image": lambda: new_image("reg-files.img", 0x50363636),
    "unknown-field": lambda: change("core-1.img", [], lambda m: m.append(field(77, 1))),
    "twice": lambda: change("core-1.img", creds, lambda m: m.append(field(13, 0))),
    "nul": lambda: mount("/data", f7=b"/data\0/../.."),
    "long-number": lambda: change("core-1.img", creds, sets(f1=1 << 32)),
    "run-id": lambda: change("inventory.img", [], lambda m: put(m, 13, "x; flush ruleset")),
    "chroot": lambda: change("fs-1.img", [], sets(f2=77)),
    # CRIU 4.1 would read past the end for ever
    "short-pages": lambda: os.truncate(f"{directory}/pages-1.img", 30),
    "no-inventory-ids": lambda: change("inventory.img", [], lambda m: put(m, 3, None)),
}
if case == "list":
    print(*cases)
else:
    cases[case]()
P
}
mkdir -p /run/cryopod
state() { # of the host: a file, directories, mounts, its name
    stat -c '%a %u %s' /srv/victim
    ls -A /srv /etc /run/cryopod
    # The engine's own come and go.
    cut -d ' ' -f 4- /proc/self/mountinfo | grep -v /containers/ | sed 's/ master:[0-9]*//;s/ shared:[0-9]*//' | sort
    hostname
}
echo mine > /srv/victim && chmod 600 /srv/victim
rm -rf "$from/crafted" && mkdir "$from/crafted"
state > /tmp/before
for case in $(craft list /); do
    rm -rf "$from/crafted" && cp -r "$from/root" "$from/crafted"
    craft "$case" "$from/crafted"
    user=()
    [ "$case" != root-of-user ] || user=(--user 1000)
    if start copy "${user[@]}" --annotation "dev.cryopod.restore=$from/crafted"; then
        # What is mounted over a read-only path is read-only, too.
        if [ "$case" = proc-sys ]; then
            check "$case: read-only" podman exec copy sh -c '! echo 1 > /proc/sys/kernel/panic_on_oops'
            podman rm -f -t 0 copy > /dev/null && continue
        fi
        echo "$case: restored" && podman exec copy cat /proc/1/status /proc/1/mountinfo && exit 1
    fi
    case $case in
        cgroup-*) want=cgroup.img: ;;
        mount-writable | mount-elsewhere) want='the images mount /data without ro' ;;
        mount-other-root) want='the images leave /proc/' ;;
        mount-* | proc-root | proc-whole | proc-unmasked | nul) want='mountpoints-[0-9]*.img: ' ;;
        capabilities | bounding | ambient) want='has capabilities in the images that the spec does not give' ;;
        no-new-privileges) want='may gain privileges in the images' ;;
        uid | root-of-user) want='has the user id .* in the images, and the spec says' ;;
        group) want='has the group 4 in the images' ;;
        securebits | seccomp) want="has .*$case.* in the images" ;;
        packet-socket | tun | path) want=files.img: ;;
        device | setuid) want=ghost-file-9.img: ;;
        unknown-field | twice | long-number | old-seccomp) want='core-1.img: message 0: ' ;;
        run-id | no-inventory-ids) want=inventory.img: ;;
        apparmor) want=apparmor.img: ;;
        userns) want=userns-7.img: ;;
        chroot) want='fs-1.img: a root directory of its own' ;;
        short-pages) want='pagemap-[0-9]*.img: message 0: needs [0-9]* bytes of pages-1.img, which has 30' ;;
        unknown-image) want=strange.img: ;;
        old-image) want=reg-files.img: ;;
    esac
    check "$case: refused by the plan" grep -q "the restore was refused and the checkpoint is untouched: .*$want" /tmp/said
    podman rm -f -t 0 copy > /dev/null 2>&1 || true
    state > /tmp/after
    check "$case: the host is as before" diff /tmp/before /tmp/after
done
# The metadata is gone, and the spec still counts, in place too.
start root
wait_for counted root 3
pod container checkpoint --keep root > /dev/null
directory="$(podman inspect -f '{{.StaticDir}}' root)/checkpoint"
rm -f "$directory/cryopod.json"
craft capabilities "$directory"
if pod container restore --keep root > /tmp/said 2>&1; then echo 'in place: restored' && exit 1; fi
check 'in place, without metadata' grep -q 'has capabilities in the images that the spec does not give: CAP_SYS_ADMIN' /tmp/said
podman rm -f -t 0 root > /dev/null
# What is lowered, not refused: a limit, a score, a priority. And cgroups stay read-only.
rm -rf "$from/crafted" && cp -r "$from/root" "$from/crafted"
python3 - "$from/crafted" <<'P'
import glob, sys
sys.dont_write_bytecode = True
sys.path.insert(0, "/src/tests/tests/scripts/security")
from images import Image, decode, encode, field, get, put
mounts = Image(glob.glob(sys.argv[1] + "/mountpoints-*.img")[0])
cgroups = [m for m in mounts.messages if get(m, 1) in (12, 23)]
assert cgroups and all(get(m, 5) & 1 for m in cgroups)
for m in cgroups:
    put(m, 5, 1 << 21)
masked = [m for m in mounts.messages if get(m, 7).lstrip(b".") == b"/proc/keys"]
assert masked
for m in masked:
    put(m, 5, 1 << 21)
# Two masks have gone, a file's and a directory's.
gone = [b"/proc/timer_list", b"/sys/firmware"]
mounts.messages = [m for m in mounts.messages if get(m, 7).lstrip(b".") not in gone]
mounts.write()
of = Image(sys.argv[1] + "/core-1.img")
for m in of.messages:
    for f in m:
        if f[0] == 3:
            task = decode(f[2])
            put(task, 14, -900)
            put(task, 13, 0)
            for limits in (t for t in task if t[0] == 8):
                limits[2] = encode([field(1, [field(1, (1 << 64) - 1), field(2, (1 << 64) - 1)]) for _ in range(16)])
            f[2] = encode(task)
        if f[0] == 5:
            thread = decode(f[2])
            put(thread, 3, 37)  # nice -19 in zigzag
            f[2] = encode(thread)
of.write()
P
check 'a copy with limits of its own' start copy --ulimit nofile=100:200 --oom-score-adj 100 --annotation "dev.cryopod.restore=$from/crafted"
pid=$(podman inspect -f '{{.State.Pid}}' copy)
check 'a masked file has nosuid' awk '$5 == "/proc/keys" && $6 !~ /nosuid/ {open = 1} END {exit open}' "/proc/$pid/mountinfo"
check 'a mask that is gone is back' [ "$(podman exec copy cat /proc/timer_list)" = '' ]
check 'of a directory, too' [ "$(podman exec copy ls /sys/firmware)" = '' ]
for path in /proc/timer_list /sys/firmware; do check "$path is mounted" awk -v "path=$path" '$5 == path {found = 1} END {exit !found}' "/proc/$pid/mountinfo"; done
check 'its cgroups are read-only' awk '/ - cgroup/ && $6 !~ /^ro,/ {open = 1} END {exit open}' "/proc/$pid/mountinfo"
check 'its limit' grep -q 'Max open files *200 *200' "/proc/$pid/limits"
check 'its score' [ "$(cat "/proc/$pid/oom_score_adj")" = 100 ]
check 'its priority' [ "$(awk '{print $19}' "/proc/$pid/stat")" = 0 ]
podman rm -f -t 0 copy > /dev/null
# Filters that allow everything: the spec's are on top of them, once.
rm -rf "$from/crafted" && cp -r "$from/root" "$from/crafted"
python3 - "$from/crafted" <<'P'
import struct, sys
sys.dont_write_bytecode = True
sys.path.insert(0, "/src/tests/tests/scripts/security")
from images import Image, decode, encode, field, put
of = Image(sys.argv[1] + "/seccomp.img")
of.messages = [[field(1, [field(1, struct.pack("<HBBI", 6, 0, 0, 0x7FFF0000)), field(3, 0)])]]
of.write()
# CRIU takes the first one where the thread names none.
core = Image(sys.argv[1] + "/core-1.img")
thread = next(f for f in core.messages[0] if f[0] == 5)
message = decode(thread[2])
put(message, 12, None)
thread[2] = encode(message)
core.write()
P
filters() { awk '/^Seccomp_filters/ {print $2}' "/proc/$(podman inspect -f '{{.State.Pid}}' copy)/status"; }
check 'a copy with filters of its own' start copy --annotation "dev.cryopod.restore=$from/crafted"
on_top=$(filters)
check 'the spec has filters on top' [ "$on_top" -ge 2 ]
check 'in place' eval 'pod container checkpoint --keep copy > /dev/null && pod container restore --keep copy > /dev/null'
check 'no filter more' [ "$(filters)" = "$on_top" ]
now=$(count copy)
wait_for counted copy $((now + 3))
podman rm -f -t 0 copy > /dev/null
# Images that put no process into a cgroup: CRIU leaves all in its own. With runc that is the container's, not with crun.
state > /tmp/before
start root
wait_for counted root 3
pod container checkpoint --keep root > /dev/null
python3 - "$(podman inspect -f '{{.StaticDir}}' root)"/checkpoint/core-*.img <<'P'
import sys
sys.dont_write_bytecode = True
sys.path.insert(0, "/src/tests/tests/scripts/security")
from images import Image, decode, encode, get, put
for name in sys.argv[1:]:
    of = Image(name)
    for f in of.messages[0]:
        if f[0] in (3, 5):
            part = decode(f[2])
            put(part, {3: 9, 5: 16}[f[0]], None)
            f[2] = encode(part)
    of.write()
P
if pod container restore --keep root > /tmp/said 2>&1; then
    [ "$low" = runc ]
    pid=$(podman inspect -f '{{.State.Pid}}' root)
    check 'its processes are in its cgroup' grep -q libpod- "/proc/$pid/cgroup"
    same() { diff "/proc/$pid/cgroup" "/proc/$1/cgroup" || [ ! -e "/proc/$1" ]; } # its sleep may have ended
    for child in $(cat "/proc/$pid/task/$pid/children"); do
        check 'a child, too' same "$child"
    done
else
    check 'left outside: refused' grep -Eq "the images leave process [0-9]* outside of the container's cgroup /sys/fs/cgroup/|$hidden" /tmp/said
fi
podman rm -f -t 0 root > /dev/null
state > /tmp/after
check 'left outside: the host is as before' diff /tmp/before /tmp/after
# A carried program gives nobody another user whom the spec's capabilities do not give.
rm -rf "$from/crafted" && cp -r "$from/root" "$from/crafted"
mkdir -p /tmp/carried
cp /bin/true /tmp/carried/program && chmod 4755 /tmp/carried/program
tar --format=gnu --owner=7 --group=0 -C /tmp/carried -cf "$from/crafted/cryopod-rootfs.tar" program
check 'a copy with a program' start copy --annotation "dev.cryopod.restore=$from/crafted"
check 'the program is no set-user-id program' [ "$(podman exec copy stat -c '%a %u' /program)" = '755 7' ]
podman rm -f -t 0 copy > /dev/null
