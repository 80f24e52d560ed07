# docker.sh LOW ROUNDS: under docker, without a GPU: there the runtime packs the container's files itself, before CRIU has
# had its say.
low=$1 count=$2
. /src/tests/tests/scripts/hostile/lib.sh
low_level "$low"
containerd > /tmp/containerd.log 2>&1 &
wait_for test -S /run/containerd/containerd.sock
dockerd --containerd /run/containerd/containerd.sock --experimental --iptables=false --ip6tables=false --bridge=none \
    --add-runtime cryopod=/usr/local/bin/cryopod-runtime > /tmp/dockerd.log 2>&1 &
wait_for docker version > /dev/null 2>&1
docker import /usr/local/share/testbed/busybox.tar busybox > /dev/null
archives=(/var/lib/docker/containers)
alive() { [ "$(docker inspect -f '{{.State.Running}}' job 2> /dev/null)" = true ]; }
mounts=yes
begin() {
    docker run -d --name job --runtime cryopod --network none --cap-add SYS_ADMIN --security-opt seccomp=unconfined \
        --security-opt apparmor=unconfined -e MOUNTS="$mounts" busybox sh -c "$attack" > /dev/null
    sleep 0.5
}
again() {
    does docker rm -f job || true
    next
    begin
}
round() {
    does docker checkpoint create --leave-running job "c$1"
    local done=$?
    untouched || return
    does docker checkpoint rm job "c$1" || true
    # The next one has other mounts.
    if (($1 % 3 == 2)); then does docker rm -f job; fi
    return $done
}
rounds "$count"
does docker rm -f job
