# migrate.sh ENGINE LOW: `cryopod migrate` to another host, and all that can break on the way. The job writes numbers to a file
# that both hosts share: it ran in one place at a time, and lost nothing, if each number follows the one before. Each engine
# meets every sixth fault, the three together half of them; FAULTS=all: each meets all.
engine=$1 low=$2
case $engine in podman) turn=0 ;; docker) turn=1 ;; ctr) turn=2 ;; esac
due() { [ "${FAULTS:-}" = all ] || [ $((turn++ % 6)) = 0 ]; }
simulate "$low"
mkdir -p /out /srv/out && mount --bind /srv/out /out
case $engine in
    podman) daemons=: ;;
    docker) daemons='ln -sf /usr/local/bin/containerd-shim-cryopod-v2 /usr/local/sbin/containerd-shim-runc-v2
        containerd_up
        dockerd --containerd /run/containerd/containerd.sock --experimental --iptables=false --ip6tables=false --bridge none \
            --add-runtime cryopod=/usr/local/bin/cryopod-runtime > /tmp/dockerd.log 2>&1 &
        wait_for docker version > /dev/null 2>&1' ;;
    ctr) daemons=containerd_up ;;
esac
eval "$daemons"
case $engine in
    podman) mkimage ;;
    docker) docker import /usr/local/share/testbed/busybox.tar localhost/busybox > /dev/null ;;
    ctr) images ;;
esac
far_host /srv/out "simulate $low; $daemons"
PATH=/place:$PATH
on_failure() { cat /tmp/said; tail -n 5 /tmp/far.log /tmp/dockerd.log /tmp/containerd.log; }
job=(sh -c 'exec /cusim/cusim-client --mib 8 >> /out/job 2>&1')
start() {
    local volumes=("${binds[@]}" /out:/out) mounts=() pair
    case $engine in
        podman) pod run -d --name job --network none "${nodes[@]/#/--device=}" "${volumes[@]/#/--volume=}" \
            -e LD_LIBRARY_PATH=/cusim localhost/busybox "${job[@]}" ;;
        docker) docker run -d --name job --runtime cryopod --network none --security-opt seccomp=unconfined \
            "${nodes[@]/#/--device=}" "${volumes[@]/#/--volume=}" -e LD_LIBRARY_PATH=/cusim localhost/busybox "${job[@]}" ;;
        ctr)
            for pair in "${volumes[@]}"; do mounts+=(--mount "type=bind,src=${pair%%:*},dst=${pair#*:},options=rbind:rw"); done
            for pair in "${nodes[@]}"; do mounts+=(--device "$pair"); done
            ctr run -d --null-io --runtime $OURS "${mounts[@]}" --env LD_LIBRARY_PATH=/cusim $image job "${job[@]}" ;;
    esac > /dev/null
}
case $engine in
    ctr)
        stop='ctr tasks kill -s SIGKILL job'
        state="ctr tasks ls | awk '\$1 == \"job\" {print \$3}'"
        remove='while ctr containers ls -q | grep -qx job; do
            ctr tasks kill -s SIGKILL job; ctr tasks resume job; sleep 0.2; ctr tasks delete job; ctr containers rm job
        done'
        known='ctr containers ls -q'
        ;;
    *)
        stop="$engine kill job"
        state="$engine container inspect -f '{{.State.Status}}' job"
        remove="$engine rm -f job"
        known="$engine ps -a --format '{{.Names}}'"
        ;;
