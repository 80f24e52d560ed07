# streams.sh: archives through pipes, with the container's image, to a podman that has nothing; the engine is found by itself;
# `import --map`; what cannot be.
mkimage
simulate crun --proc-root /run/simulated
mount --bind /run/simulated/driver /proc/driver
on_failure() { tail -n 5 /tmp/said* 2> /dev/null; printed job | tail -n 5; }
: > /tmp/said
refused() { # PATTERN COMMAND...
    local pattern=$1 && shift
    if "$@" > /tmp/said 2>&1; then return 1; fi
    says /tmp/said "$pattern"
}
run_job --mib 24 --procs 2 --gpus 0,1
before=$(sum job)
id=$(podman inspect -f '{{.Image}}' job)

# Another podman: its own storage, without the image.
cp /etc/containers/storage.conf /tmp/first.conf
sed 's,/var/lib/containers/storage,/var/lib/second,' /tmp/first.conf > /tmp/second.conf
mkdir -p /var/lib/second && mount -t tmpfs second /var/lib/second
there() { CONTAINERS_STORAGE_CONF=/tmp/second.conf "$@"; }
ticks_there() { there podman logs job 2>&1 | grep -c ok || true; }
ticked_there() { [ "$(ticks_there)" -ge "$1" ]; }
used() { /opt/build/cusim-ctl --socket "$sim" status | jq -r '[.gpus[] | select(.pids != {}) | .minor] | join(" ")'; }

# script gives a command a terminal
check 'export to a terminal: refused' sh -c "script -qec 'cryopod export job -o -' /tmp/typed < /dev/null > /dev/null || true; grep -q 'not for a terminal' /tmp/typed"
check 'and the job goes on' goes_on job
check 'an engine that does not know it: refused' refused 'no engine knows this container.*podman: .*no such container' cryopod export nobody -o /tmp/no.tar
check 'import of nothing: refused' refused 'standard input is empty' sh -c 'cryopod import - < /dev/null'
check 'import of something else: refused' refused 'neither a tar' sh -c 'cryopod import - < /etc/services'

cryopod export job -o - --with-image --leave-running --timings 2> /tmp/said > /tmp/piped.tar.zst
check 'on standard output is an archive and nothing else' cryopod verify -q /tmp/piped.tar.zst
check 'the steps are on standard error' says /tmp/said '"step":"image save"'
check 'it goes on' goes_on job
pod rm -f -t 0 job > /dev/null

there podman images -q > /tmp/images
check 'the other host has no image' test ! -s /tmp/images
# shellcheck disable=SC2094
cat /tmp/piped.tar.zst | there cryopod import - --restore -q > /tmp/said
wait_for ticked_there 3
check 'piped: the sum goes on' test "$(there podman logs job 2>&1 | tail -n 1 | cut -d' ' -f2)" = "$before"
check 'piped: it has the image, by its digest' test "$(there podman inspect -f '{{.Image}}' job)" = "$id"
check 'piped: no name came with it' sh -c "! CONTAINERS_STORAGE_CONF=/tmp/second.conf podman images --format '{{.Repository}}' | grep -v none"
check 'piped: both GPUs' test "$(used)" = '0 1'
there podman rm -f -t 0 job > /dev/null
there podman rmi -f -a > /dev/null 2>&1 || true

# The image of another checkpoint, and one with a name, are not loaded.
mkdir /tmp/open && cryopod unpack -q /tmp/piped.tar.zst -o /tmp/open
mkdir /tmp/layout && tar -C /tmp/layout -xf /tmp/open/cryopod-image.tar
jq '.manifests[0].annotations["org.opencontainers.image.ref.name"] = "docker.io/library/busybox:latest"' /tmp/layout/index.json > /tmp/index.json
cp /tmp/index.json /tmp/layout && tar -C /tmp/layout -cf /tmp/open/cryopod-image.tar .
cryopod pack -q /tmp/open -o /tmp/named.tar.zst
check 'an image with a name: refused' refused 'would replace an image' there cryopod import /tmp/named.tar.zst --restore -q
there podman images -q > /tmp/images
check 'and nothing is loaded' test ! -s /tmp/images
jq --arg id "$(printf '%064d' 7)" '.rootfsImageID = $id' /tmp/open/config.dump > /tmp/config.dump && cp /tmp/config.dump /tmp/open
jq 'del(.manifests[0].annotations)' /tmp/index.json > /tmp/layout/index.json && tar -C /tmp/layout -cf /tmp/open/cryopod-image.tar index.json oci-layout blobs
cryopod pack -q /tmp/open -o /tmp/other.tar.zst
check 'another image: refused' refused 'and the checkpoint names' there cryopod import /tmp/other.tar.zst --restore -q

