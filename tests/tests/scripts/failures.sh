# failures.sh LOW: whatever makes a checkpoint of a GPU container fail, the container goes on running, nothing is left
# behind, and the message names the cause.
low=$1
mkimage
low_level "$low"
fake_gpu_nodes
pod run -d --name c1 --network none --device /dev/nvidia0 localhost/busybox "${counter[@]}" > /dev/null
wait_for counted c1 3
id=$(pod inspect -f '{{.Id}}' c1)

# CRIU runs this user's script at each stage; where told so, it waits, so that a test can strike at a known moment.
cat > /tmp/stages.sh <<'EOF'
#!/bin/bash
[ "$CRTOOLS_SCRIPT_ACTION" = "$(cat /tmp/stop-at 2> /dev/null)" ] || exit 0
touch /tmp/reached
until [ -e /tmp/go-on ]; do sleep 0.02; done
EOF
chmod 755 /tmp/stages.sh
echo 'action-script /tmp/stages.sh' >> /etc/criu/default.conf

strays() { # processes, directories and mounts that only an operation has
    pgrep -ax 'criu|cryopod-runtime|cryopod-cuda-a' || true
    ls -A /run/cryopod 2> /dev/null || true
    grep cryopod /proc/self/mountinfo | grep -v -e /usr/local -e ' /src ' -e /opt/build || true
}
clean() { [ -z "$(strays)" ]; }
alive() { # NAME: the container counts on, nothing is left
    local now
    now=$(count c1)
    wait_for counted c1 $((now + 2)) || { echo "$1: the container stands still"; exit 1; }
    wait_for clean || { echo "$1: left behind:"; strays; exit 1; }
    echo "ok: $1"
}
fails() { # NAME WANT ARG...: a checkpoint that must fail and say WANT
    local name=$1 want=$2
    shift 2
    if cryopod-runtime "$@" "$id" > /tmp/said 2>&1; then echo "$name: succeeded"; exit 1; fi
    grep -qF -- "$want" /tmp/said || { echo "$name: said"; cat /tmp/said; exit 1; }
    alive "$name"
}
unrecorded() { [ ! -e "$1/cryopod.json" ] && [ ! -e "$1/.cryopod.json.partial" ] || { echo "$1: has metadata"; ls -A "$1"; exit 1; }; }

mv /usr/sbin/criu /usr/sbin/criu.away
fails 'criu missing' 'criu was not found on PATH; install the criu package' checkpoint --image-path /tmp/i0
mv /usr/sbin/criu.away /usr/sbin/criu
[ ! -e /tmp/i0 ]

low_level no-such-runtime
fails 'low-level runtime missing' 'the low-level runtime "no-such-runtime" (runtime.low_level in the configuration) was not found on PATH' checkpoint --image-path /tmp/i0
rm -f /tmp/log.json
fails 'the same, to a JSON log' 'no-such-runtime' --log /tmp/log.json --log-format json checkpoint --image-path /tmp/i0
jq -e '.level == "error" and (.msg | contains("no-such-runtime")) and (.time | fromdate > 0)' /tmp/log.json > /dev/null
low_level "$low"

mkdir /tmp/ro && mount -t tmpfs -o ro ro /tmp/ro
fails 'image directory read-only' '/tmp/ro/cryopod.json: cannot write' checkpoint --image-path /tmp/ro
fails 'image directory cannot be made' '/tmp/ro/x: the image directory cannot be made' checkpoint --image-path /tmp/ro/x
umount /tmp/ro
mkdir /tmp/full && mount -t tmpfs -o size=64k full /tmp/full
fails 'image directory full' 'No space left on device' checkpoint --image-path /tmp/full
unrecorded /tmp/full
umount /tmp/full
mount -t tmpfs -o size=320k full /tmp/full
fails 'image directory full in the middle' 'the file system of /tmp/full is full' checkpoint --image-path /tmp/full --work-path /tmp
unrecorded /tmp/full
umount /tmp/full