esac
at() { "$@" "$state" 2> /dev/null | tr A-Z a-z; }
here() { [ "$(at bash -c)" = running ]; }
yonder() { [ "$(at there)" = running ]; }
known_at() { "$@" "$known" | grep -qx job; }
logs() { cat /out/job; }
follows() { awk 'NR > 1 && $1 != last + 1 {print "after " last ": " $0; bad = 1} {last = $1} END {exit bad}' /out/job && ! grep CORRUPT /out/job; }
leaves_nothing() {
    [ -z "$(ls -d /var/tmp/.cryopod-* 2> /dev/null)$(there 'ls -d /var/tmp/cryopod-*' 2> /dev/null)" ]
}
fresh() {
    { bash -c "$remove" && there "$remove"; } > /dev/null 2>&1 || true
    : > /out/job
    start
    wait_for ticked job 3
}
migrates() { cryopod migrate job ssh://root@$far > /tmp/said 2>&1; }
stays() { # WHAT MESSAGE: it fails, and runs here
    if migrates; then check "$1: fails" false; fi
    runs_here "$@"
}
runs_here() {
    check "$1: the message" says /tmp/said "^Error: job runs here.*$2"
    check "$1: in one line" test "$(wc -l < /tmp/said)" = 1
    check "$1: runs here" here
    if known_at there; then check "$1: not there" false; fi
    check "$1: goes on" goes_on job
    check "$1: each number once" follows
    check "$1: nothing is left" wait_for leaves_nothing
    check "$1: it happened" test ! -e /tmp/fault
}
runs_there() {
    check "$1: the message" says /tmp/said "^job runs on ssh://root@$far"
    check "$1: runs there" yonder
    if known_at bash -c; then check "$1: not here" false; fi
    check "$1: goes on" goes_on job
    check "$1: each number once" follows
    check "$1: nothing is left" wait_for leaves_nothing
}
goes() { # WHAT
    migrates || { on_failure && check "$1" false; }
    runs_there "$1"
}

fresh
goes 'without the image there'
there "$stop" > /dev/null 2>&1
: > /out/job
start
wait_for ticked job 3
if migrates; then check 'the name is taken: fails' false; fi
check 'the name is taken: the message' says /tmp/said 'job runs here, untouched: ssh.*a container of this name is there'
check 'the name is taken: by what was there' known_at there
fresh
goes 'with the image there'
fresh

# The name is taken in the middle: who has it stays.
case $engine in
    ctr) taken="ctr containers create $image job true" ;;
    *) taken="$engine create --name job \$($engine images -q | head -n 1) true" ;;
esac
fault 'cat >' "real \"\$@\" && real root@$far '$taken' > /dev/null"
if migrates; then check 'the name is taken meanwhile: fails' false; fi
check 'the name is taken meanwhile: the message' says /tmp/said '^Error: job runs here'
check 'the name is taken meanwhile: by what was there' known_at there
check 'the name is taken meanwhile: it goes on here' goes_on job
check 'the name is taken meanwhile: each number once' follows
check 'the name is taken meanwhile: nothing is left' wait_for leaves_nothing
fresh

# ---- what breaks: it runs here ----
instead() { # ON COMMAND: of the low-level runtime's checkpoint or restore
    local program && program=$(command -v "$low")
    [ -e /tmp/low ] || cp "$program" /tmp/low
    printf '#!/bin/sh\ncase " $* " in *" %s "*) %s;; esac\nexec /tmp/low "$@"\n' "$1" "$2" > /tmp/instead
    chmod +x /tmp/instead && mount --bind /tmp/instead "$program"
}
if due; then
    if cryopod migrate job ssh://root@10.9.0.3 > /tmp/said 2>&1; then exit 1; fi
    runs_here 'no such host' 'untouched.*cryopod check'
fi
if due; then
    there 'umount /usr/local/bin/cryopod'
    stays 'no cryopod there' 'cryopod check'
    there 'mount --bind /opt/build/cryopod /usr/local/bin/cryopod'
fi
if due; then
    there 'mv /etc/cryopod/config.toml /root; echo "[" > /etc/cryopod/config.toml'
    stays 'no valid configuration there' 'config.toml: TOML'
    there 'mv /root/config.toml /etc/cryopod/'
fi
if due; then
    there 'mount -t tmpfs -o size=1m tmpfs /var/tmp'
    stays 'a full disk there' 'No space left'
    there 'umount /var/tmp'
