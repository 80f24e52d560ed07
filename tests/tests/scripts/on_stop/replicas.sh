# replicas.sh LOW: replicas of one server, which are stopped into one place: the weights, which are the same in all of them, are
# stored once.
# shellcheck shell=bash disable=SC2154
low=$1
mkimage
simulate "$low"
place=/srv/place
mkdir -p "$place"
printf '[checkpoint]\nallow = ["%s"]\n[restore]\nallow = ["%s"]\n' "$place" "$place" >> /etc/cryopod/config.toml
nothing_runs() { ! pgrep -f '^cryopod-(on-stop|lease) ' > /dev/null; }
replica() { # CONTAINER NAME ARG...
    pod run -d --name "$1" --network none "${nodes[@]/#/--device=}" "${binds[@]/#/--volume=}" -e LD_LIBRARY_PATH=/cusim \
        --annotation dev.cryopod.on-stop=checkpoint --annotation "dev.cryopod.checkpoint.to=$place" \
        --annotation dev.cryopod.parent=auto --annotation "dev.cryopod.name=$2" "${@:3}" \
        localhost/busybox /cusim/cusim-client --mib 256 --chunk-mib 64 --train-mib 4 > /tmp/said 2>&1
}
stop() { # CONTAINER TICKS
    wait_for ticked "$1" "$2"
    check "$1 is stopped" podman stop -t 60 "$1" > /tmp/said 2>&1
    wait_for nothing_runs
}
facts() { jq -e ".gpu.vram | $2" "$place/$1/cryopod.json" > /dev/null; }
stored() { # bytes of GPU memory in the place, and all bytes
    cat "$place"/*/*/cryopod.json | jq -s 'map(.gpu.vram.stored_bytes) | add'
}

replica r0 server-0
stop r0 3
one=$(stored)
whole=$(du -s --block-size=1 "$place" | cut -f1)
for n in {1..9}; do
    replica "r$n" "server-$n"
    stop "r$n" $((3 + n % 3))
    check "server-$n: the weights are in another one's" facts "server-$n/000001" '.parent > .chunks / 2'
done
check 'ten store at most 1.3 times what one does' test "$(stored)" -le $((one * 13 / 10))
echo "GPU memory of ten: $(stored) bytes, of one: $one; all: $(du -s --block-size=1 "$place" | cut -f1) and $whole"

# The next container of a name builds upon what that name has, and that stays as long as others build upon it.
sum=$(podman logs r0 | tail -n 1 | cut -d' ' -f2)
for n in 2 3 4; do
    replica "again$n" server-0 --annotation "dev.cryopod.restore=latest:$place"
    check "$n: the sums are right" goes_on "again$n"
    stop "again$n" 5
    digest=$(jq -r .gpu.vram.digest "$place/server-0/00000$((n - 1))/cryopod.json")
    check "$n: the weights are in the last one" facts "server-0/00000$n" ".parent_digest == \"$digest\" and .parent > .chunks / 2"
done
check 'the first one stays' test -e "$place/server-0/000001/cryopod.json"
for n in {1..9}; do check "server-$n is whole" cryopod verify "$place/server-$n/000001" > /tmp/said 2>&1; done
replica last server-9 --annotation "dev.cryopod.restore=latest:$place"
check 'the last one goes on' goes_on last

# Another host mounts the place elsewhere.
mv "$place" /srv/elsewhere
check 'server-3 is whole elsewhere, too' cryopod verify /srv/elsewhere/server-3/000001 > /tmp/said 2>&1
mv /srv/elsewhere "$place"
# What it builds upon is gone: a stop is a checkpoint all the same.
rm -r "$place/server-0"
stop last 8
check 'without a parent it is whole' facts server-9/000002 '.parent == 0'
check 'and verifies' cryopod verify "$place/server-9/000002" > /tmp/said 2>&1