for signal in TERM INT HUP; do
    for stage in pre-dump network-lock; do
        rm -f /tmp/reached /tmp/go-on
        echo $stage > /tmp/stop-at
        # What is ignored is no interrupt: a shell has its background jobs ignore SIGINT, and nohup SIGHUP.
        env --default-signal cryopod-runtime checkpoint --image-path /tmp/i1 "$id" > /tmp/said 2>&1 &
        wrapper=$!
        wait_for test -e /tmp/reached
        kill -$signal $wrapper
        touch /tmp/go-on
        if wait $wrapper; then echo "SIG$signal at $stage: succeeded"; exit 1; fi
        grep -q "the container goes on running: it was interrupted by SIG$signal" /tmp/said || { cat /tmp/said; exit 1; }
        alive "SIG$signal at $stage"
        unrecorded /tmp/i1
        rm -rf /tmp/i1
    done
done

# Killed outright, the wrapper can clean nothing up: CRIU finds nobody in the action script and resumes the container, and the
# next operation sweeps the directory. The engine had paused it: its `resume` finds a container that runs.
rm -f /tmp/reached /tmp/go-on
echo network-lock > /tmp/stop-at
cryopod-runtime pause "$id"
cryopod-runtime checkpoint --image-path /tmp/i1 "$id" > /tmp/said 2>&1 &
wrapper=$!
wait_for test -e /tmp/reached
kill -KILL $wrapper
wait $wrapper || true
touch /tmp/go-on
wait_for sh -c '! pgrep -x criu > /dev/null'
[ ! -e /tmp/i1/cryopod.json ]
rm -f /tmp/stop-at
cryopod-runtime resume "$id"
if [ "$low" = runc ] && cryopod-runtime resume "$id" 2> /dev/null; then echo "resumed twice"; exit 1; fi
fails 'the next one after kill -9' 'cannot be made' checkpoint --image-path /proc/nowhere/x

# The runtime dies in the middle of the dump: nobody would be told of a checkpoint, so there is none. The second time the wrapper
# sees its end and CRIU's last question at once.
at_its_end() { grep -aq 'Running post-dump scripts' /tmp/i1/dump.log || ! pgrep -x --runstates R,S,D,T,t criu > /dev/null; } # CRIU gives up sooner under runc
for slow in '' 1; do
    rm -f /tmp/reached /tmp/go-on
    echo network-lock > /tmp/stop-at
    cryopod-runtime checkpoint --image-path /tmp/i1 "$id" > /tmp/said 2>&1 &
    wrapper=$!
    wait_for test -e /tmp/reached
    if [ -n "$slow" ]; then kill -STOP $wrapper; fi
    pkill -KILL -P $wrapper -x "$low" || pkill -KILL -P $wrapper
    touch /tmp/go-on
    if [ -n "$slow" ]; then
        wait_for at_its_end
        sleep 0.2
        kill -CONT $wrapper
    fi
    if wait $wrapper; then echo 'killed runtime: succeeded'; exit 1; fi
    rm -f /tmp/stop-at
    alive "the runtime is killed in the middle${slow:+, unnoticed}"
    unrecorded /tmp/i1
    rm -rf /tmp/i1
done

# A process that is inside vfork(2) at the freeze: CRIU would wait for it without an end in sight.
mkdir -p /srv/vfork
cat > /srv/vfork/v.py <<'PY'
import itertools, os, time
for i in itertools.count():
    print(i, flush=True)
    time.sleep(0.1)
    if os.path.exists("/out/vfork"):  # posix_spawn(3) is a vfork; the child waits until somebody writes
        os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 5, "/out/fifo", os.O_RDONLY, 0)])
        open("/out/spawned", "w")
PY
mkfifo /srv/vfork/fifo
pod run -d --name vforks --network none --device /dev/nvidia0 -v /srv/vfork:/out -v /usr:/usr:ro -v /usr/lib64:/lib64:ro \
    -v /usr/lib/x86_64-linux-gnu:/lib/x86_64-linux-gnu:ro localhost/busybox /usr/bin/python3 /out/v.py > /dev/null
