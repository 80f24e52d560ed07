# signed.sh LOW: signatures that podman's policy and cosign take, and cryopod's own demand for them.
low=$1
mkimage
registry
at=127.0.0.1:5000/team/counter
old=()
for key in ours other; do
    openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out /tmp/$key.key 2> /dev/null
    openssl pkey -in /tmp/$key.key -pubout -out /tmp/$key.pub
done
configure() { # KEY
    cat > /etc/cryopod/config.toml << T
[runtime]
low_level = "$low"
[restore]
allow = ["/srv/checkpoints", "docker://127.0.0.1:5000/team"]
require = "signed"
keys = ["/tmp/$1.pub"]
[cache]
insecure_registries = ["127.0.0.1:5000"]
T
}
mkdir -p /etc/cryopod /srv/checkpoints /etc/containers/registries.d /etc/containers/containers.conf.d
echo -e '[engine]\nruntime_supports_json = ["crun", "runc", "cryopod-runtime"]' > /etc/containers/containers.conf.d/json.conf
echo 'docker: {"127.0.0.1:5000": {use-sigstore-attachments: true}}' > /etc/containers/registries.d/registry.yaml
policy() { # KEY
    printf '{"default": [{"type": "reject"}], "transports": {"docker": {"127.0.0.1:5000/team": [{"type": "sigstoreSigned", "keyPath": "/tmp/%s.pub", "signedIdentity": {"type": "matchRepository"}}]}}}' \
        "$1" > /tmp/policy.json
}
pulls() { podman pull -q --tls-verify=false --signature-policy /tmp/policy.json "$1" > /tmp/said 2>&1; }
copies() { # SOURCE: a container begins there
    podman rm -f -t 0 copy > /dev/null 2>&1 || true
    pod run -d --name copy --network none --annotation "dev.cryopod.restore=$1" localhost/busybox true > /dev/null 2> /tmp/said && wait_for counted copy 6
}
refused() { # PATTERN COMMAND...
    local pattern=$1 && shift && : > /tmp/said
    if "$@" > /tmp/out 2>&1; then echo "done, and not refused: $*" && return 1; fi
    cat /tmp/out >> /tmp/said
    says /tmp/said "$pattern" && [ -z "$("$low" list -q)" ]
}

low_level "$low"
pod run -d --name c1 --network none localhost/busybox "${counter[@]}" > /dev/null
wait_for counted c1 5
cryopod export c1 -e podman -o "docker://$at:1" --tls-verify=false --sign-by /tmp/ours.key -q
podman rm -f -t 0 c1 > /dev/null
# The same content, and one without a signature
cryopod pull "$at:1" -o oci:/srv/checkpoints/c1 --tls-verify=false -q
cryopod pack oci:/srv/checkpoints/c1 -o "docker://$at:unsigned" --annotation a=b --tls-verify=false -q
digest=$(skopeo inspect --tls-verify=false --format '{{.Digest}}' "docker://$at:1")
unsigned=$(skopeo inspect --tls-verify=false --format '{{.Digest}}' "docker://$at:unsigned")

