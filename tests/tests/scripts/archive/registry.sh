# registry.sh: push and pull with a registry of this bed: killed at random points, refused, damaged.
# ours: an image that is not compressed, so that there is something to send
mkimage
simulate crun
run_job --mib 16
cryopod export job -e podman -o oci:/tmp/image --compression none -q
pod rm -f -t 0 job > /dev/null
digest=$(jq -r '.manifests[0].digest' /tmp/image/index.json)
to=127.0.0.1:5000/team/job
push() { cryopod push oci:/tmp/image "$1" --tls-verify=false -q; }
named() { curl -sfo /dev/null -H 'Accept: application/vnd.oci.image.manifest.v1+json' "http://127.0.0.1:5000/v2/$1"; }

if push "$to:1" > /tmp/said 2>&1; then echo 'pushed to nobody' && exit 1; fi
check 'no registry: said, with its name' says /tmp/said '127.0.0.1:5000: no connection: Connection refused'
registry
if cryopod push oci:/tmp/image "$to:1" -q > /tmp/said 2>&1; then echo 'pushed without TLS' && exit 1; fi
check 'no TLS: refused, with the remedy' says /tmp/said 'no connection.*--tls-verify=false'
check 'no TLS: nothing is pushed' sh -c '! ls /tmp/registry/docker/registry/v2/repositories 2> /dev/null | grep .'

# killed at 6 random points; each in a repository of its own, then in one that has a part already
finished=0 took=400
for i in a b c; do
    from=$(date +%s%N)
    push "127.0.0.1:5000/kill/$i:1"
    ms=$((($(date +%s%N) - from) / 1000000))
    [ "$ms" -ge "$took" ] || took=$ms
done
for i in $(seq 6); do
    cryopod push oci:/tmp/image "127.0.0.1:5000/kill/$i:1" --tls-verify=false -q > /dev/null 2>&1 & # no function: its shell would be killed
    pid=$!
    ms=$((RANDOM % took))
    sleep "0.$(printf '%03d' $ms)"
    # One that has finished takes no longer by now.
    if kill -KILL $pid 2> /dev/null; then wait $pid 2> /dev/null || true; else finished=$((finished + 1)) took=$((ms + 1)); fi
    if named "kill/$i/manifests/1"; then
        # past its last step: then it is whole
        skopeo inspect --tls-verify=false --format '{{.Digest}}' "docker://127.0.0.1:5000/kill/$i:1" | grep -qxF "$digest" || { echo "killed push $i: a name without an image" && exit 1; }
    fi
    push "127.0.0.1:5000/kill/$i:1" || { echo "killed push $i: the second run failed" && exit 1; }
    if [ $((i % 3)) = 0 ]; then
        rm -rf /tmp/pulled
        cryopod pull "127.0.0.1:5000/kill/$i:1" -o oci:/tmp/pulled --tls-verify=false -q
        cryopod verify -q oci:/tmp/pulled || { echo "killed push $i: not whole" && exit 1; }
    fi
done
echo "killed $((6 - finished)) of 6 pushes"
check 'push killed at random points: some were' test "$finished" -lt 5
check 'pull: the digest that was pushed' test "$(jq -r '.manifests[0].digest' /tmp/pulled/index.json)" = "$digest"
cryopod push oci:/tmp/image "127.0.0.1:5000/kill/1:2" --tls-verify=false > /tmp/said
check 'push: what the registry has is not sent again' says /tmp/said '0 B sent in 0 blobs, [0-9]+ were there'
check 'push: by tag and digest' push "$to:1"
check 'skopeo: the same digest' test "$(skopeo inspect --tls-verify=false --format '{{.Digest}}' "docker://$to:1")" = "$digest"

# pull killed: nothing under the name, and the next one goes on
for i in $(seq 6); do
    rm -rf /tmp/pulled
    cryopod pull "$to:1" -o oci:/tmp/pulled --tls-verify=false -q > /dev/null 2>&1 &
    pid=$!
    sleep "0.$(printf '%03d' $((RANDOM % 300)))"
    kill -KILL $pid 2> /dev/null || true
    wait $pid 2> /dev/null || true
    if [ -e /tmp/pulled ]; then cryopod verify -q oci:/tmp/pulled || exit 1; fi
    rm -rf /tmp/pulled
    cryopod pull "$to@$digest" -o oci:/tmp/pulled --tls-verify=false -q || { echo "killed pull $i: the second run failed" && exit 1; }
    if [ $((i % 3)) = 0 ]; then cryopod verify -q oci:/tmp/pulled || { echo "killed pull $i: not whole" && exit 1; }; fi
done
check 'pull killed at random points: nothing is left' test -z "$(find /tmp -maxdepth 1 -name '.pulled*')"
if cryopod pull "$to:1" -o oci:/tmp/pulled --tls-verify=false > /tmp/said 2>&1; then echo 'pulled over a directory' && exit 1; fi
check 'pull: what exists is kept' says /tmp/said '/tmp/pulled: exists already'
check 'pull: as a podman export file' cryopod pull "$to:1" -o /tmp/pulled.tar.zst --tls-verify=false -q
cryopod import /tmp/pulled.tar.zst -e podman --restore -q > /dev/null
check 'pull, import: the sum goes on' goes_on job
pod rm -f -t 0 job > /dev/null