# A map for one restore: nothing of it stays.
run_job --mib 24 --gpus 0
before=$(sum job)
check 'without -e, to a file' cryopod export job -o /tmp/one.tar.zst -q
pod rm -f -t 0 job > /dev/null
cryopod import /tmp/one.tar.zst --restore --map 0=1,1=0 -q > /tmp/said
check 'a map: it goes on' goes_on job
check 'a map: the same sum' test "$(sum job)" = "$before"
check 'a map: on the other GPU' test "$(used)" = 1
check 'a map: it is no annotation of the container' sh -c "! podman inspect job | grep -q gpu.map"
pod rm -f -t 0 job > /dev/null
check 'a map that cannot be: refused' refused 'this host has no GPU 7' cryopod import /tmp/one.tar.zst --restore --map 0=7 -q
pod rm -f -t 0 job > /dev/null 2>&1 || true
check 'a map that is none: refused' refused 'OLD=NEW' cryopod import /tmp/one.tar.zst --restore --map 7 -q
check 'nothing is left' test -z "$(ls -A /run/cryopod/away)$(find /var/tmp /var/lib/containers/storage -maxdepth 1 -name '.cryopod-*')"

# What all of this was counted as.
cryopod metrics --output /tmp/cryopod.prom
cryopod metrics > /tmp/said
check 'metrics: the same on standard output' cmp /tmp/cryopod.prom /tmp/said
check 'metrics: checkpoints' says /tmp/said '^cryopod_operations_total\{operation="checkpoint",result="success"\} 2$'
check 'metrics: restores' says /tmp/said '^cryopod_operations_total\{operation="restore",result="success"\} 2$'
check 'metrics: refused restores' says /tmp/said '^cryopod_failures_total\{operation="restore",reason="refused"\} [1-9]'
check 'metrics: steps' says /tmp/said '^cryopod_step_seconds_total\{operation="checkpoint",step="driver_checkpoint"\} [0-9.]*[1-9]'
check 'metrics: bytes' says /tmp/said '^cryopod_bytes_total\{operation="checkpoint",kind="gpu"\} [0-9]{8}'
check 'metrics: commands' says /tmp/said '^cryopod_operations_total\{operation="import",result="failure"\} [1-9]'
printf '#!/bin/sh\nexec sleep 1000\n' > /tmp/hold && chmod +x /tmp/hold
flock /var/lib/cryopod/metrics.lock /tmp/hold &
wait_for sh -c '! flock -n /var/lib/cryopod/metrics.lock true'
run_job --mib 24
pod container checkpoint --leave-running --export /tmp/held.tar job > /dev/null
check 'metrics: who holds the lock stops no checkpoint' goes_on job
kill %% && wait %% 2> /dev/null || true
rm -rf /var/lib/cryopod/metrics* && mkdir /var/lib/cryopod/metrics.json
pod container checkpoint --leave-running --export /tmp/held.tar job > /dev/null
check 'metrics: nor what cannot be written' goes_on job
rmdir /var/lib/cryopod/metrics.json

# top, in the middle of a checkpoint whose driver hangs until all has been seen
/opt/build/cusim-ctl --socket "$sim" set hang-checkpoint > /dev/null
cryopod top --once > /tmp/said
check 'top: nothing runs' says /tmp/said 'No checkpoint, restore or transfer'
cryopod top > /tmp/lines &
top=$!
pod container checkpoint --export /tmp/slow.tar job > /dev/null 2>&1 &
slow=$!
shown() { cryopod top --once > /tmp/said && grep -q ' checkpoint .* GPU memory' /tmp/said; }
check 'top: the checkpoint and its step' wait_for shown
cryopod top --json > /tmp/top.json
check 'top: as JSON' jq -e '.[0] | .operation == "checkpoint" and .total_bytes > 20000000 and .seconds > 0' /tmp/top.json
check 'top: lines without a terminal' wait_for grep -Eq '^checkpoint of [0-9a-f]+ \([0-9]+\): .*: .* of ' /tmp/lines
if [ -d /out ]; then cp /tmp/said /out/top; fi
/opt/build/cusim-ctl --socket "$sim" clear > /dev/null
check 'the checkpoint ends' wait $slow
cryopod top --once > /tmp/said
check 'top: it is gone' says /tmp/said 'No checkpoint, restore or transfer'
kill $top
