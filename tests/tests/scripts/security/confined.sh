# confined.sh LOW: what decodes strangers' bytes can do little. In each child that decodes, a tracer makes the calls of a
# decoder that a stranger has taken over; the kernel refuses them. The command then ends as if nothing had happened.
low=$1
mkimage
simulate "$low" --proc-root /run/simulated
mount --bind /run/simulated/driver /proc/driver
probe=/src/tests/tests/scripts/security/probe.py
from=/srv/checkpoints
mkdir -p "$from" /srv/out
on_failure() { cat /tmp/probed /tmp/said; grep -h Error /var/lib/containers/storage/overlay-containers/*/userdata/dump.log; }
: > /tmp/said

# A large file takes a moment to read.
pod run -d --name c1 --network none localhost/busybox sh -c 'head -c 300000000 /dev/urandom > /big; i=0; while :; do echo $i; i=$((i + 1)); sleep 0.1; done' > /dev/null
wait_for counted c1 2
pod container checkpoint -e "$from/c1.tar.zst" c1 > /dev/null
podman rm -f -t 0 c1 > /dev/null

root_is_needed=$(stat -c %U /etc/shadow)
check 'what is tried would work for root' test "$root_is_needed" = root
refused() { # CALL: by the kernel, EPERM or EACCES
    grep -Exq "$1 (1|13)" /tmp/probed
}
saying() { "$@" > /tmp/said 2>&1; }
probed() { # NAME PROGRAM COMMAND...
    local name=$1 program=$2 tracer && shift 2
    rm -f /tmp/probed /tmp/probed.waits
    python3 "$probe" "$program" /tmp/probed &
    tracer=$!
    wait_for test -e /tmp/probed.waits
    check "$name: ends well" saying "$@"
    check "$name: decodes in a confined process" wait "$tracer"
    for call in execve open socket ptrace; do check "$name: $call is refused" refused "$call"; done
    for set in CapEff CapPrm CapBnd; do check "$name: $set is empty" grep -Exq "$set 0+" /tmp/probed; done
    check "$name: no new privileges" grep -Fxq 'NoNewPrivs 1' /tmp/probed
}
probed unpack 'cryopod unpack' cryopod unpack -q "$from/c1.tar.zst" -o /srv/out/whole
check 'it is whole' test -s /srv/out/whole/rootfs-diff.tar
probed verify 'cryopod verify' cryopod verify -q "$from/c1.tar.zst"
probed inspect 'cryopod inspect' cryopod inspect "$from/c1.tar.zst"
probed check 'cryopod check' cryopod check "$from/c1.tar.zst"
probed 'cache pull' 'cryopod cache pull' cryopod cache pull -q "$from/c1.tar.zst"
rm -r /srv/out/whole

# A restore's decoder of CRIU's images: here it takes a moment to read a deleted file.
mkdir -p /etc/criu
echo ghost-limit 500M > /etc/criu/default.conf
pod run -d --name c2 --network none localhost/busybox \
    sh -c 'head -c 400000000 /dev/urandom > /big; exec 5< /big; rm /big; i=0; while :; do echo $i; i=$((i + 1)); sleep 0.1; done' > /dev/null
wait_for counted c2 2
check 'a checkpoint with a deleted file' saying pod container checkpoint c2
probed restore cryopod-runtime pod container restore c2
podman rm -f -t 0 c2 > /dev/null

# The VRAM worker of a restore.
gpu=(--network none "${nodes[@]/#/--device=}" "${binds[@]/#/--volume=}" -e LD_LIBRARY_PATH=/cusim)
pod run -d --name job --annotation dev.cryopod.vram=on "${gpu[@]}" localhost/busybox /cusim/cusim-client --mib 800 > /dev/null
wait_for ticked job 3
check 'a checkpoint with GPU memory' pod container checkpoint job > /tmp/said
probed 'VRAM worker' '--vram-worker' pod container restore job
now=$(ticks job)
check 'the job goes on' wait_for ticked job $((now + 3))
