# docker.sh: docker's checkpoints, with our shim in place of containerd's own and as a runtime of its own name, on the
# networks none, host, bridge and one of the user's; what containerd's own shim makes of the same.
simulate runc
containerd_up
dockerd_up() {
    dockerd --containerd /run/containerd/containerd.sock --experimental --iptables=false --ip6tables=false \
        --bip 172.30.0.1/24 --add-runtime cryopod=/usr/local/bin/cryopod-runtime > /tmp/dockerd.log 2>&1 &
    dockerd_pid=$!
    wait_for docker version > /dev/null 2>&1
}
restart() { # with another PATH for containerd
    kill $dockerd_pid && wait $dockerd_pid || true
    containerd_down
    PATH=$1 containerd_up
    dockerd_up
}
dockerd_up
docker import /usr/local/share/testbed/busybox.tar busybox > /dev/null
logs() { docker logs "$1" 2>&1; }
# shellcheck disable=SC2016
counts=(busybox sh -c 'echo $$ > /made; i=0; while :; do i=$((i + 1)); echo $i; sleep 0.1; done')
plain() { # NAME RUNTIME NETWORK [OPTION]...
    docker run -d --name "$1" --runtime "$2" --network "$3" --security-opt seccomp=unconfined "${@:4}" "${counts[@]}" > /dev/null
    wait_for beyond "$1" 5
}
last() { docker logs --tail 1 "$1" 2> /dev/null; }
beyond() { local n && n=$(last "$1") && [ "${n:-0}" -gt "$2" ]; }
running() { [ "$(docker inspect -f '{{.State.Running}}' "$1")" = "$2" ]; }
address() { docker exec "$1" ip -4 -o addr show | awk '{print $2, $4}' | grep -v docker0 | sort | tr '\n' ' '; }
has_network() { # NAME NETWORK: its address, on the bridge as docker gave it, and the way to the host
    case $2 in
        bridge | mine) [ "$(address "$1")" = "eth0 $(docker inspect -f "{{.NetworkSettings.Networks.$2.IPAddress}}" "$1")/24 lo 127.0.0.1/8 " ] &&
            docker exec "$1" ping -c 1 -W 5 "$(docker inspect -f "{{.NetworkSettings.Networks.$2.Gateway}}" "$1")" > /dev/null &&
            { [ "$2" = bridge ] || docker exec "$1" nslookup "$1" > /dev/null; } ;; # docker's own name service
        *) docker exec "$1" ip -4 -o addr show lo | grep -q 127.0.0.1 ;;
    esac
}
no_holder() { ! pgrep -fx '/proc/self/exe hold' > /dev/null; }
# docker 26 fails as long as containerd has not thrown away what it kept of the checkpoint before: a container's spec is the
# same each time.
forgotten() { [ -z "$(ctr -n moby content ls -q 2> /dev/null)" ]; }
checkpoint() {
    wait_for forgotten
    docker checkpoint create "$@" > /dev/null 2> /tmp/failed && return
    criu_says || true
    # CRIU 4.2 now and then cannot stop what version 1's freezer holds. These containers have no GPU, so runc and CRIU are
    # on their own; the container runs on.
    # `find` fails where a file goes meanwhile, and grep must read to the end: else what writes to it dies of SIGPIPE.
    { criu_says 2>&1 || true; } | grep 'Unseizable non-zombie .* state D' > /dev/null || { cat /tmp/failed && return 1; }
    docker checkpoint create "$@" > /dev/null
}
criu_says() { find /run/containerd /var/lib/containerd -name 'criu-*.log' -exec grep -H 'Error\|Warn' {} + >&2; }
cycle() { # RUNTIME NETWORK HOW-IT-ENDS
    local title="$1 on $2" at pid
    plain c1 "$1" "$2"
    checkpoint --leave-running c1 first
    at=$(last c1)
    check "$title: left running" wait_for beyond c1 "$at"
    checkpoint c1 second
    case $3 in
        itself) check "$title: it ends" wait_for running c1 false ;;
        # docker sends the options of a checkpoint to runtimes of containerd's own name alone.
        killed) docker kill c1 > /dev/null && wait_for running c1 false ;;
    esac
    at=$(last c1)
    docker start --checkpoint second c1
    check "$title: restored, it goes on" wait_for beyond c1 "$at"
    check "$title: exec and the file" test "$(docker exec c1 cat /made)" = 1
    check "$title: the network" has_network c1 "$2"
    check "$title: nobody holds its network" wait_for no_holder
    # once more, from what was restored
    checkpoint c1 third
    if [ "$3" = killed ]; then docker kill c1 > /dev/null; fi
    wait_for running c1 false
    at=$(last c1)
    docker start --checkpoint third c1
    check "$title: restored a second time" wait_for beyond c1 "$at"
    check "$title: the network again" has_network c1 "$2"
    docker rm -f c1 > /dev/null
}
# What containerd's own shim makes of it: 28 fails always but on the host's network, 26 whenever containerd has not yet
# thrown away the checkpoint's tar.
plain c1 runc bridge
docker checkpoint create c1 cp > /dev/null
wait_for running c1 false
if docker start --checkpoint cp c1 > /tmp/said 2>&1; then
    echo "containerd's own shim: restored"