fi
if due; then
    there "low=$low; $(declare -f instead); instead restore 'echo as the test wants >&2; exit 1'"
    stays 'the runtime there fails' 'ssh://root@'
    there "umount \$(command -v $low)"
fi
broken() { # NAME AT COMMAND MESSAGE
    if due; then
        fault "$2" "$3"
        stays "$1" "$4"
    fi
}
# shellcheck disable=SC2016
{
    broken 'ssh is killed while it sends' 'cat >' '(head -c 1000000; exec sleep 100) | /usr/bin/ssh "$@" & sleep 1; kill -9 $!; exit 255' 'the archive'
    broken 'ssh fails before the start' '/started &&' 'exit 255' 'exit status: 255'
    broken 'the steps are killed before the stop' 'mkdir -m 700' 'kill -9 $worker' 'stopped'
    if due; then
        instead checkpoint 'kill -9 $(pgrep -f -- "--[s]teps /"); sleep 1'
        stays 'the steps are killed at the checkpoint' 'stopped'
        umount "$(command -v "$low")"
    fi
    broken 'the steps are killed while they send' 'cat >' 'kill -9 $worker; real "$@"' 'stopped'
    broken 'the steps are killed before the start' '/started &&' 'kill -9 $worker' 'stopped'
    broken interrupted 'cat >' 'kill -INT $parent; real "$@"' 'stopped'
}

# ---- it runs there ----
# shellcheck disable=SC2016
{
    if due; then
        fault '/started &&' 'real "$@" &' "until real root@$far 'ls /var/tmp/cryopod-migrate-*/started' < /dev/null > /dev/null 2>&1; do sleep 0.1; done" \
            'kill -9 $!; exit 255'
        goes 'ssh is killed at the start'
        fresh
    fi
    if due; then
        fault '/started &&' 'kill -9 $worker; real "$@"'
        goes 'the steps are killed at the start'
        fresh
    fi
    for at in 'cat >' '/started &&'; do
        due || continue
        fault "$at" 'kill -9 $parent; real "$@"'
        if migrates; then check "the parent is killed at $at" false; fi
        wait_for grep -q 'job runs' /tmp/said
        runs_there "the parent is killed at $at"
        fresh
    done
}

# ---- nobody can know ----
if due; then
    engine_there=$(there "command -v $engine")
    fault '/started &&' "real \"\$@\"; real root@$far chmod -x $engine_there; exit 255"
    if migrates; then check 'the engine there does not answer: fails' false; fi
    check 'the engine there does not answer: the message' says /tmp/said 'Error: job stays stopped here, as ssh://.* does not say whether it runs there'
    if here; then check 'the engine there does not answer: it is stopped here' false; fi
    there "chmod +x $engine_there"
    check 'the engine there does not answer: it runs there' yonder
    check 'the engine there does not answer: each number once' follows
    fresh
fi
if due; then
    fault '/started &&' 'real "$@"; ip link set near down; exit 255'
    if migrates; then check 'the network is down after the start: fails' false; fi
    check 'the network is down after the start: the message' says /tmp/said 'Error: job stays stopped here, as ssh://.* does not say whether it runs there'
    if here; then check 'the network is down after the start: it is stopped here' false; fi
    ip link set near up
    check 'the network is down after the start: it runs there' yonder
    check 'the network is down after the start: it goes on' goes_on job
    check 'the network is down after the start: each number once' follows
    fresh
fi
if due; then
    fault '/started &&' 'ip link set near down; exit 255'
    if migrates; then check 'the network is down: fails' false; fi
    check 'the network is down: the message' says /tmp/said 'Error: job stays stopped here, as ssh://.* does not say whether it runs there.*if not: .*job'
    if here; then check 'the network is down: it is stopped here' false; fi
    ip link set near up
    bash -c "$(sed -n 's/.*; if not: \([^:]*\):.*/\1/p' /tmp/said)" > /dev/null
    check 'the network is down: it goes on here' goes_on job
    check 'the network is down: each number once' follows
fi
