# parents.sh LOW: checkpoints that build upon each other, with cryopod-runtime alone, CRIU and the simulated driver.
low=$1
mkdir -p /srv/c
simulate "$low" --proc-root /run/simulated
mount --bind /run/simulated/driver /proc/driver

made() { # BUNDLE PARENT cusim-client ARG...: a bundle whose checkpoints build upon PARENT
    local dir=$1 parent=$2 node && shift 2
    bundle "$dir" true
    node() { stat -c '{"type":"c","path":"%n","major":%Hr,"minor":%Lr,"fileMode":438}' "$1"; }
    node=$(for n in nvidiactl nvidia-uvm nvidia0 nvidia1; do node /dev/$n; done | jq -s .)
    jq --argjson nodes "$node" --arg parent "$parent" --argjson args "$(printf '%s\n' /cusim/cusim-client "$@" | jq -R . | jq -s .)" '
        .process.args = $args
        | .linux.devices = $nodes
        | .linux.resources.devices = [{allow: true, access: "rwm"}]
        | .process.env += ["LD_LIBRARY_PATH=/cusim"]
        | .annotations["dev.cryopod.parent"] = $parent | .annotations["dev.cryopod.vram"] = "on"
        | .mounts += ([["/run/cusim", "/run/cusim", "rw"], ["/opt/cusim", "/cusim", "ro"],
            ["/usr/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu", "ro"], ["/usr/lib64", "/lib64", "ro"]]
            | map({source: .[0], destination: .[1], type: "bind", options: ["rbind", .[2]]}))
        ' "$dir/config.json" > "$dir/new" && mv "$dir/new" "$dir/config.json"
}
ticks() { grep -cs ok "/tmp/$1.out" || true; }
ticked() { [ "$(ticks "$1")" -ge "$2" ]; }
on_failure() { tail -n 5 /tmp/*.out; cat /tmp/said; }
goes_on() { # NAME: sums come again, and were never wrong
    local now && now=$(ticks "$1")
    wait_for ticked "$1" $((now + 3)) && ! grep CORRUPT "/tmp/$1.out"
}
# The output goes through a pipe: a file of the host would have to be known to CRIU.
start() { cryopod-runtime run --detach --bundle "/srv/$1" "$1" > >(exec cat > "/tmp/$1.out") 2>&1 < /dev/null && wait_for ticked "$1" 3; }
save() { # NAME IMAGES [ARG...]
    local name=$1 images=$2 && shift 2
    cryopod-runtime checkpoint --image-path "$images" --work-path /tmp "$@" "$name" > /tmp/said 2>&1
}
load() { # NAME IMAGES: restored, it goes on
    rm -f "/tmp/$1.out" && : > "/tmp/$1.out" # there before cat starts: what is said may be looked for sooner
    cryopod-runtime restore --detach --bundle "/srv/$1" --image-path "$2" --work-path /tmp "$1" > >(exec cat > "/tmp/$1.out") 2>&1 < /dev/null &&
        goes_on "$1"
}
end() { cryopod-runtime delete --force "$1" > /dev/null 2>&1; }
quiet() { ! pgrep -x cusim-client; }
refused() { # PATTERN COMMAND...: fails, says so, and leaves no process
    local pattern=$1 && shift
    ! "$@" > /tmp/said 2>&1 && wait_for grep -Eqs "$pattern" /tmp/said /tmp/*.out && wait_for quiet
}
vram() { jq -e ".gpu.vram | $2" "$1/cryopod.json" > /dev/null || { jq .gpu.vram "$1/cryopod.json" && false; }; }
: > /tmp/said

# A chain of three, each with a part changed.
made /srv/job auto --mib 100 --train-mib 20
start job
check 'checkpoint 1' save job /srv/c/1 --leave-running
check 'it goes on' goes_on job
check 'checkpoint 2' save job /srv/c/2 --leave-running
check 'it goes on again' goes_on job
check 'checkpoint 3' save job /srv/c/3
end job
check 'the first is whole' vram /srv/c/1 '.parent == 0 and .raw > 90'
check 'the second has what changed' vram /srv/c/2 '.parent > 70 and .raw > 0 and .raw < 30'
check 'the third too' vram /srv/c/3 ".parent > 70 and .raw < 30 and .parent_digest == \"$(jq -r .gpu.vram.digest /srv/c/2/cryopod.json)\""
check 'inspect tells' sh -c 'cryopod inspect /srv/c/3 | grep -q "in the checkpoint before it"'
for i in 3 2 1; do
    check "$i: whole, says verify" cryopod verify -q /srv/c/$i
    check "$i: restored" load job /srv/c/$i
    end job
done

# Whole without the others: a directory, and an archive.
check 'flatten' cryopod flatten -q /srv/c/3 -o /srv/whole
check 'flatten, from a directory to an archive' cryopod flatten -q /srv/c/3 -o oci-archive:/srv/whole.tar
cryopod pack -q /srv/c/3 -o oci-archive:/srv/part.tar
check 'an archive that builds upon others is whole as long as they are there' cryopod verify -q oci-archive:/srv/part.tar
check 'flatten, from an archive' cryopod flatten -q oci-archive:/srv/part.tar -o oci:/srv/whole.oci
mv /srv/c/1 /srv/away
check 'a parent is missing: refused, and nothing starts' refused '/srv/c/1: the parent checkpoint, without which .* is missing or another one; put it back' load job /srv/c/3
check 'a parent is missing: verify says so' refused 'is missing or another one; put it back' cryopod verify -q /srv/c/3
check 'of the archive too' refused 'is missing or another one; put it back' cryopod verify -q oci-archive:/srv/part.tar
check 'nor can it be made whole' refused 'is missing or another one; put it back' cryopod flatten -q /srv/c/3 -o /srv/no
for whole in /srv/whole oci-archive:/srv/whole.tar oci:/srv/whole.oci; do
    check "$whole: verified" cryopod verify -q "$whole"
done
check 'flattened: restored' load job /srv/whole
end job
cryopod unpack -q --images-only oci:/srv/whole.oci -o /srv/unpacked
check 'flattened, by way of archives: restored' load job /srv/unpacked
end job
check 'found where it is searched' cryopod verify -q --parents /srv /srv/c/3
printf '[vram]\nparents = ["/srv"]\n' >> /etc/cryopod/config.toml
check 'found where it is searched: restored' load job /srv/c/3
end job
sed -i '/vram/,$d' /etc/cryopod/config.toml
mv /srv/away /srv/c/1

# Another one in its place, and a damaged one.
cp -a /srv/c/1 /srv/true
cp /srv/c/2/vram-index.img /srv/c/1/
check 'another one in its place: refused' refused 'is missing or another one' load job /srv/c/3
cp /srv/true/vram-index.img /srv/c/1/
# How much of it is in the first shard depends on which thread writes more.
shard_bytes=$(stat -c %s /srv/c/1/vram-0000.img)
damage /srv/c/1/vram-0000.img $((shard_bytes > 25000000 ? 25000000 : shard_bytes - 4096))
check 'damaged: verify says so' refused 'vram-0000.img: chunk .* does not fit its digest' cryopod verify -q /srv/c/3
check 'damaged: not restored' refused 'vram-0000.img: chunk .* does not fit its digest' load job /srv/c/3
end job || true
cp /srv/true/vram-0000.img /srv/c/1/

# By path; what is not there yet is none, what is damaged is an error before anything happens.
made /srv/by auto --mib 100
ln -s /srv/none /srv/latest
jq '.annotations["dev.cryopod.parent"] = "/srv/latest"' /srv/by/config.json > /tmp/new && cp /tmp/new /srv/by/config.json
start by
check 'by path: the first' save by /srv/d1 --leave-running
check 'by path: the first is whole' vram /srv/d1 '.parent == 0'
ln -sfn /srv/d1 /srv/latest
check 'by path: the second' save by /srv/d2 --leave-running
check 'by path: nothing has changed' vram /srv/d2 '.parent > 90 and .stored_bytes < 5000000'
damage /srv/d1/vram-index.img 3000
fails() { ! save by /srv/d3 --leave-running && grep -q 'cannot build upon that one: .*vram-index.img' /tmp/said && [ ! -e /srv/d3/cryopod.json ]; }
check 'by path: a damaged one is refused' fails
check 'by path: and it goes on' goes_on by
end by

# With a store: the second builds upon what the first has there.
mkdir -m 700 /srv/store
printf '[store]\npath = "/srv/store"\n' >> /etc/cryopod/config.toml
made /srv/kept auto --mib 100 --train-mib 20
start kept
check 'a store: checkpoint 1' save kept /srv/k/1 --leave-running
criu_upon() { ! save kept /srv/k/none --leave-running --parent-path ../1 && grep -q 'leave --parent-path away' /tmp/said; }
check 'a store: CRIU cannot build upon it' criu_upon
check 'a store: it goes on' goes_on kept
check 'a store: checkpoint 2' save kept /srv/k/2
end kept
check 'a store: the second has what changed' vram /srv/k/2 '.parent > 70 and .raw > 0 and .raw < 30'
large() { find "$1" -name 'vram-0*.img' -size +1023k | wc -l; }
check 'a store: it has the shards' test "$(large /srv/k)" = 0 -a "$(large /srv/store)" -ge 2
check 'a store: verify' cryopod verify -q /srv/k/2
check 'a store: restored' load kept /srv/k/2
end kept
check 'a store: made whole' cryopod flatten -q /srv/k/2 -o /srv/k-whole
mv /srv/store /srv/store.away
check 'a store: it is missing' refused 'large files of this checkpoint .*/srv/store is not there' load kept /srv/k/2
check 'a store: made whole, verified without it' cryopod verify -q /srv/k-whole
check 'a store: made whole, restored without it' load kept /srv/k-whole
end kept
check 'no operation is left' test -z "$(ls -A /run/cryopod)"
