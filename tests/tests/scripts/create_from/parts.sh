# parts.sh LOW: of a second checkpoint of the same job, the cache fetches only the GPU memory that it has not.
low=$1
mkimage
simulate "$low" --proc-root /run/simulated
mount --bind /run/simulated/driver /proc/driver
registry
from=/srv/checkpoints cache=/var/cache/cryopod at=127.0.0.1:5000/team/job
mkdir -p "$from"
cat >> /etc/cryopod/config.toml << T
[restore]
allow = ["docker://127.0.0.1:5000/team"]
[cache]
insecure_registries = ["127.0.0.1:5000"]
T
on_failure() { cat /tmp/said; tail -n 3 /tmp/registry.log; }
gpu=(--network none "${nodes[@]/#/--device=}" "${binds[@]/#/--volume=}" -e LD_LIBRARY_PATH=/cusim)
pod run -d --name job --annotation dev.cryopod.vram=on "${gpu[@]}" localhost/busybox /cusim/cusim-client --mib 200 --train-mib 20 > /dev/null
wait_for ticked job 3
for n in 1 2; do
    pod container checkpoint --leave-running --export "$from/$n.tar" job > /dev/null
    wait_for ticked job $(($(ticks job) + 3))
    check "pack $n" cryopod pack -q "$from/$n.tar" -o "oci:$from/$n"
    check "push $n" cryopod push -q "oci:$from/$n" "$at:$n" --tls-verify=false
done
podman rm -f -t 0 job > /dev/null
# The registry notes a request once it has answered: the client may have ended by then.
fetched() { awk '$7 ~ "/blobs/" && $9 ~ "^20" {sum += $10} END {print sum + 0}' /tmp/registry.log; } # bytes
pull() { # TAG
    cryopod cache pull "docker://$at:$1" > /tmp/said 2>&1
}
check 'the first' pull 1
fetched_since() { [ $(($(fetched) - $1)) -gt "$2" ]; } # BYTES MORE
check 'it is fetched whole' wait_for fetched_since 0 200000000
first=$(fetched)
check 'the second' pull 2
second=$(($(fetched) - first))
echo "fetched: $first bytes, then $second"
check 'it costs its differences' test "$second" -lt $((first / 3))
check 'it is the whole checkpoint' cryopod verify -q "$(tail -n 1 /tmp/said)"
check 'a copy' pod run -d --name copy --annotation "dev.cryopod.restore=docker://$at:2" "${gpu[@]}" localhost/busybox true > /dev/null
check 'it goes on' goes_on copy
podman rm -f -t 0 copy > /dev/null

# What the cache has is damaged: found, and fetched whole.
cryopod cache prune -q
check 'the first again' pull 1
for shard in "$cache"/*/checkpoint/vram-0*.img; do
    size=$(stat -c %s "$shard")
    for place in 1 2 3 4 5 6 7 8 9; do damage "$shard" $((size * place / 10)); done
done
first=$(fetched)
check 'the second' pull 2
check 'it says why' grep -q 'all of it is fetched' /tmp/said
check 'it is fetched whole' wait_for fetched_since "$first" 200000000
check 'it is the whole checkpoint' cryopod verify -q "$(tail -n 1 /tmp/said)"
