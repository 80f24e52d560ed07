# store_default.sh ROUNDS: the store as it comes, under docker and ctr: so many checkpoints and removals leave nothing; what is
# needed stays, also where the clean-up is killed; a checkpoint that leaves this host says what it needs.
rounds=$1
simulate runc
printf '[vram]\ncodec = "none"\n[store]\ngrace_s = 0\n' >> /etc/cryopod/config.toml
store=/var/lib/cryopod/store content=/var/lib/containerd/io.containerd.content.v1.content
mkdir /place && ln -s /usr/local/bin/containerd-shim-cryopod-v2 /place/containerd-shim-runc-v2
PATH=/place:$PATH containerd_up
images
dockerd --containerd /run/containerd/containerd.sock --experimental --iptables=false --ip6tables=false --bridge none \
    --add-runtime cryopod=/usr/local/bin/cryopod-runtime > /tmp/dockerd.log 2>&1 &
wait_for docker version > /dev/null 2>&1
docker import /usr/local/share/testbed/busybox.tar busybox > /dev/null
on_failure() { tail -n 15 /tmp/containerd.log /tmp/dockerd.log && cryopod store ls; }
logs() { docker logs "$1" 2>&1; }
start() { # NAME [create]
    local verb=(run -d)
    if [ "${2:-}" = create ]; then verb=(create); fi
    docker "${verb[@]}" --name "$1" --runtime cryopod --network none --security-opt seccomp=unconfined "${nodes[@]/#/--device=}" \
        "${binds[@]/#/--volume=}" -e LD_LIBRARY_PATH=/cusim busybox /cusim/cusim-client --mib 20 > /dev/null
}
running() { [ "$(docker inspect -f '{{.State.Running}}' "$1")" = "$2" ]; }
# docker 26 refuses a second checkpoint as long as containerd has the first one's tar. containerd forgets a blob first, and
# removes its file, by which the store knows that it is needed, later: then all files are those of ctr's images.
forgotten() { [ -z "$(ctr -n moby content ls -q 2> /dev/null)" ] && [ "$(blobs | grep -c /blobs/)" = "$(ctr content ls -q | wc -l)" ]; }
checkpoint() { wait_for forgotten && docker checkpoint create "$@" > /dev/null; }
directory() { echo "/var/lib/docker/containers/$(docker inspect -f '{{.Id}}' "$1")/checkpoints"; }
entries() { find $store -mindepth 1 -maxdepth 1 | wc -l; }
has() { [ "$(entries)" = "$1" ]; }
clean() { cryopod store prune --unused -q; }
cleans() { clean && has "$1"; } # to so many entries
blobs() { find $content -type f | sort; }
used() { sync && df --output=used -k / | tail -n 1; }

# ---- docker ----
start g1
wait_for ticked g1 3
checkpoint --leave-running g1 zero
check 'docker: the store is there without a key' has 1
check 'docker: nobody else reads it' test "$(stat -c %a $store $store/* | sort -u)" = 700
check 'docker: the directory is small' test "$(du -sm "$(directory g1)" | cut -f 1)" -le 2
check 'docker: it is cleaned up by nobody else' cleans 1
docker checkpoint rm g1 zero
wait_for forgotten
check 'docker: its checkpoint is removed' wait_for cleans 0
blobs > /tmp/blobs
before=$(used)
for n in $(seq "$rounds"); do
    checkpoint --leave-running g1 "cp$n"
    docker checkpoint rm g1 "cp$n"
    check "docker: checkpoint $n has removed those before" test "$(entries)" -le 2
done
wait_for forgotten
check 'docker: the timer removes the last one' cleans 0
check 'docker: the content store is as before' diff <(blobs) /tmp/blobs
check 'docker: the disk is as before' test $(($(used) - before)) -lt 2048
check 'docker: the sum goes on' goes_on g1

before=$(sum g1)
checkpoint g1 cp
wait_for running g1 false
cryopod store ls > /tmp/said
check 'docker: ls says who has it' says /tmp/said "$(directory g1)/cp"
start g2 create
mkdir -p "$(directory g2)"
cp -a "$(directory g1)/cp" "$(directory g2)/"
docker rm -f g1 > /dev/null
wait_for forgotten
check 'docker rm: another container has the checkpoint, too' cleans 1
docker start --checkpoint cp g2
check 'docker rm: it starts from it' goes_on g2
check 'docker rm: with the same sum' test "$(sum g2)" = "$before"
docker kill g2 > /dev/null
wait_for running g2 false

