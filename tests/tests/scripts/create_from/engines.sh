# engines.sh: containers that are created from a checkpoint by ctr and by docker, with containerd's own shim and with ours.
simulate runc
from=/srv/checkpoints
mkdir -p "$from"
printf '[restore]\nallow = [{ from = "%s", variable = true }]\n' "$from" >> /etc/cryopod/config.toml
containerd_up
images
ctr events > /tmp/events &
# shellcheck disable=SC2016
counter=(sh -c 'trap "exit 7" TERM; i=0; while :; do echo $i; i=$((i + 1)); sleep 0.1; done')
counted_file() { [ "$(tail -n 1 "$1" 2> /dev/null || echo 0)" -ge "$2" ]; } # FILE N
runs() { # ID ARG...: with ctr; its output in /tmp/ID
    local id=$1 && shift
    ctr run -d --log-uri "file:///tmp/$id" "$@" $image "$id" "${counter[@]}" > /tmp/said 2>&1 || { cat /tmp/said && return 1; }
}
ended() { # ID
    { is "$1" STOPPED || ctr tasks kill -s SIGKILL "$1" || true; } && wait_for is "$1" STOPPED && ctr tasks rm "$1" > /dev/null && ctr containers rm "$1"
}
stock=(--runtime "$STOCK" --runc-binary /usr/local/bin/cryopod-runtime)
runs first "${stock[@]}"
wait_for counted_file /tmp/first 5
pausing ctr tasks checkpoint --image-path "$from/ctr" first > /dev/null
ended first
for shim in $STOCK $OURS; do
    with=(--runtime "$shim")
    if [ "$shim" = $STOCK ]; then with=("${stock[@]}"); fi
    for i in 1 2; do
        check "ctr, $shim, $i" runs "c$i" "${with[@]}" --annotation "dev.cryopod.restore=$from/ctr"
        wait_for counted_file "/tmp/c$i" 6
        check 'it goes on' test "$(head -n 1 "/tmp/c$i")" -ge 4
        check 'exec' test "$(printed_in "c$i" 'echo inside')" = inside
    done
    ended c1
    ctr tasks kill -s SIGTERM c2
    wait_for is c2 STOPPED
    check 'its exit code' grep -q 'code 7' <<< "$(ctr tasks delete c2 2>&1)"
    ctr containers rm c2
    check 'a copy with little memory' runs oom "${with[@]}" --memory-limit 33554432 --annotation "dev.cryopod.restore=$from/ctr"
    ctr tasks exec --exec-id eat oom tail /dev/zero > /dev/null 2>&1 || true
    check 'the event of its lack' wait_for grep -q '/tasks/oom.*"oom"' /tmp/events
    ended oom
    rm /tmp/c1 /tmp/c2 /tmp/oom
    : > /tmp/events
done

dockerd --containerd /run/containerd/containerd.sock --experimental --iptables=false --ip6tables=false \
    --bip 172.30.0.1/24 --add-runtime cryopod=/usr/local/bin/cryopod-runtime > /tmp/dockerd.log 2>&1 &
wait_for docker version > /dev/null 2>&1
docker import /usr/local/share/testbed/busybox.tar busybox > /dev/null
plain=(--runtime cryopod --network none --security-opt seccomp=unconfined)
docker run -d --name d1 "${plain[@]}" busybox "${counter[@]}" > /dev/null
number() { docker logs "$1" 2> /dev/null | sed -n "$2p"; } # CONTAINER LINE
counted_docker() { local n && n=$(number "$1" '$') && [ "${n:-0}" -ge "$2" ]; }
wait_for counted_docker d1 5
docker checkpoint create --checkpoint-dir "$from" d1 docker > /dev/null
docker rm -f d1 > /dev/null
for i in 1 2; do
    check "docker, $i" docker run -d --name "copy$i" --hostname "copy$i" "${plain[@]}" -e CRYOPOD_RESTORE=$from/docker busybox "${counter[@]}"
    wait_for counted_docker "copy$i" 6
    check 'it goes on' test "$(number "copy$i" 1)" -ge 4
    check 'its own name' test "$(docker exec "copy$i" hostname)" = "copy$i"
done
check 'docker stops it' docker stop -t 1 copy1
check 'docker starts it again from the checkpoint' docker start copy1
check 'docker removes them' docker rm -f copy1 copy2
check 'nothing is left' wait_for sh -c '[ -z "$(ls -A /run/cryopod)" ] && [ -z "$(runc --root /run/docker/runtime-runc/moby list -q)" ]'
