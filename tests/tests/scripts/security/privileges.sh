# privileges.sh LOW: containers as users start them are restored; images that give more than the spec are refused.
low=$1
mkimage
low_level "$low"
fake_gpu_nodes
start() { # ARG...
    pod run -d --name c1 --network none --device /dev/nvidia0 "$@" localhost/busybox "${counter[@]}" > /dev/null
    wait_for counted c1 3
}
gone() { pod rm -f -t 0 c1 > /dev/null 2>&1 || true; }
save() {
    pod container checkpoint --export /tmp/c1.tar c1 > /tmp/said 2>&1 || { cat /tmp/said; exit 1; }
    before=$(count c1)
    gone
}
comes_back() { # NAME
    pod container restore --import /tmp/c1.tar > /tmp/said 2>&1 || { echo "$1: refused"; cat /tmp/said; exit 1; }
    wait_for counted c1 $((before + 3))
    echo "ok: $1"
}
round() { # NAME ARG...
    local name=$1 && shift
    start "$@"
    save
    comes_back "$name"
    save # and what was restored, once more
    comes_back "$name again"
    gone
}
round 'as podman starts it'
round privileged --privileged
round 'no capabilities' --cap-drop all
round 'more capabilities' --cap-add sys_admin,net_admin,sys_ptrace
round 'no seccomp' --security-opt seccomp=unconfined
round 'no-new-privileges' --security-opt no-new-privileges
# CRIU reads the limits of another user's process with CAP_SYS_RESOURCE, which a machine may keep from the bed.
if ((0x$(awk '/^CapEff/ {print $2}' /proc/self/status) >> 24 & 1)); then
    other_user=(--user 1000)
else
    other_user=()
    echo 'no CAP_SYS_RESOURCE: all processes are root'
fi
round 'another user' "${other_user[@]}"
round 'read-only' --read-only --tmpfs /tmp:ro,noexec -v /srv:/srv:ro
round 'unmasked' --security-opt unmask=ALL
round "the host's namespaces" --ipc host --uts host --cgroupns host

# Processes that entered later, one of another user, one of an ended parent: they may be lost.
start --annotation dev.cryopod.check.exec=off
pod exec -d c1 sleep 1000
pod exec -d "${other_user[@]}" c1 sleep 1001
pod exec -d c1 sh -c '(sleep 1002 &) && exec setpriv --bounding-set=-chown sleep 1003 || exec sleep 1003'
save
comes_back 'processes of exec, and one that changed its user'
gone

refused() { # NAME WANT
    if pod container restore --import /tmp/c1.tar > /tmp/said 2>&1; then echo "$1: restored"; exit 1; fi
    grep -qF -e "$2" -e "$hidden" /tmp/said || { echo "$1: said"; cat /tmp/said; exit 1; }
    gone
    [ -z "$(ls -A /run/cryopod)" ]
    echo "ok: refused: $1"
}
start
# CRIU dumps what descends from the first process: one that exec started counts once its parent has ended.
pod exec --privileged c1 sh -c '(sleep 1000 > /dev/null 2>&1 < /dev/null &)'
if pod container checkpoint --export /tmp/c1.tar c1 > /tmp/said 2>&1; then echo 'exec --privileged: checkpointed'; exit 1; fi
grep -q 'could not be restored.* has capabilities that the spec does not give: CAP_DAC_READ_SEARCH' /tmp/said || { cat /tmp/said; exit 1; }
now=$(count c1)
wait_for counted c1 $((now + 3))
echo 'ok: a process of exec --privileged is seen before the freeze'
off() { low_level "$low" && printf '[checks]\nprivileges = false\n' >> /etc/cryopod/config.toml; }
off
save
low_level "$low"
refused 'a process of exec --privileged' 'has capabilities in the images that the spec does not give: CAP_DAC_READ_SEARCH'
off
comes_back 'the same with the check off'
gone
low_level "$low"

# An archive whose images were made under another spec: what it says of itself is changed, the images stay.
changed() { # NAME JQ WANT ARG...
    local name=$1 program=$2 want=$3 && shift 3
    start "$@"
    save
    rm -rf /tmp/open && mkdir /tmp/open
    tar -C /tmp/open -xf /tmp/c1.tar
    jq "$program" /tmp/open/spec.dump > /tmp/spec && cp /tmp/spec /tmp/open/spec.dump
    tar -C /tmp/open -cf /tmp/c1.tar .
    refused "$name" "$want"
}
changed 'capabilities of a privileged container' \
    '.process.capabilities[] = ["CAP_CHOWN"]' 'capabilities in the images' --cap-add sys_admin
changed 'a writable mount' \
    '(.mounts[] | select(.destination == "/srv").options) |= map(select(. != "rw")) + ["ro"]' 'the images mount /srv without ro' -v /srv:/srv:rw
changed 'without seccomp' \
    '.linux.seccomp = {"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [{"names": ["read"], "action": "SCMP_ACT_ALLOW"}]}' 'no seccomp filter in the images' --security-opt seccomp=unconfined

# A file of a volume: CRIU opens it as root, whoever the spec's user is.
mkdir -p /srv/secrets && echo secret > /srv/secrets/key && chown 1:0 /srv/secrets/key && chmod 640 /srv/secrets/key
pod run -d --name c1 --network none --device /dev/nvidia0 --cap-drop all -v /srv/secrets:/secrets localhost/busybox \
    sh -c 'exec 3< /secrets/key && exec "$@"' sh "${counter[@]}" > /dev/null
wait_for counted c1 3
chgrp 1 /srv/secrets/key
if pod container checkpoint --export /tmp/c1.tar c1 > /tmp/said 2>&1; then echo 'a file of another user: checkpointed'; exit 1; fi
grep -q "could not be restored.* has /secrets/key open (in /srv/secrets), which the spec's user may not open" /tmp/said || { cat /tmp/said; exit 1; }
now=$(count c1)
wait_for counted c1 $((now + 3))
chgrp 0 /srv/secrets/key
save
chgrp 1 /srv/secrets/key
refused 'a file that only another user may open' "has /secrets/key open (in /srv/secrets), which the spec's user may not open"
chgrp 0 /srv/secrets/key
comes_back 'the same with the right to it'
gone