wait_for counted vforks 1
cat > /tmp/inside-vfork.sh <<S
#!/bin/sh
touch /srv/vfork/vfork
# openat(2); an earlier child is a zombie
until cat \$(pgrep -P $(pod inspect -f '{{.State.Pid}}' vforks) | sed 's|.*|/proc/&/syscall|') < /dev/null 2> /dev/null | grep -q '^257 '; do sleep 0.05; done
S
chmod 755 /tmp/inside-vfork.sh
printf '#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != pre-dump ] || /tmp/inside-vfork.sh\n' > /tmp/stages.sh
if cryopod-runtime checkpoint --image-path /tmp/i8 "$(pod inspect -f '{{.Id}}' vforks)" > /tmp/said 2>&1; then echo 'inside vfork: succeeded'; exit 1; fi
grep -q 'checkpoint of .* failed and the container goes on running: process [0-9]* was inside vfork' /tmp/said || { cat /tmp/said; exit 1; }
unrecorded /tmp/i8
rm /srv/vfork/vfork
last=$(count vforks)
timeout 300 sh -c ': > /srv/vfork/fifo'
wait_for counted vforks $((last + 2))
# At the second try it is out of it.
cat > /tmp/stages.sh <<'S'
#!/bin/sh
[ "$CRTOOLS_SCRIPT_ACTION" = pre-dump ] || exit 0
if mkdir /srv/vfork/first; then /tmp/inside-vfork.sh
else
    rm -f /srv/vfork/vfork /srv/vfork/spawned
    timeout 300 sh -c ': > /srv/vfork/fifo; until [ -e /srv/vfork/spawned ]; do sleep 0.05; done'
fi
S
cryopod-runtime checkpoint --leave-running --image-path /tmp/i9 "$(pod inspect -f '{{.Id}}' vforks)" > /tmp/said 2>&1 || { cat /tmp/said; exit 1; }
test -e /srv/vfork/first && grep -q 'not frozen; another try' /tmp/said && test -e /tmp/i9/cryopod.json
wait_for counted vforks $(($(count vforks) + 2))
rm -r /tmp/i9
printf '#!/bin/sh\n' > /tmp/stages.sh
pod rm -f -t 0 vforks > /dev/null
alive 'a process inside vfork'

# A process that the freezer of cgroup v1 does not thaw, here because of a cgroup of its own; at the second try it does.
if [ "$low" = runc ]; then
    init=$(podman inspect -f '{{.State.Pid}}' c1)
    own=/sys/fs/cgroup/freezer$(sed -n 's/^[0-9]*:freezer://p' "/proc/$init/cgroup")/own
    mkdir "$own"
    cat > /tmp/stages.sh <<S
#!/bin/sh
[ "\$CRTOOLS_SCRIPT_ACTION" = pre-dump ] || exit 0
if mkdir /srv/first; then echo $init > $own/cgroup.procs && echo FROZEN > $own/freezer.state
else echo THAWED > $own/freezer.state; fi
S
    cryopod-runtime checkpoint --leave-running --image-path /tmp/i9 "$id" > /tmp/said 2>&1 || { cat /tmp/said; exit 1; }
    grep -q "process $init slept in the kernel" /tmp/said && grep -q 'not frozen; another try' /tmp/said && test -e /tmp/i9/cryopod.json
    echo "$init" > "${own%/own}/cgroup.procs" && rm -r /tmp/i9
    wait_for rmdir "$own" 2> /dev/null
    printf '#!/bin/sh\n' > /tmp/stages.sh
    alive 'a process that is not thawed'
fi

# The user's own script says no at the last stage: the metadata goes, the container stays.
printf '#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != post-dump ]\n' > /tmp/stages.sh
fails 'the user stops it at post-dump' 'failed and the container goes on running' checkpoint --image-path /tmp/i2
unrecorded /tmp/i2
printf '#!/bin/sh\n' > /tmp/stages.sh

# A limit that is over.
printf '[limits]\ncheckpoint_s = 1\nabort_s = 20\n' >> /etc/cryopod/config.toml
printf '#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != network-lock ] || sleep 2\n' > /tmp/stages.sh
fails 'the limit is over' 'it took longer than 1 s (limits in /etc/cryopod/config.toml)' checkpoint --image-path /tmp/i3
printf '#!/bin/sh\n' > /tmp/stages.sh
low_level "$low"

# The limit grows with the data, 40 MiB here, at a MiB a second: what was too long above is not, and CRIU is told the same.
pod run -d --name big --network none --device /dev/nvidia0 localhost/busybox sh -c 'x=$(head -c 41943040 /dev/zero | tr "\0" x); i=0; while :; do echo $i; i=$((i + 1)); sleep 0.1; done' > /dev/null
wait_for counted big 1
printf '[limits]\nslowest_mib_s = 1\ncheckpoint_s = 1\nabort_s = 20\n' >> /etc/cryopod/config.toml
printf '#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != network-lock ] || { cat /run/cryopod/*/criu.conf > /tmp/criu.conf; sleep 2; }\n' > /tmp/stages.sh
cryopod-runtime checkpoint --leave-running --image-path /tmp/i7 "$(pod inspect -f '{{.Id}}' big)" > /tmp/said 2>&1 || { cat /tmp/said; exit 1; }
limit=$(sed -n 's/^timeout //p' /tmp/criu.conf)
[ "$limit" -ge 40 ] && [ "$limit" -lt 240 ] || { cat /tmp/criu.conf; exit 1; }
printf '#!/bin/sh\n' > /tmp/stages.sh
low_level "$low"
pod rm -f -t 0 big > /dev/null
alive 'a limit that grows with the data'

