# store.sh: the large files of containerd's checkpoints in a store: its tar is small, restores find them, and say so where
# they do not; `cryopod bundle` makes a checkpoint that needs no store. Then podman's.
simulate runc
store=/var/lib/cryopod-store
printf '[store]\npath = "%s"\n[vram]\ncodec = "none"\n' $store >> /etc/cryopod/config.toml
mkdir -m 700 $store
containerd_up
images
mkdir -p /out
logs() { cat "/out/$1"; }
# A shell with so much memory of its own that it goes to the store, too
# shellcheck disable=SC2016
host_memory='x=$(head -c 3000000 /dev/zero | tr "\0" x)'
start_job() { # NAME [OPTION]...
    local name=$1 mounts=() node pair && shift
    : > "/out/$name"
    for pair in "${binds[@]}" /out:/out; do
        mounts+=(--mount "type=bind,src=${pair%%:*},dst=${pair#*:},options=rbind:rw")
    done
    for node in "${nodes[@]}"; do mounts+=(--device "$node"); done
    ctr run -d --null-io --runtime $OURS "${mounts[@]}" --env LD_LIBRARY_PATH=/cusim "$@" $image "$name" \
        sh -c "$host_memory; /cusim/cusim-client --mib 60 >> /out/$name 2>&1; echo \$x"
    wait_for ticked "$name" 3
}
away() { # NAME: the container and its snapshot are no more
    ctr tasks kill -s SIGKILL "$1"
    wait_for is "$1" STOPPED
    ctr tasks delete "$1" > /dev/null 2>&1 || true
    ctr containers rm "$1"
}
exported() { # FILE
    # Without the option ctr 2.0 and 2.1 may exit before the file is written whole. 1.7 writes it itself.
    local option && option=$(ctr images export --help | grep -o -m 1 -- --local || true)
    ctr images export ${option:+"$option"} --skip-manifest-json "$1" localhost/checkpoint:1
}
# The bytes of CRIU's images as containerd has them, and those in the store.
tar_bytes() {
    exported /tmp/size.tar
    cryopod inspect --json /tmp/size.tar | jq .stored_bytes && rm /tmp/size.tar
}
store_bytes() { du -sb $store | cut -f 1; }
restore() { ctr containers restore --rw --live job localhost/checkpoint:1; }
refused() { # NAME PATTERN: the restore fails, and says why
    if restore > /tmp/said 2>&1; then echo "$1: restored" && exit 1; fi
    ctr tasks delete job > /dev/null 2>&1 || true
    ctr containers rm job > /dev/null 2>&1 || true
    check "$1" says /tmp/said "$2"
}
goes_on_from() { goes_on job && [ "$(sum job)" = "$1" ]; }

start_job job
before=$(sum job)
pausing ctr containers checkpoint --task --image --rw job localhost/checkpoint:1
check 'checkpoint: left running' goes_on job
echo "in containerd $(tar_bytes) bytes, in the store $(store_bytes)"
check 'checkpoint: small in containerd' test "$(tar_bytes)" -lt $((3 << 20))
check 'checkpoint: the data is in the store' test "$(store_bytes)" -gt $((60 << 20))
check 'checkpoint: one entry, nobody else reads it' test "$(stat -c %a $store/*)" = 700
away job
restore
check 'restored: the sum goes on' goes_on_from "$before"
away job

# Where the store is not, and where it is not what it was
mv $store $store.away
refused 'no store: told' "large files of this checkpoint .* in entry [0-9a-f]{32} of a store.*$store is not there.*cryopod bundle"
mkdir -m 700 $store
refused 'another store: told' "$store has no such entry"
rmdir $store && mv $store.away $store
pages=$(find $store -name 'pages-*.img' | head -n 1)
vram=$(find $store -name 'vram-0000.img')
flip() { # FILE: another byte in its middle; twice is as before
    python3 -c 'import os, sys
f = open(sys.argv[1], "r+b"); at = os.path.getsize(sys.argv[1]) // 2; f.seek(at); b = f.read(1)[0] ^ 1; f.seek(at); f.write(bytes([b]))' "$1"
}
flip "$pages"
refused 'other pages: told' 'pages-[0-9]+.img: its digest is'
flip "$pages"
mv "$vram" /tmp/vram && ln -s /tmp/vram "$vram"
refused 'a link in the store: told' 'vram-0000.img: .*damaged'
mv /tmp/vram "$vram"
restore
check 'the store is back: the sum goes on' goes_on_from "$before"
away job

