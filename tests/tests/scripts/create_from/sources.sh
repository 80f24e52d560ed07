# sources.sh LOW: containers that are created from archives and from images in a registry, through the host's cache.
low=$1
mkimage
low_level "$low"
registry
from=/srv/checkpoints cache=/var/cache/cryopod at=127.0.0.1:5000/team/counter
mkdir -p "$from"
configure() { # MAX-GIB
    cat > /etc/cryopod/config.toml << T
[runtime]
low_level = "$low"
[restore]
allow = ["$from", "docker://127.0.0.1:5000/team"]
[cache]
max_gib = $1
insecure_registries = ["127.0.0.1:5000"]
T
}
configure 1
mkdir -p /etc/containers/containers.conf.d
echo -e '[engine]\nruntime_supports_json = ["crun", "runc", "cryopod-runtime"]' > /etc/containers/containers.conf.d/json.conf
on_failure() { cat /tmp/said; ls -la "$cache"; tail -n 5 /tmp/registry.log; }

# Its open file and a directory of the image are not as the image has them.
pod run -d --name c1 --network none localhost/busybox sh -c \
    'echo mine > /own; rm /bin/rmdir; exec 3< /own; i=0; while :; do echo $i; i=$((i + 1)); sleep 0.1; done' > /dev/null
wait_for counted c1 5
pod container checkpoint -e "$from/c1.tar.zst" c1 > /dev/null
podman rm -f -t 0 c1 > /dev/null
cryopod pack "$from/c1.tar.zst" -o oci:$from/layout -q
cryopod pack "$from/c1.tar.zst" -o oci-archive:$from/c1.tar -q
chmod -R go-w "$from"
cryopod push "oci:$from/layout" "$at:1" --tls-verify=false -q
digest=$(jq -r '.manifests[0].digest' $from/layout/index.json)

copy() { # NAME SOURCE
    pod run -d --name "$1" --network none --annotation "dev.cryopod.restore=$2" localhost/busybox true > /dev/null 2> /tmp/said
}
of_checkpoint() { # NAME: it goes on, with its files
    wait_for counted "$1" 6
    [ "$(printed "$1" | head -n 1)" -ge 4 ] && [ "$(podman exec "$1" cat /own)" = mine ] && ! podman exec "$1" test -e /bin/rmdir
}
entries() { cryopod cache ls | wc -l; }
nothing_left() { [ -z "$(ls -A /run/cryopod)" ] && [ -z "$("$low" list -q)" ] && [ -z "$(ls -A $cache | grep '^\.')" ]; }

n=0
for source in "docker://$at:1" "docker://$at@$digest" "$from/c1.tar.zst" "oci:$from/layout" "oci-archive:$from/c1.tar"; do
    n=$((n + 1))
    check "from $source" copy "copy$n" "$source"
    check 'it goes on, with its files' of_checkpoint "copy$n"
    podman rm -f -t 0 "copy$n" > /dev/null
done
# The layout, its archive and the image have one digest, but who may have one of them may not have the others.
check 'each source is there once' test "$(entries)" = 4
check 'ls shows the image' sh -c "cryopod cache ls | grep -qF '${digest:7:12}'"
check 'nothing is left' wait_for nothing_left

# What the cache has is not fetched again.
fetched() { grep -c '"GET /v2/[a-z/]*/blobs/' /tmp/registry.log; }
before=$(fetched)
check 'from the cache' copy again "docker://$at@$digest"
podman rm -f -t 0 again > /dev/null
check 'no blob was fetched' test "$(fetched)" = "$before"
check 'prune' cryopod cache prune -q
check 'it is empty' test "$(entries)" = 0

copying=()
for i in $(seq 8); do copy "many$i" "docker://$at:1" & copying+=($!); done
check 'many at once' wait "${copying[@]}"
for i in $(seq 8); do check "one of many at once: $i" of_checkpoint "many$i"; done
podman rm -f -t 0 many1 many2 many3 many4 many5 many6 many7 many8 > /dev/null
check 'pulled once' test "$(entries)" = 1

refused() { # NAME WANT SOURCE
    if copy no "$3"; then echo "$1: started" && exit 1; fi
    podman rm -f -t 0 no > /dev/null 2>&1 || true
    check "refused: $1" grep -qF -- "$2" /tmp/said
    check 'nothing is left' wait_for nothing_left
}
cryopod cache prune -q
refused 'another repository' 'add its registry or repository to `restore.allow`' docker://127.0.0.1:5000/other/counter:1
refused 'another registry' 'add its registry or repository to `restore.allow`' docker://127.0.0.1:5001/team/counter:1
refused 'not in the registry' 'not in the registry' "docker://$at:none"
refused 'no such digest' 'not in the registry' "docker://$at@sha256:$(printf %064d 7)"
refused 'no archive' 'not a checkpoint' "$from/layout/index.json"
head -c 3000 "$from/c1.tar.zst" > "$from/cut.tar.zst"
refused 'a damaged archive' "$from/cut.tar.zst" "$from/cut.tar.zst"
configure 0
refused 'larger than the cache' 'raise cache.max_gib' "docker://$at:1"
configure 1

# Killed in the middle: the next one goes on, and nothing half-written is used.
for i in $(seq 10); do
    cryopod cache prune -q
    cryopod cache pull -q "docker://$at:1" > /dev/null 2>&1 &
    sleep "0.0$((RANDOM % 90 + 10))"
    kill -KILL $! 2> /dev/null || true
    wait $! 2> /dev/null || true
    copy killed "docker://$at:1" && of_checkpoint killed || { echo "after kill $i" && exit 1; }
    podman rm -f -t 0 killed > /dev/null
done
check 'nothing is left' wait_for nothing_left

# The registry is lost in the middle.
sed -i 's|5000/team"|&, "docker://127.0.0.1:5001/team"|; s|"127.0.0.1:5000"\]|"127.0.0.1:5000", "127.0.0.1:5001"]|' /etc/cryopod/config.toml
listens() { (: < /dev/tcp/127.0.0.1/5001) 2> /dev/null; }
size=$(du -sb /tmp/registry | cut -f 1)
for part in 0 1 20 50 90; do
    cryopod cache prune -q
    python3 /src/tests/tests/scripts/create_from/cut.py $((size * part / 100)) &
    wait_for listens
    refused "lost after $part %" 127.0.0.1:5001 docker://127.0.0.1:5001/team/counter:1
    kill $! 2> /dev/null || true
    wait $! || true
done
python3 /src/tests/tests/scripts/create_from/cut.py $((size / 2)) &
wait_for listens
check 'otherwise it starts without the checkpoint' pod run -d --name cold --network none --annotation dev.cryopod.restore.otherwise=start \
    --annotation dev.cryopod.restore=docker://127.0.0.1:5001/team/counter:1 localhost/busybox "${counter[@]}" > /dev/null
wait_for counted cold 1
check 'from its beginning' test "$(printed cold | grep -v '[^0-9]' | head -n 1)" = 0
podman rm -f -t 0 cold > /dev/null
check 'nothing is left' wait_for nothing_left

# The registry is gone: by digest from the cache, by tag not.
check 'pull' cryopod cache pull -q "docker://$at@$digest"
pkill docker-registry
check 'without the registry, from the cache' copy away "docker://$at@$digest"
podman rm -f -t 0 away > /dev/null
refused 'without the registry, by tag' 'no connection' "docker://$at:1"