# Elsewhere
cp -a "$(directory g2)/cp" /srv/away
mv $store $store.away
if docker start --checkpoint cp g2 > /tmp/said 2>&1; then exit 1; fi
check 'without the store: says so' says /tmp/said "large files of this checkpoint .* in entry [0-9a-f]{32} .*$store is not there.*cryopod bundle --in-place"
if cryopod bundle --in-place /srv/away > /tmp/said 2>&1; then exit 1; fi
check 'without the store: bundle says so' says /tmp/said "large files of this checkpoint"
mv $store.away $store
cryopod bundle --in-place /srv/away > /tmp/said
check 'bundle: in place' says /tmp/said '^/srv/away: whole, [0-9]+ files'
docker rm -f g2 > /dev/null
wait_for forgotten
check 'bundle: the entry goes' wait_for cleans 0
start g3 create
mkdir -p "$(directory g3)"
cp -a /srv/away "$(directory g3)/cp"
mv $store $store.away
docker start --checkpoint cp g3
check 'bundle: it needs no store' goes_on g3
check 'bundle: the same sum' test "$(sum g3)" = "$before"
mv $store.away $store

mkdir /srv/own
checkpoint --leave-running --checkpoint-dir /srv/own g3 cp
wait_for forgotten
check 'a directory of the user: the entry stays' cleans 1
cryopod store ls > /tmp/said
check 'a directory of the user: ls says why' says /tmp/said 'store.used_in does not name'
printf 'used_in = ["/srv/own"]\n' >> /etc/cryopod/config.toml
check 'a directory of the user: with its name' cleans 1
mv /srv/own /srv/unmounted
if cryopod store prune --unused > /tmp/said 2>&1; then exit 1; fi
check 'a directory of the user: not there' says /tmp/said '/srv/own is not there'
check 'a directory of the user: nothing is removed' has 1
mv /srv/unmounted /srv/own
rm -r /srv/own/cp
check 'a directory of the user: its checkpoint is removed' cleans 0
docker rm -f g3 > /dev/null

# ---- ctr ----
logs() { cat "/out/$1"; }
mkdir -p /out
run_ctr() {
    local mounts=() node pair
    : > "/out/$1"
    for pair in "${binds[@]}" /out:/out; do mounts+=(--mount "type=bind,src=${pair%%:*},dst=${pair#*:},options=rbind:rw"); done
    for node in "${nodes[@]}"; do mounts+=(--device "$node"); done
    ctr run -d --null-io --runtime $OURS "${mounts[@]}" --env LD_LIBRARY_PATH=/cusim $image "$1" \
        sh -c "exec /cusim/cusim-client --mib 20 >> /out/$1 2>&1"
}
away() { # NAME
    ctr tasks kill -s SIGKILL "$1"
    wait_for is "$1" STOPPED
    ctr tasks delete "$1" > /dev/null 2>&1 || true
    ctr containers rm "$1"
}
run_ctr job
wait_for ticked job 3
blobs > /tmp/blobs
before=$(used)
for n in $(seq "$rounds"); do
    pausing ctr containers checkpoint --task --image --rw job "localhost/cp:$n"
    ctr images rm --sync "localhost/cp:$n" > /dev/null
    check "ctr: checkpoint $n has removed those before" test "$(entries)" -le 1
done
check 'ctr: the timer removes the last one' cleans 0
check 'ctr: the content store is as before' diff <(blobs) /tmp/blobs
check 'ctr: the disk is as before' test $(($(used) - before)) -lt 2048
pausing ctr containers checkpoint --task --image --rw job localhost/cp:1
sum=$(sum job)
cryopod store ls > /tmp/said
check 'ctr: ls says who has it' says /tmp/said "$content/blobs/sha256/"
away job
check 'ctr: nothing is removed while the image is there' cleans 1
held=$(cryopod store ls --json | jq -r '.[0].path')

# Killed at each step of the removal, and once more each time
for n in 1 2 3; do
    id=$(printf '%032d' "$n")
    cp -a "$held" "$store/$id"
    jq --arg id "$id" '.id = $id' "$held/cryopod-store.json" > "$store/$id/cryopod-store.json"
done
cp -a $store /tmp/kept
steps=0
for n in $(seq 100); do
    rm -rf $store && cp -a /tmp/kept $store
    if strace -f -qq -o /tmp/trace -e inject=rename,unlink,unlinkat,rmdir:signal=KILL:when="$n" cryopod store prune --unused -q; then break; fi
    steps=$n
    check "killed at step $n: what is needed is whole" diff -r "$held" "/tmp/kept/${held##*/}"
    check "killed at step $n: the rest goes" cleans 1
    check "killed at step $n: all of it" test "$(ls -A $store)" = "${held##*/}"
done
check 'killed: there were steps' test "$steps" -ge 9
ctr containers restore --rw --live job localhost/cp:1
check 'killed: restored, the sum goes on' goes_on job
check 'killed: the same sum' test "$(sum job)" = "$sum"
away job
mkdir -p /var/lib/docker/containers/of-another/checkpoints/cp
cp "$held/cryopod-store.json" /var/lib/docker/containers/of-another/checkpoints/cp/
ctr images rm --sync localhost/cp:1 > /dev/null
check 'ctr: docker has its checkpoint by now' cleans 1
rm -r /var/lib/docker/containers/of-another
check 'ctr: nothing is left' cleans 0
