# walls.sh LOW: what CRIU sees of the host at a restore, and images that reach for more, with the checks of the images off.
# The same images reach it through the low-level runtime alone, so that each can.
low=$1
mkimage
low_level "$low"
from=/srv/checkpoints
mkdir -p "$from" /srv/data
printf '[checks]\nprivileges = false\nimages = false\n[restore]\nallow = ["%s"]\n' "$from" >> /etc/cryopod/config.toml
on_failure() { cat /tmp/said /tmp/seen; find /var/lib/containers/storage/overlay-containers -name restore.log -exec tail -n 5 {} +; }

# ---- what CRIU sees: a program in its place looks, and becomes CRIU ----
mkdir -p /opt/probe
cat > /opt/probe/criu <<'PROBE'
#!/bin/bash
# The source of a volume is the one place that CRIU sees as the host does.
{
    for node in /dev/* /dev/*/*; do
        if [ -b "$node" ]; then echo "disk $node"; fi
    done
    for path in /srv/secret /etc/shadow /proc/1/root/srv/secret /proc/2/root/srv/secret /proc/$PPID/root/srv/secret \
        /proc/$PPID/cwd /sys/kernel/debug/tracing /sys/kernel/security/apparmor/policy /var/lib/containers/storage/overlay; do
        if [ -e "$path" ]; then echo "sees $path"; fi
    done
    for path in /usr/bin/env /usr/lib/os-release /etc/passwd /proc/sys/kernel/core_pattern /proc/sysrq-trigger /sys/kernel/uevent_helper; do
        if : >> "$path"; then echo "writes $path"; fi
    done
    mount -o remount,rw /usr
    mount -o remount,bind,rw /usr
    if : >> /usr/bin/env; then echo 'writes /usr after a remount'; fi
    # Its descriptors, and what the runtime's lead to.
    for fd in /proc/self/fd/* /proc/$PPID/fd/* .; do
        if [ -e "$fd/../../../../../../../../../srv/secret" ]; then echo "a descriptor leads to the host"; fi
    done
    echo end
} > "/srv/data/$(findmnt -n -o SOURCE /)" 2> /dev/null
exec /usr/sbin/criu "$@"
PROBE
chmod 755 /opt/probe/criu
echo secret > /srv/secret
mknod /dev/disk b 7 900
start() { # NAME ARG...
    local name=$1 && shift
    pod run -d --name "$name" --network none -v /srv/data:/data:ro "$@" localhost/busybox "${counter[@]}" > /dev/null 2> /tmp/said
}
saved() { # CONTAINER: its images, and the container removed
    pod container checkpoint --keep "$1" > /dev/null
    cp -r "$(podman inspect -f '{{.StaticDir}}' "$1")/checkpoint" "$from/$1"
    podman rm -f -t 0 "$1" > /dev/null
}
copy() { start copy --annotation "dev.cryopod.restore=$from/$1"; }
start c1
wait_for counted c1 3
saved c1
cp /etc/cryopod/config.toml /tmp/config.toml
printf '[criu]\nprogram = "/opt/probe/criu"\n' >> /etc/cryopod/config.toml
check 'a copy' copy c1
cp /srv/data/cryopod /tmp/seen
check 'nothing of the host is seen' test "$(cat /tmp/seen)" = end
wait_for counted copy 6
podman rm -f -t 0 copy > /dev/null
# The probe can tell.
printf 'private_root = false\n' >> /etc/cryopod/config.toml
check 'a copy without the root' copy c1
cp /srv/data/overlay /tmp/seen
for line in 'sees /srv/secret' 'sees /proc/1/root/srv/secret' 'disk /dev/disk' 'writes /usr/bin/env' 'a descriptor leads to the host'; do
    check "without: $line" grep -qx "$line" /tmp/seen
done
podman rm -f -t 0 copy > /dev/null
cp /tmp/config.toml /etc/cryopod/config.toml

# ---- crafted images ----
craft() { # KIND DIRECTORY
    python3 - "$@" <<'P'
import glob, os, sys
sys.dont_write_bytecode = True
sys.path.insert(0, "/src/tests/tests/scripts/security")
from images import Image, decode, encode, field, get, put

kind, directory = sys.argv[1:]
up = "../" * 40

def cgroup(change):
    image = Image(directory + "/cgroup.img")
    fields = image.messages[0]
    for at, (number, _, value) in enumerate(fields):
        if number == 2:  # a controller
            controller = decode(value)
            if b"" in [v for n, _, v in controller if n == 1] or not any(n == 2 for n, _, _ in fields[:at]):
                for d in controller:
                    if d[0] == 2:  # its first directory
                        inner = decode(d[2])
                        inner.append(field(2, change))
                        d[2] = encode(inner)
                        break
            fields[at][2] = encode(controller)
    image.write()

def mount(**changes):
    image = Image(glob.glob(directory + "/mountpoints-*.img")[0])
    root = next(m for m in image.messages if get(m, 7) in (b"/", b"./", b"."))
    like = next(m for m in image.messages if get(m, 7) == b"/dev")
    new = [list(f) for f in like]
    put(new, 2, 9999)
    put(new, 4, get(root, 2))
    put(new, 7, "/tmp")
    put(new, 5, 0)
    put(new, 17, 0)
    for number, value in changes.items():
        put(new, int(number[1:]), value)
    image.messages.append(new)
    image.write()

perms = [field(1, 0o4777), field(2, 1000), field(3, 1000)]
if kind == "property":
    cgroup([field(1, "crafted"), field(4, [field(1, 0o755), field(2, 0), field(3, 0)]),
            field(3, [field(1, up + "srv/victim"), field(2, "crafted"), field(3, perms)])])
elif kind == "process":
    cgroup([field(1, "crafted"), field(4, [field(1, 0o755), field(2, 0), field(3, 0)]),
            field(3, [field(1, up + "proc/1/root/srv/victim"), field(2, "crafted"), field(3, perms)])])
elif kind == "directory":
    cgroup([field(1, up + "srv/made"), field(4, perms)])
elif kind == "root":
    mount(f6="/" + up)
elif kind == "data":
    mount(f6="/" + up + "srv")
elif kind == "disk":
    mount(f1=16, f3=7 << 20 | int(os.environ["DISK"][9:]), f6="/", f8=os.environ["DISK"], f9="", f14="ext4", f18="CRIU:EXTERNAL_DEV")
P
}
# A disk of the host.
mknod /dev/loop-control c 10 237
for n in {0..31}; do mknod "/dev/loop$n" b 7 "$n"; done
tar -C /tmp -xf /usr/local/share/testbed/busybox.tar ./bin/busybox
truncate -s 4M /tmp/disk
/tmp/bin/busybox mke2fs -F /tmp/disk > /dev/null
free=$(losetup -f) || free=
if [ -n "$free" ]; then
    losetup "$free" /tmp/disk && trap 'losetup -d "$free"' EXIT
fi
export DISK=$free
reset() { rm -rf /srv/made && echo mine > /srv/victim && chmod 600 /srv/victim && chown 0:0 /srv/victim; }
untouched() { [ "$(stat -c '%a %u %s' /srv/victim)" = '600 0 5' ] && [ ! -e /srv/made ]; }
reaches() { # CONTAINER: has it the host's files?
    ! untouched || podman exec "$1" sh -c 'for f in srv/secret secret etc/shadow lost+found; do [ ! -e "/tmp/$f" ] || exit 0; done; exit 1'
}
kinds=(property process directory root data disk)
[ -n "$free" ] || kinds=(property process directory root data)
for kind in "${kinds[@]}"; do
    reset
    name=copy
    rm -rf "$from/crafted" && cp -r "$from/c1" "$from/crafted"
    craft "$kind" "$from/crafted"
    if copy crafted; then what='restored, contained'; else what="refused: $(tail -n 1 /tmp/said | tail -c 150)"; fi
    check "$kind: the host is untouched" untouched
    if podman container exists copy && [ "$(podman inspect -f '{{.State.Running}}' copy)" = true ]; then
        check "$kind: nothing of the host is inside" eval '! reaches copy'
    fi
    echo "$kind: $what"
    podman rm -f -t 0 copy > /dev/null 2>&1 || true
    # The same through the low-level runtime alone.
    reset
    RUNTIME=$low start stock
    wait_for counted stock 3
    RUNTIME=$low pod container checkpoint --keep stock > /dev/null
    craft "$kind" "$(podman inspect -f '{{.StaticDir}}' stock)/checkpoint"
    RUNTIME=$low pod container restore --keep stock > /tmp/said 2>&1 || true
    # runc puts CRIU into the container's cgroup, which denies it the disk.
    [ "$kind $low" = 'disk runc' ] || check "$kind: reaches the host through $low alone" reaches stock
    podman rm -f -t 0 stock > /dev/null 2>&1 || true
    reset
done
