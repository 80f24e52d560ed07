# criu_options.sh LOW: options of CRIU that the low-level runtime sends as well and so overrides, one by one: TCP connections,
# file locks, sockets of others, what is valid at a restore only. Each through checkpoint, import and copy.
low=$1
mkimage
low_level "$low"
fake_gpu_nodes
mkdir -p /srv/checkpoints /srv/app
printf '[restore]\nallow = ["/srv/checkpoints"]\n' >> /etc/cryopod/config.toml
cat > /srv/app/talk.py <<'PY'
import fcntl, socket, sys, time
address = sys.argv[1]
if address != "none":
    server = socket.create_server((address, 7000))
    here = socket.create_connection((address, 7000))
    there, _ = server.accept()
lock = open("/lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
number = 0
while True:
    try:
        talks = address == "none" or here.send(b"x") == 1 and there.recv(1) == b"x"
    except OSError:
        talks = False
    print(number, "talks" if talks else "closed", flush=True)
    number += 1
    time.sleep(0.1)
PY
# A network as an engine makes it, with an address that counts as the outside.
ip netns add net
ip -n net link set lo up
ip -n net address add 10.9.9.9/32 dev lo
options=(--network ns:/run/netns/net --device /dev/nvidia0 -v /usr:/usr:ro -v /usr/lib64:/lib64:ro -v /usr/lib/x86_64-linux-gnu:/lib/x86_64-linux-gnu:ro
    -v /srv/app:/app:ro -e PYTHONDONTWRITEBYTECODE=1)
on_failure() { cat /tmp/said; printed c1 | tail -n 3; }
number() { printed c1 | tail -n 1 | cut -d' ' -f1; }
past() { local n && n=$(number) && [ "${n:--1}" -ge "$1" ]; }
start() { # ADDRESS OPTION...
    pod run -d --name c1 "${options[@]}" "${@:2}" localhost/busybox /usr/bin/python3 /app/talk.py "$1" > /dev/null
    wait_for past 3
}
goes_on() { # WORD: what it prints of its connection
    # A copy's first line may be of before: frozen between its call and its words.
    local n && wait_for past 0 && n=$(number) && wait_for past $((n + 3)) && [ "$(printed c1 | tail -n 1 | cut -d' ' -f2)" = "$1" ]
}
locked() { podman exec c1 /usr/bin/python3 -c 'import fcntl
try: fcntl.flock(open("/lock", "w"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError: raise SystemExit(0)
raise SystemExit(1)'; }
quiet() { "$@" > /tmp/said 2>&1; }
ended() { podman rm -f -t 0 c1 > /dev/null; }
goes_through() { # NAME ADDRESS IMPORTED COPIED OPTION...: what the connection is after an import, and in a copy
    local archive=/srv/checkpoints/c1.tar name=$1 imported=$3 copied=$4
    rm -f $archive
    start "$2" "${@:5}"
    check "$name: a checkpoint" quiet pod container checkpoint --export $archive c1
    ended
    check "$name: a restore" quiet pod container restore --import $archive
    check "$name: the connection ($imported)" goes_on "$imported"
    check "$name: the lock is held" locked
    check "$name: a second checkpoint" quiet pod container checkpoint --export /tmp/again.tar c1
    ended
    chmod go-w $archive
    check "$name: a copy" quiet pod run -d --name c1 "${options[@]}" "${@:5}" --annotation dev.cryopod.restore=$archive localhost/busybox true
    check "$name: the copy's connection ($copied)" goes_on "$copied"
    check "$name: the copy's lock is held" locked
    ended
}
goes_through 'of the restore alone' none talks talks --annotation dev.cryopod.criu.mntns-compat-mode=true
if criu_from 4.2; then # older ones cannot dump a TCP socket on Linux 6.16
    goes_through 'its own loopback' 127.0.0.1 talks closed
    start 10.9.9.9
    if pod container checkpoint c1 > /tmp/said 2>&1; then echo 'FAILED: no decision about the connection' && exit 1; fi
    check 'the outside: refused' says /tmp/said 'dev.cryopod.criu.tcp-close=true'
    check 'it goes on' goes_on talks
    ended
    goes_through 'closed, as the refusal says' 10.9.9.9 closed closed --annotation dev.cryopod.criu.tcp-close=true
    goes_through 'kept, as the refusal says' 10.9.9.9 talks talks --annotation dev.cryopod.criu.tcp-established=true
    # By the configuration.
    printf '[criu.options]\ntcp-close = true\nshell-job = true\n' >> /etc/cryopod/config.toml
    goes_through 'closed, by the configuration' 10.9.9.9 closed closed
fi