# with a password
# shellcheck disable=SC2016 # bcrypt of "pass"
echo 'user:$2b$04$8wJxGL5.oTmr3CNSb21YTOxnVLFTrsj8StllytmgFf.VK7BhtlBWe' > /tmp/htpasswd
printf 'version: 0.1\nstorage: {filesystem: {rootdirectory: /tmp/registry2}}\nhttp: {addr: "127.0.0.1:5001"}\nauth: {htpasswd: {realm: bed, path: /tmp/htpasswd}}\n' \
    > /tmp/registry2.yml
docker-registry serve /tmp/registry2.yml > /tmp/registry2.log 2>&1 &
wait_for curl -s http://127.0.0.1:5001/v2/ -o /dev/null
there=127.0.0.1:5001/team/job:1
login() { printf '{"auths":{"127.0.0.1:5001":{"auth":"%s"}}}' "$(printf '%s' "$1" | base64)" > /tmp/auth.json; }
if push $there > /tmp/said 2>&1; then echo 'pushed without a password' && exit 1; fi
check 'no password: refused, with the remedy' says /tmp/said 'refuses access.*podman login'
export REGISTRY_AUTH_FILE=/tmp/auth.json
login user:wrong
if push $there > /tmp/said 2>&1; then echo 'pushed with a wrong password' && exit 1; fi
check 'a wrong password: refused' says /tmp/said 'refuses access'
check 'a wrong password: not printed' sh -c '! grep -q wrong /tmp/said'
login user:pass
check 'the password of the auth file: pushed' push $there
rm -rf /tmp/pulled
check 'the password of the auth file: pulled' cryopod pull $there -o oci:/tmp/pulled --tls-verify=false -q
unset REGISTRY_AUTH_FILE

# damaged in the registry: a blob with another byte, one that is missing, a list of images
rm -rf /tmp/pulled
large=$(jq -r '[.layers[]] | max_by(.size).digest' "/tmp/image/blobs/sha256/${digest#sha256:}")
data=/tmp/registry/docker/registry/v2/blobs/sha256/${large:7:2}/${large:7}/data
damage "$data" 4096
if cryopod pull "$to:1" -o oci:/tmp/pulled --tls-verify=false > /tmp/said 2>&1; then echo 'pulled a damaged blob' && exit 1; fi
check 'pull: a damaged blob is named' says /tmp/said "$large"
check 'pull: a damaged blob: no layout' test ! -e /tmp/pulled
for name in nothing:1 "job@sha256:$(printf '0%.0s' {1..64})"; do
    if cryopod pull "127.0.0.1:5000/team/$name" -o oci:/tmp/pulled --tls-verify=false > /tmp/said 2>&1; then exit 1; fi
    check "pull $name: not there" says /tmp/said 'not in the registry'
done
damage /tmp/image/blobs/sha256/"${large#sha256:}" 4096
if push 127.0.0.1:5000/damaged/job:1 > /tmp/said 2>&1; then echo 'pushed a damaged blob' && exit 1; fi
check 'push: a damaged blob is named' says /tmp/said "${large}.*it is damaged"
check 'push: a damaged blob: no name' sh -c '! curl -sf http://127.0.0.1:5000/v2/damaged/job/manifests/1'

# pack pushes by itself, and push packs what is no image.
pod run -d --name plain --network none localhost/busybox "${counter[@]}" > /dev/null
wait_for counted plain 2
pod container checkpoint --export /tmp/plain.tar plain > /dev/null
podman rm -f -t 0 plain > /dev/null
check 'pack to a registry' cryopod pack -q /tmp/plain.tar -o docker://127.0.0.1:5000/packed/plain:1 --tls-verify=false
check 'push of an archive' cryopod push -q /tmp/plain.tar 127.0.0.1:5000/packed/plain:2 --tls-verify=false
for tag in 1 2; do
    check "it is whole: $tag" cryopod pull -q "127.0.0.1:5000/packed/plain:$tag" -o "oci:/tmp/plain$tag" --tls-verify=false
    check "and verified: $tag" cryopod verify -q "oci:/tmp/plain$tag"
done

# A docker that has ended the container and made what cannot be packed: nobody else has it.
mkdir /tmp/engine
cat > /tmp/engine/docker << 'S'
#!/bin/sh
case "$1 $2" in
    'container inspect') echo '[{"Id": "a1"}]' ;;
    'checkpoint create') mkdir "$4/checkpoint" && echo last > "$4/checkpoint/pages-1.img" ;;
esac
S
chmod +x /tmp/engine/docker
for to in docker://127.0.0.1:5000/team/last:1 -; do
    if PATH=/tmp/engine:$PATH cryopod export a1 -e docker -o "$to" --tls-verify=false > /tmp/out 2> /tmp/said; then echo 'packed' && exit 1; fi
    kept=$(sed -n 's/.*is kept in \([^;]*\);.*/\1/p' /tmp/said)
    check "export to $to: what docker has made is where the error says" grep -q last "$kept/pages-1.img"
    rm -r "${kept%/*}"
done
check 'no temporary files are left' sh -c '! ls -A /var/tmp /tmp | grep -F .cryopod-temp-'