# CRIU is stuck and must be killed: said so; in this stage the container survives even that.
printf '[limits]\nabort_s = 1\n' >> /etc/cryopod/config.toml
printf '#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" = network-lock ] || exit 0\ntouch /tmp/reached\nexec sleep 300\n' > /tmp/stages.sh
rm -f /tmp/reached
cryopod-runtime checkpoint --image-path /tmp/i6 "$id" > /tmp/said 2>&1 &
wrapper=$!
wait_for test -e /tmp/reached
kill -TERM $wrapper # not a limit that is over, which may be so before CRIU has come to this stage
if wait $wrapper; then echo 'CRIU is stuck: succeeded'; exit 1; fi
grep -qF 'CRIU had to be killed: see whether the container still answers' /tmp/said || { cat /tmp/said; exit 1; }
alive 'CRIU is stuck'
unrecorded /tmp/i6
printf '#!/bin/sh\n' > /tmp/stages.sh
low_level "$low"

# After all that a checkpoint works.
cryopod-runtime checkpoint --leave-running --image-path /tmp/i4 "$id"
[ -e /tmp/i4/cryopod.json ] && [ -e /tmp/i4/inventory.img ]
alive 'a checkpoint that works'

# The container is killed in the middle: CRIU and the dying init process would wait for each other.
pod run -d --name killed --network none --device /dev/nvidia0 localhost/busybox sh -c 'sleep 1000 & sleep 1001 & while :; do sleep 0.1; done' > /dev/null
cat > /tmp/stages.sh <<'EOF'
#!/bin/bash
[ "$CRTOOLS_SCRIPT_ACTION" = network-lock ] || exit 0
touch /tmp/reached
until [ -e /tmp/go-on ]; do sleep 0.02; done
EOF
rm -f /tmp/reached /tmp/go-on
timeout 300 cryopod-runtime checkpoint --image-path /tmp/i9 "$(pod inspect -f '{{.Id}}' killed)" > /tmp/said 2>&1 &
wrapper=$!
wait_for test -e /tmp/reached
kill -KILL "$(pod inspect -f '{{.State.Pid}}' killed)"
touch /tmp/go-on
code=0 && wait $wrapper || code=$?
check 'the container is killed in the middle' [ $code = 1 ]
check 'that is said' says /tmp/said 'the container is no longer running: '
check 'it is gone' wait_for sh -c '[ "$(podman inspect -f "{{.State.Status}}" killed)" = exited ]'
pod rm -f -t 0 killed > /dev/null
unrecorded /tmp/i9
printf '#!/bin/sh\n' > /tmp/stages.sh
alive 'the other one goes on'

# The container exits while the plan is made: the low-level runtime answers, then its answer is no longer true.
real=$(type -P "$low")
mkdir -p /tmp/late
cat > "/tmp/late/$low" <<EOF
#!/bin/bash
[ "\$1" = state ] || exec "$real" "\$@"
"$real" "\$@" > /tmp/late/answer
pod_pid=\$(jq .pid /tmp/late/answer)
kill -9 \$pod_pid
# A zombie, or gone: on its way there a process is one that lives.
while grep -q "^State:.[^ZX]" /proc/\$pod_pid/status 2> /dev/null; do sleep 0.01; done
cat /tmp/late/answer
EOF
chmod 755 "/tmp/late/$low"
low_level "/tmp/late/$low"
if cryopod-runtime checkpoint --image-path /tmp/i5 "$id" > /tmp/said 2>&1; then echo 'exited: succeeded'; exit 1; fi
grep -q 'has exited; there is nothing left to checkpoint' /tmp/said || { cat /tmp/said; exit 1; }
wait_for clean && [ ! -e /tmp/i5 ]
echo 'ok: the container exits during the plan'