else
    check "containerd's own shim: fails" says /tmp/said '/proc/0/ns/net|already exists'
fi
docker rm -f c1 > /dev/null
rm -rf /tmp/ctrd-checkpoint* # which it leaves
gpu=(--security-opt seccomp=unconfined "${nodes[@]/#/--device=}" "${binds[@]/#/--volume=}" -e LD_LIBRARY_PATH=/cusim)
docker run -d --name g0 --runtime cryopod "${gpu[@]}" busybox /cusim/cusim-client --mib 8 > /dev/null
wait_for ticked g0 3
/opt/build/cusim-ctl --socket "$sim" set fail-checkpoint > /dev/null
if docker checkpoint create g0 never > /tmp/said 2>&1; then exit 1; fi
check "containerd's own shim: docker gives cryopod's reason" says /tmp/said 'cryopod: checkpoint of .* failed and the container goes on running: checkpoint of process'
check "containerd's own shim: and the sum goes on" goes_on g0
/opt/build/cusim-ctl --socket "$sim" clear > /dev/null
docker rm -f g0 > /dev/null

cycle io.containerd.cryopod.v2 none killed
cycle io.containerd.cryopod.v2 bridge killed

# The shim in place of containerd's.
mkdir -p /place
ln -s /usr/local/bin/containerd-shim-cryopod-v2 /place/containerd-shim-runc-v2
restart "/place:$PATH"
docker network create --subnet 172.31.0.0/24 mine > /dev/null
for network in none host bridge mine; do cycle cryopod $network itself; done
check 'in place: a container of runc keeps runc' sh -c '
    docker run -d --name c2 --runtime runc busybox sleep 1000 > /dev/null
    id=$(docker inspect -f "{{.Id}}" c2)
    grep -q "runc$" "/run/containerd/io.containerd.runtime.v2.task/moby/$id/runtime" 2> /dev/null ||
        grep -q "\"binary_name\":\"[^\"]*runc\"" "/run/containerd/io.containerd.runtime.v2.task/moby/$id/options.json"
    docker rm -f c2 > /dev/null'

# A container's own end, and files, in a fresh container.
fresh() { # NAME OPTION...: the container NAME2, with the checkpoint of NAME
    local of=$1 && shift
    docker create --name "${of}2" --runtime cryopod --network bridge --security-opt seccomp=unconfined "$@" > /dev/null
    cp -a "/var/lib/docker/containers/$(docker inspect -f '{{.Id}}' "$of")/checkpoints" \
        "/var/lib/docker/containers/$(docker inspect -f '{{.Id}}' "${of}2")/"
}
plain f1 cryopod bridge
# shellcheck disable=SC2016
docker exec f1 sh -c 'echo mine > /root/file; mkdir /d; ln -s x /d/link; chmod 4755 /root/file; rm /etc/group; rm -r /tmp; mkdir /tmp; touch /tmp/new'
checkpoint f1 cp
fresh f1 "${counts[@]}"
docker start --checkpoint cp f12
check 'a fresh container: it goes on' wait_for beyond f12 3
check 'a fresh container: the files are there' docker exec f12 sh -c '
    test "$(cat /root/file)" = mine && test -u /root/file && test "$(readlink /d/link)" = x && test -f /tmp/new'
