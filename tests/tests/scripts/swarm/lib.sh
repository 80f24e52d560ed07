# lib.sh: a cluster of three dockerd, each in namespaces of its own: another network, host name and PID namespace, and file
# systems of its own but for /srv. The services are on their hosts' network: the kernel may have no IPVS.
# shellcheck shell=bash
ip link add cluster type bridge
ip addr add 10.9.0.254/24 dev cluster
ip link set cluster up
mkdir -p /etc/docker /etc/cryopod
swarm_runtime() { # PROGRAM: dockerd's default runtime
    cat > /etc/docker/daemon.json << T
{"experimental": true, "iptables": false, "ip6tables": false, "bridge": "none", "default-runtime": "cryopod",
 "runtimes": {"cryopod": {"path": "$1"}}}
T
}
swarm_runtime /usr/local/bin/cryopod-runtime
nodes=() # the process that is init of each node
node() { # N [COMMAND]: the node runs COMMAND before its dockerd
    # shellcheck disable=SC2016 # the node's shell expands it
    unshare --mount --propagation private --net --uts --ipc --pid --fork --kill-child --mount-proc bash -euc '
        hostname "node$1"
        for dir in /run /tmp /var/lib/docker /var/cache; do mount -t tmpfs node "$dir"; done
        ip link set lo up
        until ip link show eth0 > /dev/null 2>&1; do sleep 0.05; done
        ip addr add "10.9.0.$1/24" dev eth0
        ip link set eth0 up
        eval "${2:-}"
        exec dockerd -H "unix:///srv/node$1.sock"' node "$@" > "/tmp/node$1.log" 2>&1 &
    wait_for pgrep -P $! > /dev/null
    nodes[$1]=$(pgrep -P $!)
    ip link add "veth$1" type veth peer name eth0 netns "${nodes[$1]}"
    ip link set "veth$1" master cluster up
    wait_for on "$1" version > /dev/null 2>&1
    on "$1" import /usr/local/share/testbed/busybox.tar busybox > /dev/null
}
on() { local n=$1 && shift && docker -H "unix:///srv/node$n.sock" "$@"; }
inside() { nsenter --target "${nodes[$1]}" --mount --net --uts --ipc --pid "${@:2}"; } # NODE COMMAND...
swarm() { # [COMMAND]: node 1 is the manager
    local n token
    for n in 1 2 3; do node $n "$@"; done
    on 1 swarm init --advertise-addr 10.9.0.1 > /dev/null
    token=$(on 1 swarm join-token -q worker)
    for n in 2 3; do check "node $n joins" on "$n" swarm join --token "$token" 10.9.0.1:2377; done
}
replicas() { # NODE [SERVICE]: its running containers of the service
    on "$1" ps -q --filter "label=com.docker.swarm.service.name=${2:-warm}"
}
running() { # REPLICAS NODE...
    local want=$1 n have=0
    shift
    for n; do have=$((have + $(replicas "$n" "${service:-warm}" | wc -l))); done
    [ "$have" = "$want" ]
}