policy ours
check "podman's policy takes it" pulls "docker://$at:1"
check 'podman: unsigned' refused 'A signature was required' pulls "docker://$at:unsigned"
skopeo copy -q --src-tls-verify=false --dest-tls-verify=false "docker://$at:sha256-${digest#*:}.sig" "docker://$at:sha256-${unsigned#*:}.sig"
check "podman: another image's signature" refused 'digest' pulls "docker://$at:unsigned"
cosigned() { # KEY TAG
    timeout 60 cosign verify --key "/tmp/$1.pub" --insecure-ignore-tlog --allow-insecure-registry "$at:$2" > /tmp/said 2>&1
}
check 'cosign takes it' cosigned ours 1
check "cosign: another image's signature" refused 'no matching signatures' cosigned ours unsigned
check 'cosign: another key' refused 'no matching signatures' cosigned other 1
manifest=/tmp/registry/docker/registry/v2/blobs/sha256/${digest:7:2}/${digest#*:}/data
sed -i.whole 's/"schemaVersion":2/"schemaVersion" 2/' "$manifest"
cmp -s "$manifest" "$manifest.whole" && exit 1
check 'podman: a changed byte' refused 'manifest' pulls "docker://$at:1"
check 'cosign: a changed byte' refused 'no matching|no signatures|manifest|invalid' cosigned ours 1
mv "$manifest.whole" "$manifest"
policy other
check 'podman: another key' refused 'cryptographic signature verification failed' pulls "docker://$at:1"

# Two have signed it: the signature of one stays beside that of the other, and a pull keeps the one that counts.
for key in ours other; do
    cryopod pack oci:/srv/checkpoints/c1 -o "docker://$at:two" --annotation a=d --sign-by /tmp/$key.key --tls-verify=false -q
done
for key in ours other; do
    policy $key
    check "two signatures: podman's policy, $key" pulls "docker://$at:two"
    check "two signatures: cosign, $key" cosigned $key two
    configure $key
    check "two signatures: pull, $key" cryopod pull "$at:two" -o "oci:/srv/checkpoints/two-$key" --tls-verify=false -q
    check "two signatures: the one that counts here, $key" cryopod cache pull -q "oci:/srv/checkpoints/two-$key"
done
rm -rf /srv/checkpoints/two-* /var/cache/cryopod

configure ours
check 'a container begins at a signed image' copies "docker://$at:1"
podman rm -f -t 0 copy > /dev/null
check "another image's signature" refused "signature is that of $unsigned|signature is that of $digest" copies "docker://$at:unsigned"
check 'pull brings the signature along: an archive' copies oci:/srv/checkpoints/c1
podman rm -f -t 0 copy > /dev/null
check 'import' cryopod import oci:/srv/checkpoints/c1 -e podman --restore -q
podman rm -f -t 0 c1 > /dev/null
cryopod unpack oci:/srv/checkpoints/c1 -o /srv/checkpoints/plain -q
check 'images without an archive' refused 'restore.require' copies /srv/checkpoints/plain/checkpoint
cryopod pack -q oci:/srv/checkpoints/c1 -o /tmp/c1.tar
check "podman's file" refused 'has no signature' cryopod import /tmp/c1.tar -e podman --restore
mv /srv/checkpoints/c1.sig /tmp/c1.sig
check 'no signature' refused 'it has no signature' cryopod import oci:/srv/checkpoints/c1 -e podman --restore
sed 's/"payload":"ey/"payload":"fy/' /tmp/c1.sig > /srv/checkpoints/c1.sig
check 'a changed signature' refused 'restore.keys' cryopod import oci:/srv/checkpoints/c1 -e podman --restore
mv /tmp/c1.sig /srv/checkpoints/c1.sig
(cd /tmp && COSIGN_PASSWORD=secret timeout 60 cosign generate-key-pair) 2> /dev/null
if cosign sign --help | grep use-signing-config > /dev/null; then old=(--new-bundle-format=false --use-signing-config=false); fi
COSIGN_PASSWORD=secret timeout 60 cosign sign -y "${old[@]}" --key /tmp/cosign.key --tlog-upload=false --allow-insecure-registry "$at@$unsigned" 2> /dev/null
check "pack with cosign's key" env COSIGN_PASSWORD=secret cryopod pack oci:/srv/checkpoints/c1 -o "docker://$at:cosign" --annotation a=c --sign-by /tmp/cosign.key --tls-verify=false -q
check 'cosign takes it' cosigned cosign cosign
check 'a wrong password' refused 'not the key.s password' env COSIGN_PASSWORD=x cryopod pack oci:/srv/checkpoints/c1 -o oci:/tmp/never --sign-by /tmp/cosign.key
configure cosign
check "a container begins at what cosign has signed" copies "docker://$at:unsigned"
podman rm -f -t 0 copy > /dev/null
# Without require: keys are enough for registries, and a rule has its own.
ruled() { # KEY [KEY OF THE RULE]
    configure "$1"
    sed -i "/^require/d; s|\"docker://127.0.0.1:5000/team\"|{from = \"docker://127.0.0.1:5000/team\"${2:+, keys = [\"/tmp/$2.pub\"]}}|" /etc/cryopod/config.toml
}
ruled other
check 'keys: images of registries' refused 'no key of restore.keys' copies "docker://$at:1"
check 'keys: archives need no signature' copies oci:/srv/checkpoints/c1
podman rm -f -t 0 copy > /dev/null
ruled other ours
check "the rule's key" copies "docker://$at:1"
podman rm -f -t 0 copy > /dev/null
ruled ours other
check "another rule's key" refused 'no key of restore.keys' copies "docker://$at:1"
configure other
rm -rf /var/cache/cryopod
check 'another key' refused 'no key of restore.keys' cryopod import oci:/srv/checkpoints/c1 -e podman --restore
check 'another key: the registry' refused 'no key of restore.keys' copies "docker://$at:1"

# What is hostile is as hostile when a good key has signed it.
cat > /tmp/seeds.py << 'P'
import base64, glob, hashlib, json, os, subprocess
kinds = {b'\x28\xb5\x2f\xfd': '+zstd', b'\x1f\x8b\x08\x00': '+gzip'}
oci = 'application/vnd.oci.image.'
for seed in glob.glob('/src/fuzz/corpus/*/*'):
    place = '/srv/checkpoints/' + '-'.join(seed.split('/')[-2:])
    os.makedirs(place + '/blobs/sha256')
    def put(content, media):
        digest = hashlib.sha256(content).hexdigest()
        open(f'{place}/blobs/sha256/{digest}', 'wb').write(content)
        return {'mediaType': oci + media, 'digest': 'sha256:' + digest, 'size': len(content)}
    layer = open(seed, 'rb').read()
    layer = put(layer, 'layer.v1.tar' + kinds.get(layer[:4], ''))
    config = {'architecture': 'amd64', 'os': 'linux', 'rootfs': {'type': 'layers', 'diff_ids': [layer['digest']]}}
    config = put(json.dumps(config).encode(), 'config.v1+json')
    manifest = {'schemaVersion': 2, 'mediaType': oci + 'manifest.v1+json', 'config': config, 'layers': [layer]}
    manifest = put(json.dumps(manifest).encode(), 'manifest.v1+json')
    json.dump({'schemaVersion': 2, 'manifests': [manifest]}, open(place + '/index.json', 'w'))
    json.dump({'imageLayoutVersion': '1.0.0'}, open(place + '/oci-layout', 'w'))
    payload = json.dumps({'critical': {'identity': {'docker-reference': 'a/b'}, 'image': {'docker-manifest-digest': manifest['digest']},
        'type': 'cosign container image signature'}}).encode()
    signature = subprocess.check_output(['openssl', 'dgst', '-sha256', '-sign', '/tmp/ours.key'], input=payload)
    text = lambda content: base64.b64encode(content).decode()
    stored = json.dumps({'mimeType': 'application/vnd.dev.cosign.simplesigning.v1+json', 'payload': text(payload),
        'annotations': {'dev.cosignproject.cosign/signature': text(signature)}})
    open(place + '.sig', 'wb').write(b'\0sigstore-json\n' + stored.encode())
P
python3 /tmp/seeds.py
seeds() { # prints what is said of each
    local index place
    for index in /srv/checkpoints/*-*/index.json; do
        place=${index%/*}
        echo "$place $(cryopod cache pull -q "oci:$place" 2>&1 && echo taken)"
        rm -rf /var/cache/cryopod
    done
}
configure ours
seeds > /tmp/signed
sed -i '/^require/d' /etc/cryopod/config.toml
seeds > /tmp/unsigned
check 'hostile and signed: as without' diff /tmp/signed /tmp/unsigned
check 'refused for what they are' test "$(grep -c 'not made by a checkpoint' /tmp/signed)" -ge 10
