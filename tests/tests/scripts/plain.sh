# plain.sh LOW: the main job for a container without a GPU, through the wrapper.
low=$1
mkimage
low_level "$low"
pod run -d --name c1 --network none localhost/busybox "${counter[@]}" > /dev/null
wait_for counted c1 5
pod container checkpoint --export /tmp/c1.tar.zst c1 > /dev/null
before=$(count c1)
pod rm -f -t 0 c1 > /dev/null
# Untouched: no metadata, no directory of an operation.
if tar --zstd -tf /tmp/c1.tar.zst | grep cryopod.json; then exit 1; fi
[ ! -e /run/cryopod ]
pod container restore --import /tmp/c1.tar.zst > /dev/null
wait_for counted c1 $((before + 5))
pod logs c1 > /tmp/numbers
seq 0 "$(tail -n 1 /tmp/numbers)" | cmp - /tmp/numbers
echo "continued from $before"
# A CRIU that is killed when it has frozen the container: the container goes on.
mkdir /tmp/killed
cat > /tmp/killed/criu << 'END'
#!/bin/bash
if [ "$(cat /proc/$PPID/comm)" = podman ]; then PATH=${PATH#*:} exec criu "$@"; fi # its check
v1=/sys/fs/cgroup/freezer$(sed -n 's/^[0-9]*:freezer://p' "/proc/$(cat /tmp/init)/cgroup")/freezer.state
if [ -e "$v1" ]; then echo FROZEN > "$v1"; else echo 1 > "/sys/fs/cgroup$(sed -n 's/^0:://p' "/proc/$(cat /tmp/init)/cgroup")/cgroup.freeze"; fi
kill -KILL $$
END
chmod +x /tmp/killed/criu
pod inspect -f '{{.State.Pid}}' c1 > /tmp/init
if PATH=/tmp/killed:$PATH pod container checkpoint c1 > /tmp/said 2>&1; then exit 1; fi
grep "the container goes on running" /tmp/said
wait_for counted c1 $(($(count c1) + 5))
# A low-level runtime that is killed in the middle: its CRIU works on. What is said is true when CRIU has ended.
mkdir /tmp/slow
cat > /tmp/slow/criu << 'END'
#!/bin/bash
PATH=${PATH#*:}
if [ "$(cat /proc/$PPID/comm)" = podman ]; then exec criu "$@"; fi
CRIU_CONFIG_FILE=/tmp/slow/conf exec criu "$@"
END
cat > /tmp/slow/wait << 'END'
#!/bin/bash
[ "$CRTOOLS_SCRIPT_ACTION" = pre-dump ] || exit 0
touch /tmp/reached
until [ -e /tmp/go-on ]; do sleep 0.05; done
END
echo 'action-script /tmp/slow/wait' > /tmp/slow/conf
chmod +x /tmp/slow/{criu,wait}
PATH=/tmp/slow:$PATH pod container checkpoint c1 > /tmp/said 2>&1 &
engine=$!
wait_for test -e /tmp/reached
pkill -KILL -x "$low" -P "$(pgrep -x cryopod-runtime)"
sleep 1 # time to say something too early; the check is after CRIU's end
touch /tmp/go-on
if wait $engine; then exit 1; fi
if grep "the container goes on running" /tmp/said; then
    wait_for counted c1 $(($(count c1) + 5))
else
    grep "the container is no longer running.*are complete: unless its engine removes them, a restore brings it back" /tmp/said
    before=$(count c1)
    over() { [ "$(pod inspect -f '{{.State.Status}}' c1)" = exited ]; }
    wait_for over # podman knows it from conmon, a moment later
    pod container restore c1 > /dev/null
    wait_for counted c1 $((before + 5))
    pod logs c1 > /tmp/numbers
    seq 0 "$(tail -n 1 /tmp/numbers)" | cmp - /tmp/numbers
fi
# A CRIU that does not end in time: said so.
rm /tmp/reached /tmp/go-on
printf '[limits]\ncheckpoint_s = 1\n' >> /etc/cryopod/config.toml
PATH=/tmp/slow:$PATH pod container checkpoint c1 > /tmp/said 2>&1 &
engine=$!
wait_for test -e /tmp/reached
pkill -KILL -x "$low" -P "$(pgrep -x cryopod-runtime)"
if wait $engine; then exit 1; fi
grep "its CRIU still works after 1 s: it may yet end the container" /tmp/said
touch /tmp/go-on
wait_for sh -c '! pgrep -x criu > /dev/null'
low_level "$low"
# A zombie that CRIU has restored has CRIU's privileges, and does not keep the container from another checkpoint.
pod run -d --name c2 --network none localhost/busybox sh -c '(exit 0) & exec tail -f /dev/null' > /dev/null
zombies() { pgrep -r Z -P "$(pod inspect -f '{{.State.Pid}}' c2)"; }
wait_for zombies > /dev/null
pod container checkpoint c2 > /dev/null
pod container restore c2 > /dev/null
zombies > /dev/null
pod container checkpoint c2 > /dev/null
# Its engine has paused it inside vfork(2): CRIU waited for that process in vain, at every try (`criu failed: type NOTIFY errno 0`).
mkdir /srv/vfork
cat > /srv/vfork/v.py << 'PY'
import itertools, os, time
for i in itertools.count():
    print(i, flush=True)
    time.sleep(0.1)
    if i == 3:  # posix_spawn(3) is a vfork; the child waits until somebody writes
        os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 5, "/out/fifo", os.O_RDONLY, 0)])
PY
mkfifo /srv/vfork/fifo
pod run -d --name c3 --network none -v /srv/vfork:/out -v /usr/bin:/usr/bin:ro -v /usr/lib:/usr/lib:ro \
    -v /usr/lib64:/lib64:ro -v /usr/lib/x86_64-linux-gnu:/lib/x86_64-linux-gnu:ro localhost/busybox /usr/bin/python3 /out/v.py > /dev/null
init=$(pod inspect -f '{{.State.Pid}}' c3) id=$(pod inspect -f '{{.Id}}' c3)
opens() { local child && child=$(pgrep -P "$init") && grep -q '^257 ' "/proc/$child/syscall"; } # openat(2)
wait_for opens
cryopod-runtime pause "$id"
(: > /srv/vfork/fifo) & # goes through when the child runs again, or at once: crun does not wait until all is frozen
writer=$!
written() { [ ! -e /proc/$writer ] || grep -q '^257 ' /proc/$writer/syscall; }
wait_for written
cryopod-runtime checkpoint --leave-running --image-path /tmp/i3 "$id"
[ "$(cryopod-runtime state "$id" | jq -r .status)" = paused ]
cryopod-runtime resume "$id"
wait_for counted c3 6
