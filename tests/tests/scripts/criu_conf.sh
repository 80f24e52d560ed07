# criu_conf.sh LOW: what users have told CRIU still counts when cryopod adds its own.
low=$1
mkimage
low_level "$low"
fake_gpu_nodes
mark() { printf '#!/bin/sh\necho "$CRTOOLS_SCRIPT_ACTION" >> /tmp/%s\n' "$1" > "/tmp/$1.sh" && chmod 755 "/tmp/$1.sh" && echo "action-script /tmp/$1.sh"; }
mark default >> /etc/criu/default.conf
mark file > "/etc/criu/$low.conf"
mark annotation > /etc/criu/annotation.conf
chmod 644 /etc/criu/*.conf
mark env > /tmp/env.conf
gpu=(--device /dev/nvidia0)
run() { pod run -d --name c1 --network none "${gpu[@]}" "$@" localhost/busybox "${counter[@]}" > /dev/null && wait_for counted c1 2; }
# (CRIU reads the file that a runtime names twice, and then runs its scripts twice: no count.)
ran() { grep -q post-dump "/tmp/$1" || { echo "$2: $1 did not run"; exit 1; }; }

run
id=$(pod inspect -f '{{.Id}}' c1)
CRIU_CONFIG_FILE=/tmp/env.conf cryopod-runtime checkpoint --leave-running --image-path /tmp/i1 "$id"
for who in default file env; do ran $who 'no annotation'; done
rm -f /tmp/default /tmp/file /tmp/env

# `libdir` cannot be kept in a file that CRIU reads after cryopod's: refused before the freeze, and said.
mkdir -p /opt/plugins && echo 'libdir /opt/plugins' >> "/etc/criu/$low.conf"
if cryopod-runtime checkpoint --leave-running --image-path /tmp/i2 "$id" > /tmp/said 2>&1; then
    # The file is one that this runtime does not name to CRIU, and cryopod has copied it.
    [ "$low" = crun ] || { echo 'runc: not refused'; exit 1; }
    ran file 'libdir copied'
else
    grep -q "/etc/criu/$low.conf: .libdir. there overrides" /tmp/said
    [ ! -e /tmp/i2/cryopod.json ]
fi
now=$(count c1)
wait_for counted c1 $((now + 2))
pod rm -f -t 0 c1 > /dev/null
rm -f /tmp/default /tmp/file

run --annotation org.criu.config=/etc/criu/annotation.conf
id=$(pod inspect -f '{{.Id}}' c1)
cryopod-runtime checkpoint --image-path /tmp/i3 "$id"
for who in default annotation; do ran $who 'with the annotation'; done
[ ! -e /tmp/file ] # the annotation takes the file's place, as in the runtimes
pod rm -f -t 0 c1 > /dev/null

# A file that is not there, and files that no container may name: refused before the freeze, and said. Without a GPU, too:
# a restore would refuse it.
mkdir -p /opt/theirs && echo 'libdir /opt/plugins' > /opt/theirs/criu.conf
cp /etc/criu/annotation.conf /etc/criu/open.conf && chmod 666 /etc/criu/open.conf
ln -s /opt/theirs/criu.conf /etc/criu/link.conf
refused() { # FILE WANT
    run --annotation "org.criu.config=$1"
    id=$(pod inspect -f '{{.Id}}' c1)
    if cryopod-runtime checkpoint --image-path /tmp/i4 "$id" > /tmp/said 2>&1; then echo "$1: not refused"; exit 1; fi
    grep -q "$2" /tmp/said || { echo "$1: said"; cat /tmp/said; exit 1; }
    now=$(count c1)
    wait_for counted c1 $((now + 2))
    pod rm -f -t 0 c1 > /dev/null
}
refused /etc/criu/no-such.conf '/etc/criu/no-such.conf: cannot read the CRIU configuration that the annotation org.criu.config names'
gpu=()
refused /opt/theirs/criu.conf 'lies in none of the directories for CRIU.s configuration; move the file into /etc/criu'
gpu=(--device /dev/nvidia0)
refused /opt/theirs/criu.conf 'lies in none of the directories for CRIU.s configuration; move the file into /etc/criu'
refused /dev/zero 'lies in none of the directories'
refused /etc/criu/open.conf 'open.conf: cannot read .*not root.s alone'
refused /etc/criu/link.conf 'link.conf: cannot read'
# A log by another name, at a restore, too (crun 1.21 names no file to CRIU there).
if [ "$low" = runc ]; then
    gpu=()
    echo 'log-file=named.log' > /etc/criu/named.conf
    run --annotation org.criu.config=/etc/criu/named.conf
    pod container checkpoint c1 > /dev/null
    pod container restore c1 > /dev/null
    grep -q 'Restore finished' "$(pod inspect -f '{{.StaticDir}}' c1)/named.log"
fi
echo kept
