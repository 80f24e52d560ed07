# engines.sh: stops that are checkpoints, under docker, with a GPU, by the variables alone; and under ctr with our shim.
simulate runc
place=/srv/place
mkdir -p "$place"
printf '[checkpoint]\nallow = [{ from = "%s", variable = true }]\n[restore]\nallow = [{ from = "%s", variable = true }]\n' \
    "$place" "$place" >> /etc/cryopod/config.toml
containerd_up
images
dockerd --containerd /run/containerd/containerd.sock --iptables=false --ip6tables=false --bip 172.30.0.1/24 \
    --add-runtime cryopod=/usr/local/bin/cryopod-runtime > /tmp/dockerd.log 2>&1 &
wait_for docker version > /dev/null 2>&1
docker import /usr/local/share/testbed/busybox.tar busybox > /dev/null
on_failure() { cat /tmp/said /var/log/cryopod-on-stop.log && tail -n 5 /tmp/dockerd.log /tmp/containerd.log; }
logs() { docker logs "$1" 2> /dev/null; }
in_sequence() { awk -v n="$1" 'NR > 1 && $n != last + 1 { exit 1 } { last = $n }'; } # FIELD: each number once

# ---- docker ----
run() { # NAME ARG...: a job with a GPU
    docker run -d --name "$1" --runtime cryopod --network none --security-opt seccomp=unconfined \
        "${nodes[@]/#/--device=}" "${binds[@]/#/--volume=}" -e LD_LIBRARY_PATH=/cusim \
        -e CRYOPOD_ON_STOP=checkpoint -e CRYOPOD_GRACE_S=60 -e CRYOPOD_CHECKPOINT_TO=$place -e CRYOPOD_RESTORE=latest:$place \
        -e CRYOPOD_RESTORE_OTHERWISE=start "${@:2}" busybox /cusim/cusim-client > /tmp/said 2>&1
}
exit_code() { docker inspect -f '{{.State.ExitCode}}' "$1"; }
check 'a first start' run d1
wait_for ticked d1 3
check 'a stop' docker stop -t 60 d1
check 'with the exit code of TERM' test "$(exit_code d1)" = 143
now=$(ticks d1)
check 'a start' docker start d1
wait_for ticked d1 $((now + 3))
check 'each step was made once' in_sequence 1 < <(logs d1)
check 'its sums are right' test -z "$(logs d1 | grep CORRUPT)"
docker rm -f d1 > /dev/null
check 'a job of a name' run d2 -e CRYOPOD_NAME=job.1
wait_for ticked d2 3
check 'stops' docker stop -t 60 d2
check 'another container of the name' run d3 -e CRYOPOD_NAME=job.1
wait_for ticked d3 3
check 'goes on' in_sequence 1 < <(logs d2 && logs d3)
check 'no image alone' sh -c "! docker run --rm --runtime cryopod -e CRYOPOD_ON_STOP=checkpoint -e CRYOPOD_CHECKPOINT_TO=/etc busybox true 2> /tmp/said"
check 'says why' says /tmp/said 'checkpoint.allow'
docker rm -f d2 d3 > /dev/null
check 'a job that is checkpointed while it runs' run d4 -e CRYOPOD_CHECKPOINT_EVERY_S=1
of_d4=$place/$(docker inspect -f '{{.Id}}' d4)
newest() { find "$of_d4" -maxdepth 1 -name '0*' -printf '%f\n' | sort | tail -n 1; }
further() { local now && now=$(newest) && [ $((10#${now:-0})) -gt "$1" ]; } # NUMBER
wait_for further 0
saved=$(ticks d4)
wait_for further $((10#$(newest) + 1)) # the next one may have begun before
kill -KILL "$(docker inspect -f '{{.State.Pid}}' d4)"
docker wait d4 > /dev/null
now=$(ticks d4) printed=$(logs d4 | wc -l)
check 'is killed, and started' docker start d4
wait_for ticked d4 $((now + 2))
goes_on_at=$(logs d4 | sed 1,"$printed"d | sed -n 1p | cut -d' ' -f1)
check 'it goes on at its last checkpoint' test "$goes_on_at" -gt "$saved" -a "$goes_on_at" -le $((now + 1))
check 'its sums are right' test -z "$(logs d4 | grep CORRUPT)"
docker rm -f d4 > /dev/null

# ---- ctr, our shim ----
# shellcheck disable=SC2016
counter=(sh -c 'i=0; while :; do echo $i; i=$((i + 1)); sleep 0.1; done')
counted_file() { [ "$(wc -l < "$1" 2> /dev/null || echo 0)" -ge "$2" ]; } # FILE N
runs() { # ID
    ctr run -d --runtime "$OURS" --log-uri "file:///tmp/counted" --annotation dev.cryopod.on-stop=checkpoint \
        --annotation dev.cryopod.grace_s=60 \
        --annotation dev.cryopod.checkpoint.to=$place --annotation dev.cryopod.name=of-ctr \
        --annotation dev.cryopod.restore=latest:$place --annotation dev.cryopod.restore.otherwise=start \
        $image "$1" "${counter[@]}" > /tmp/said 2>&1
}
check 'ctr' runs c1
wait_for counted_file /tmp/counted 5
ctr tasks kill -s SIGTERM c1
wait_for is c1 STOPPED
check 'the exit code of TERM' grep -q 'code 143' <<< "$(ctr tasks delete c1 2>&1)"
now=$(wc -l < /tmp/counted)
check 'another container' runs c2
wait_for counted_file /tmp/counted $((now + 3))
check 'each number once' in_sequence 1 < /tmp/counted
ctr tasks kill -s SIGKILL c2 && wait_for is c2 STOPPED && ctr tasks rm c2 > /dev/null
check 'nothing is left' wait_for sh -c '[ -z "$(ls -A /run/cryopod)" ] && [ -z "$(runc --root /run/docker/runtime-runc/moby list -q)" ]'
