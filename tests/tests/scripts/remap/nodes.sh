# nodes.sh LOW: containers whose GPU nodes lead elsewhere after a restore, on nodes of other drivers. No process has a
# GPU open, so no plugin is needed.
#
# Nodes X are 10:229 and 10:237 (fuse, loop-control: whatever is behind them, the cgroup answers first), node Y is
# 1:11 (kmsg, which wants the capability SYSLOG), which every kernel has and no container is allowed by itself.
low=$1
mkimage
configure() { # [MAP]
    low_level "$low"
    [ $# = 0 ] || printf '[gpu]\nmap = "%s"\n' "$1" >> /etc/cryopod/config.toml
}
node() { rm -f "$1" && mkdir -p "${1%/*}" && mknod -m 666 "$1" c "$2" "$3"; }
run() { # ARG...
    pod run -d --name c1 --network none --cap-add SYSLOG "$@" localhost/busybox "${counter[@]}" > /dev/null
    wait_for counted c1 3
}
save() {
    pod container checkpoint --export /tmp/c1.tar c1 > /dev/null
    before=$(count c1)
    pod rm -f -t 0 c1 > /dev/null
    sum=$(sha256sum < /tmp/c1.tar)
}
restore() {
    pod container restore --import /tmp/c1.tar > /tmp/said 2>&1 || { cat /tmp/said; exit 1; }
    wait_for counted c1 $((before + 3))
    [ "$(sha256sum < /tmp/c1.tar)" = "$sum" ]
    [ -z "$(ls -A /run/cryopod)" ]
}
is() { # PATH MAJOR:MINOR in hex, inside
    local got && got=$(pod exec c1 stat -c %t:%T "$1")
    [ "$got" = "$2" ] || { echo "$1 is $got, not $2"; exit 1; }
}
usable() {
    pod exec c1 sh -c "echo '<7>cryopod: a test writes here' > $1 && dd bs=8192 count=1 if=$1 2> /dev/null | grep -q ." ||
        { echo "$1 cannot be read and written"; exit 1; }
}
allowed() { # PATH: opened, or refused by what is behind it
    if pod exec c1 sh -c "exec 3<> $1" > /tmp/said 2>&1; then return; fi
    if grep -q 'not permitted' /tmp/said; then echo "$1 is denied" && exit 1; fi
}
# Denied is EPERM; anything else that open says comes from behind the cgroup.
denied() { # MAJOR MINOR: even under a node made anew
    pod exec --privileged c1 sh -c "rm -f /tmp/x && mknod /tmp/x c $1 $2"
    if pod exec c1 sh -c 'exec 3<> /tmp/x' > /tmp/said 2>&1 || ! grep -q 'not permitted' /tmp/said; then
        echo "$1:$2 is not denied" && cat /tmp/said && exit 1
    fi
}
refused() { # WANT
    if pod container restore --import /tmp/c1.tar > /tmp/said 2>&1; then echo "restored: $1"; exit 1; fi
    grep -qF -- "$1" /tmp/said || { echo "not told: $1"; cat /tmp/said; exit 1; }
    [ "$(sha256sum < /tmp/c1.tar)" = "$sum" ] && [ -z "$(ls -A /run/cryopod)" ]
    pod rm -f -t 0 c1 > /dev/null 2>&1 || true
}

# One NVIDIA node.
node /dev/nvidia0 10 229
chown 0:44 /dev/nvidia0
node /dev/nvidiactl 10 237
configure
run --device /dev/nvidia0 --device /dev/nvidiactl
is /dev/nvidia0 a:e5
allowed /dev/nvidia0
save
node /dev/nvidia1 1 11
configure /dev/nvidia0=/dev/nvidia1
restore
is /dev/nvidia1 1:b
is /dev/nvidia0 1:b
is /dev/nvidiactl a:ed
[ "$(pod exec c1 stat -c %a:%g /dev/nvidia1)" = 666:44 ]
usable /dev/nvidia1
usable /dev/nvidia0
allowed /dev/nvidiactl
denied 10 229
echo 'ok: another NVIDIA node'

# The restored container again: the engine still names the first node; the checkpoint's own is kept.
save
configure
restore
is /dev/nvidia1 1:b
is /dev/nvidia0 1:b
usable /dev/nvidia1
denied 10 229
echo 'ok: and once more'
# NVIDIA's library removes a node of another number than its name's, and here has no right to make it anew.
pod exec c1 rm /dev/nvidia0
save
node /dev/nvidia2 10 237
configure /dev/nvidia1=/dev/nvidia2
restore
is /dev/nvidia2 a:ed
is /dev/nvidia0 a:ed
[ "$(pod exec c1 stat -c %a:%g /dev/nvidia0)" = 666:44 ]
allowed /dev/nvidia2
denied 1 11
echo 'ok: to a third, from where the first name has gone'
save
configure
rm /dev/nvidia1 /dev/nvidia2
restore
is /dev/nvidia0 a:e5
allowed /dev/nvidia0
denied 1 11
echo 'ok: and back, by itself, where only the first is left'
pod rm -f -t 0 c1 > /dev/null

# A swapped pair: every name leads to where it always does.
node /dev/nvidia1 1 11
run --device /dev/nvidia0 --device /dev/nvidia1
save
configure 0=1,1=0
restore
is /dev/nvidia0 a:e5
is /dev/nvidia1 1:b
usable /dev/nvidia1
echo 'ok: two swapped'
pod rm -f -t 0 c1 > /dev/null

# What is not there.
configure /dev/nvidia0=/dev/nvidia7
refused 'this host has no GPU /dev/nvidia7'
configure
rm /dev/nvidia1
refused 'no GPU of this host can take the place of /dev/nvidia1: none is left'
rm /dev/nvidiactl /dev/nvidia0
refused 'no GPU of this host can take the place of /dev/nvidia0'
echo 'ok: refused what is absent'

# AMD: the kfd has another number on the target, and the GPU another render node.
node /dev/kfd 10 237
node /dev/dri/renderD128 10 229
run --device /dev/kfd --device /dev/dri/renderD128
is /dev/dri/renderD128 a:e5
save
node /dev/kfd 5 1
node /dev/dri/renderD130 1 11
configure renderD128=renderD130
restore
is /dev/dri/renderD130 1:b
is /dev/dri/renderD128 1:b
is /dev/kfd 5:1
usable /dev/dri/renderD130
usable /dev/dri/renderD128
allowed /dev/kfd
denied 10 229
denied 10 237
echo 'ok: other AMD nodes'
pod rm -f -t 0 c1 > /dev/null