check 'a fresh container: what was deleted is not' docker exec f12 test ! -e /etc/group
docker rm -f f1 f12 > /dev/null

# The runtime is killed when CRIU has ended the container. docker removes the images of a checkpoint that failed.
cat > /usr/local/sbin/criu << 'CRIU'
#!/bin/bash
code=0
/usr/sbin/criu "$@" || code=$?
if [ "$*" = 'swrk 3' ] && ! pgrep -f '^sh -c echo .* > /made' > /dev/null; then pkill -KILL -x cryopod-runtime; touch /tmp/struck; fi
exit $code
CRIU
chmod +x /usr/local/sbin/criu
plain k1 cryopod bridge
checkpoint k1 cp
rm /usr/local/sbin/criu
check 'the runtime killed at the end: it was' test -e /tmp/struck
wait_for running k1 false
at=$(last k1)
docker start --checkpoint cp k1
check 'the runtime killed at the end: restored, it goes on' wait_for beyond k1 "$at"
docker rm -f k1 > /dev/null

# A checkpoint that cannot be restored
plain b1 cryopod bridge
checkpoint b1 cp
wait_for running b1 false
rm "/var/lib/docker/containers/$(docker inspect -f '{{.Id}}' b1)/checkpoints/cp/pages-1.img"
if timeout 60 docker start --checkpoint cp b1 > /tmp/said 2>&1; then exit 1; fi
check 'a damaged checkpoint: docker says so' says /tmp/said 'restore failed'
check 'a damaged checkpoint: nothing runs' running b1 false
check 'a damaged checkpoint: nobody holds its network' wait_for no_holder
docker start b1 > /dev/null
check 'a damaged checkpoint: the container starts anew' running b1 true
docker rm -f b1 > /dev/null

# GPUs
docker run -d --name g1 --runtime cryopod "${gpu[@]}" busybox /cusim/cusim-client --mib 100 > /dev/null
wait_for ticked g1 3
before=$(sum g1)
docker exec g1 sh -c 'echo mine > /root/file'
checkpoint --leave-running g1 one
check 'GPU: left running, the sum goes on' goes_on g1
checkpoint g1 cp
fresh g1 "${gpu[@]:2}" busybox /cusim/cusim-client --mib 100
docker start --checkpoint cp g12
check 'GPU: restored in a fresh container, the sum goes on' goes_on g12
check 'GPU: the same sum' test "$(sum g12)" = "$before"
check 'GPU: the file is there' test "$(docker exec g12 cat /root/file)" = mine
check 'GPU: the network' has_network g12 bridge
/opt/build/cusim-ctl --socket "$sim" set fail-lock > /dev/null
if docker checkpoint create g12 never > /tmp/said 2>&1; then exit 1; fi
check 'GPU: a refusal names process and cause' says /tmp/said 'the container goes on running.*cusim-client'
check 'GPU: and the sum goes on' goes_on g12
/opt/build/cusim-ctl --socket "$sim" clear > /dev/null
docker rm -f g1 g12 > /dev/null

# containerd that is started again deletes a task without processes, with the exit that it has not told.
plain e1 cryopod none
pid=$(docker inspect -f '{{.State.Pid}}' e1)
containerd_down -KILL
kill -KILL "$pid"
containerd_up
check 'an end without containerd: docker learns of it' wait_for running e1 false
docker start e1 > /dev/null
check 'an end without containerd: the container starts anew' wait_for running e1 true
docker rm -f e1 > /dev/null

check 'no shim is left' wait_for no_shims
check 'no mount is left' wait_for sh -c '! grep -q runtime.v2.task /proc/mounts'
check 'no unpacked checkpoint is left' wait_for sh -c '! ls -d /tmp/ctrd-checkpoint*'