# One that needs no store
exported /tmp/ctr.tar
cryopod verify /tmp/ctr.tar > /tmp/said
check 'verify: with the store' says /tmp/said "whole.*in the store's $store/.*chunks"
cryopod inspect /tmp/ctr.tar > /tmp/said
check 'inspect: where they are' says /tmp/said "^Store .*of the store $store"
check 'bundle: as containerd has it' cryopod bundle /tmp/ctr.tar -o oci-archive:/tmp/whole.tar -q
check 'bundle: an export file' cryopod bundle /tmp/ctr.tar -o /tmp/whole.tar.zst -q
cryopod unpack -q --images-only /tmp/ctr.tar -o /tmp/images
check 'bundle: of an image directory' cryopod bundle /tmp/images -o oci:/tmp/whole.oci -q
mv $store $store.away
if cryopod verify /tmp/ctr.tar > /tmp/said 2>&1; then exit 1; fi
check 'verify: without the store' says /tmp/said "large files.*$store is not there"
cryopod check /tmp/ctr.tar > /tmp/said 2>&1 && exit 1
check 'check: without the store' says /tmp/said "refused .*large files"
for whole in /tmp/whole.tar /tmp/whole.tar.zst oci:/tmp/whole.oci; do
    check "verify $whole: without the store" cryopod verify -q $whole
done
ctr images rm --sync localhost/checkpoint:1 > /dev/null
check 'bundle: imported' cryopod import /tmp/whole.tar -e containerd -q
restore
check 'bundle: restored without the store, the sum goes on' goes_on_from "$before"
away job
ctr images rm --sync localhost/checkpoint:1 > /dev/null
mv $store.away $store

# A container says whether, never where.
rm -rf ${store:?}/*
if ctr run -d --null-io --runtime $OURS --annotation dev.cryopod.store=/etc $image job true > /tmp/said 2>&1; then exit 1; fi
check 'a path in the annotation: refused' says /tmp/said 'dev.cryopod.store: .*/etc.* is neither'
ctr containers rm job
start_job job --annotation dev.cryopod.store=off
pausing ctr containers checkpoint --task --image --rw job localhost/checkpoint:1
check 'off: all in containerd' test "$(tar_bytes)" -gt $((60 << 20))
check 'off: nothing in the store' test -z "$(ls -A $store)"
away job
ctr images rm --sync localhost/checkpoint:1 > /dev/null

# A store on another file system with too little room: the checkpoint stays whole.
start_job job
mount -t tmpfs -o size=8m,mode=700 none $store
pausing ctr containers checkpoint --task --image --rw job localhost/checkpoint:1
check 'a full store: left running' goes_on job
check 'a full store: all in containerd' test "$(tar_bytes)" -gt $((60 << 20))
check 'a full store: nothing is left in it' test -z "$(ls -A $store)"
before=$(sum job)
away job
restore
check 'a full store: restored, the sum goes on' goes_on_from "$before"
away job
umount $store
mount -t tmpfs -o size=800m,mode=700 none $store
ctr images rm --sync localhost/checkpoint:1 > /dev/null
start_job job
pausing ctr containers checkpoint --task --image --rw job localhost/checkpoint:1
check 'another file system: copied' test "$(store_bytes)" -gt $((60 << 20))
check 'another file system: small in containerd' test "$(tar_bytes)" -lt $((3 << 20))
away job
restore
check 'another file system: restored, the sum goes on' goes_on_from "$before"
away job
umount $store

# `cryopod export` needs no store, and leaves none of it there.
ctr images rm --sync localhost/checkpoint:1 > /dev/null
start_job job
check 'export' cryopod export job -e containerd --leave-running -o oci:/tmp/exported.oci -q
check 'export: verified' cryopod verify -q oci:/tmp/exported.oci
check 'export: nothing is left in the store' test -z "$(ls -A $store)"
away job

# podman
logs() { printed "$1"; }
low_level_config=$(cat /etc/cryopod/config.toml)
printf '%s\n' "${low_level_config/runc/crun}" > /etc/cryopod/config.toml
run_job --mib 60
before=$(sum job)
pod container checkpoint --export /tmp/pod.tar.zst job > /dev/null
pod rm -f -t 0 job > /dev/null
check 'podman: small' test "$(stat -c %s /tmp/pod.tar.zst)" -lt $((3 << 20))
pod container restore --import /tmp/pod.tar.zst > /dev/null
check 'podman: restored, the sum goes on' goes_on_from "$before"
check 'podman: cryopod export is whole' cryopod export job -e podman -o /tmp/exported.tar.zst -q
mv $store $store.away
check 'podman: cryopod export needs no store' cryopod verify -q /tmp/exported.tar.zst
pod rm -f -t 0 job > /dev/null
if pod container restore --import /tmp/pod.tar.zst > /tmp/said 2>&1; then exit 1; fi
check 'podman: without the store: told' says /tmp/said "large files.*$store is not there"
check 'no operation is left' test -z "$(ls -A /run/cryopod)"

mv $store.away $store
id=$(cryopod store ls --json | jq -r '.[-1].id')
check 'store ls: the container' test "$(cryopod store ls --json | jq -r '.[-1].container')" = "$(jq -r .container "$store/$id/cryopod-store.json")"
cryopod store prune "$id" > /dev/null
check 'store prune: by id' test ! -e "$store/$id"
cryopod store prune --older-than 0 -q
check 'store prune: by age' test -z "$(ls -A $store)"
