# reports.sh LOW: what others were hit by: crun 1651 (a second checkpoint under another name), crun 2256 (a named hierarchy of
# cgroup v1 grows), dynamo snapshot 310 (a missing mount is not named), criu 2650 (two containers in one network namespace),
# criu 3095 (a mapped file that was overwritten). Each with a GPU and without.
low=$1
mkimage
simulate "$low"
from=/srv/checkpoints
mkdir -p $from /srv/volume /srv/app /tmp/named
printf '[restore]\nallow = ["%s"]\n' $from >> /etc/cryopod/config.toml
on_failure() { cat /tmp/said; }
quiet() { "$@" > /tmp/said 2>&1; }
goes_on() { local n && n=$(count "$1") && wait_for counted "$1" $((${n:-0} + 3)); }
start() { # NAME ARG...
    pod run -d --name "$@" localhost/busybox "${counter[@]}" > /dev/null && wait_for counted "$1" 3
}
fails() { if quiet "$@"; then echo "FAILED: $*: it succeeds" && exit 1; fi; }
gone() { podman rm -f -t 0 "$@" > /dev/null; }
as_before() { [ "$(named)" = "$before" ]; }
named() { find /tmp/named -name 'libpod*' | wc -l; }
# One that every process is in already, or it would be everyone's.
if [ "$low" = crun ] && grep -q name=systemd: /proc/self/cgroup; then mount -t cgroup -o none,name=systemd named /tmp/named; fi
ip netns add twice
python=(-v "$(realpath /usr/bin/python3):/python3" -v /usr/lib/x86_64-linux-gnu:/lib/x86_64-linux-gnu -v /usr/lib64:/lib64)
for lib in /usr/lib/python3.*; do python+=(-v "$lib:$lib"); done
cat > /srv/app/map.py << 'P'
import mmap, os, time
file = os.open("/volume/data", os.O_RDWR)
memory, n = mmap.mmap(file, 4096), 0
while True:
    print(n, flush=True)
    n += 1
    time.sleep(0.1)
P
for kind in plain GPU; do
    gpu=()
    if [ $kind = GPU ]; then gpu=(--device /dev/nvidia0); fi
    before=$(named)
    start c1 --network none "${gpu[@]}" -v /srv/volume:/cache
    check "$kind: a checkpoint" quiet pod container checkpoint --export $from/1.tar c1
    gone c1
    chmod go-w $from/1.tar
    fails pod run -d --name copy --network none "${gpu[@]}" --annotation dev.cryopod.restore=$from/1.tar localhost/busybox true
    check 'a copy without the mount: it is named' says /tmp/said 'has a mount at /cache that the new container lacks'
    podman rm -f -t 0 copy > /dev/null 2>&1 || true
    check 'under another name' quiet pod container restore --import $from/1.tar --name second
    check 'it goes on' goes_on second
    check 'a second checkpoint' quiet pod container checkpoint --export $from/2.tar second
    gone second
    check 'under a third' quiet pod container restore --import $from/2.tar --name third
    check 'it goes on' goes_on third
    gone third
    check 'no cgroup in a named hierarchy' wait_for as_before

    for n in 1 2; do start "t$n" --network ns:/run/netns/twice "${gpu[@]}"; done
    for verb in checkpoint restore; do
        pod container $verb t1 > /tmp/t1 2>&1 &
        check "$verb, two in one network at once" quiet podman --runtime cryopod-runtime container $verb t2
        check 'and the other' wait $!
    done
    for n in 1 2; do check 'it goes on' goes_on "t$n"; done
    gone t1 t2

    printf 'old%4093s' '' > /srv/volume/data
    pod run -d --name c1 --network none "${gpu[@]}" "${python[@]}" -v /srv/volume:/volume -v /srv/app:/app localhost/busybox /python3 /app/map.py > /dev/null
    wait_for counted c1 3
    check 'a checkpoint with a mapped file' quiet pod container checkpoint c1
    printf new | dd of=/srv/volume/data conv=notrunc status=none
    fails pod container restore c1
    check 'overwritten: refused' says /tmp/said '/volume/data .* has been written since the checkpoint'
    gone c1
done
if mountpoint -q /tmp/named; then umount /tmp/named; fi
