# encrypted.sh: secrets of a process's memory and of its GPU memory are in no file once an archive is encrypted, nor in a
# registry. Who has a key of one of two recipients restores it from there, signed; for others nothing starts.
mkimage
simulate crun
registry
mkdir -p /dev/shm/secret /etc/cryopod
head -c 48 /dev/urandom | base64 -w 0 > /dev/shm/secret/host
ssh-keygen -q -t ed25519 -N '' -f /etc/cryopod/key
ssh-keygen -q -t ed25519 -N '' -f /etc/cryopod/third
age-keygen -o /etc/cryopod/two 2> /dev/null
age-keygen -y /etc/cryopod/two > /etc/cryopod/two.pub
openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out /etc/cryopod/sign.key 2> /dev/null
openssl pkey -in /etc/cryopod/sign.key -pubout -out /etc/cryopod/sign.pub
sign=(--sign-by /etc/cryopod/sign.key)
at=127.0.0.1:5000/team/job
configure() { # KEY: that of who reads
    cat > /etc/cryopod/config.toml << T
[runtime]
low_level = "crun"
[nvidia]
libcuda = ["/opt/cusim/libcuda.so.1"]
[restore]
allow = ["docker://127.0.0.1:5000/team"]
require = "signed"
keys = ["/etc/cryopod/sign.pub"]
[cache]
insecure_registries = ["127.0.0.1:5000"]
[encrypt]
recipients = ["/etc/cryopod/key.pub", "/etc/cryopod/two.pub"]
identities = ["$1"]
T
}
configure /etc/cryopod/key
mkdir -p /etc/containers/containers.conf.d
echo -e '[engine]\nruntime_supports_json = ["crun", "runc", "cryopod-runtime"]' > /etc/containers/containers.conf.d/json.conf
cat > /tmp/find.py << 'P'
import os, sys
# find.py ROOT...: prints each file that holds a secret
secrets = [open(f'/dev/shm/secret/{name}', 'rb').read() for name in ('host', 'gpu')]
assert all(len(secret) == 64 for secret in secrets)
for root in sys.argv[1:]:
    for place, directories, files in os.walk(root):
        for path in (os.path.join(place, name) for name in files):
            try:
                if not os.path.isfile(path) or os.path.islink(path) or not os.path.getsize(path):
                    continue
                content = open(path, 'rb').read()
            except FileNotFoundError: # podman's clean-up of a container goes on for a while
                continue
            for name, secret in zip(('host', 'gpu'), secrets):
                if secret in content:
                    print(name, path)
P
run() { # NAME OPTION... -- COMMAND
    local name=$1 && shift
    pod run -d --name "$name" --annotation dev.cryopod.vram=on --network none "${nodes[@]/#/--device=}" "${binds[@]/#/--volume=}" \
        --volume /dev/shm/secret:/secret -e LD_LIBRARY_PATH=/cusim "$@" > /dev/null 2> /tmp/said
}
run job localhost/busybox sh -c 's=$(cat /secret/host); /cusim/cusim-client --mib 96; echo "$s"'
wait_for ticked job 3

# Not encrypted: the search finds both.
cryopod export job -e podman -o oci:/tmp/plain --no-encrypt --compression none --leave-running -q
check 'its image says that GPU memory is in VRAM files' grep -rqs '"dev.cryopod.vram":"on"' /tmp/plain
cryopod unpack oci:/tmp/plain -o /tmp/unpacked -q
dd if=/tmp/unpacked/checkpoint/vram-0000.img of=/dev/shm/secret/gpu bs=64 skip=50000 count=1 status=none
python3 /tmp/find.py /tmp/plain | sort > /tmp/said
check 'not encrypted: both secrets are found' sh -c 'grep -q "^host" /tmp/said && grep -q "^gpu" /tmp/said'
if cryopod push oci:/tmp/plain "$at:0" --tls-verify=false -q > /tmp/said 2>&1; then echo 'pushed in plain' && exit 1; fi
check 'not encrypted: not pushed' says /tmp/said 'is not encrypted, and encrypt.recipients are set'
rm -rf /tmp/plain /tmp/unpacked

if cryopod export job -e podman -o /tmp/job.tar.zst -q > /tmp/said 2>&1; then echo "encrypted podman's file" && exit 1; fi
check "podman's file: refused before the checkpoint" says /tmp/said 'cannot be encrypted.*oci-archive'
check 'and the container runs on' goes_on job
check 'export' cryopod export job -e podman -o oci-archive:/tmp/job.tar --compression none --name "$at:1" "${sign[@]}" -q
pod rm -f -t 0 job > /dev/null
check 'push' cryopod push oci-archive:/tmp/job.tar "$at:1" --tls-verify=false -q
check 'pack to a registry: encrypted again' cryopod pack oci-archive:/tmp/job.tar -o "docker://$at:2" "${sign[@]}" --tls-verify=false -q
check 'pull to an archive' cryopod pull "$at:1" -o oci-archive:/tmp/back.tar --tls-verify=false -q
check 'it is the same, and signed' cryopod cache pull -q oci-archive:/tmp/back.tar
rm -rf /var/cache/cryopod
if cryopod pull "$at:1" -o /tmp/back.tar.zst --tls-verify=false -q > /tmp/said 2>&1; then echo 'pulled in plain' && exit 1; fi
check "pull to podman's file: refused" says /tmp/said 'is encrypted.*--no-encrypt'
python3 /tmp/find.py /etc /root /run /srv /tmp /var > /tmp/said
check 'no file has a secret' sh -c 'cat /tmp/said; test ! -s /tmp/said'

mkdir /dev/shm/job /dev/shm/plain
tar -C /dev/shm/job -xf /tmp/job.tar
for blob in /dev/shm/job/blobs/sha256/*; do
    if head -c 21 "$blob" | grep -q '^age-encryption.org/v1$'; then
        check "age: $(stat -c %s "$blob") bytes" age --decrypt --identity /etc/cryopod/two --output "/dev/shm/plain/${blob##*/}" "$blob"
    fi
done
python3 /tmp/find.py /dev/shm/plain > /tmp/said
check 'age decrypts the layers' sh -c 'grep -q "^host" /tmp/said && grep -q "^gpu" /tmp/said'
rm -r /dev/shm/job /dev/shm/plain

check 'verify' cryopod verify -q oci-archive:/tmp/job.tar
check 'inspect' sh -c 'cryopod inspect oci-archive:/tmp/job.tar | grep -q job'
# Only a restore that reads the GPU memory in the archive finds this damage while it reads that memory.
block=$(tar -tvRf /tmp/job.tar | sort -n -k 5 | sed -n '$s/^block \([0-9]*\):.*/\1/p')
damage /tmp/job.tar $(((block + 10000) * 512))
if cryopod import oci-archive:/tmp/job.tar -e podman --restore -q > /tmp/said 2>&1; then echo 'imported a damaged archive' && exit 1; fi
check 'import of a damaged archive: refused' says /tmp/said 'GPU memory cannot be read: /tmp/job.tar: .*cannot be decrypted'
check 'import of a damaged archive: nothing is left' wait_for sh -c '! pgrep -x cusim-client'
podman rm -f -t 0 job > /dev/null 2>&1 || true
damage /tmp/job.tar $(((block + 10000) * 512)) # as it was
check 'import' cryopod import oci-archive:/tmp/job.tar -e podman --restore -q
check 'import: the sum goes on' goes_on job
pod rm -f -t 0 job > /dev/null
check 'import: as an image of podman' cryopod import oci-archive:/tmp/job.tar -e podman --name localhost/job:1 -q
pod container restore localhost/job:1 > /dev/null
check 'its image: the sum goes on' goes_on job
pod rm -f -t 0 job > /dev/null
podman rmi -f localhost/job:1 > /dev/null # an engine's image is plain
for tag in 1 2; do
    configure /etc/cryopod/two
    check "a container from the registry: $tag" run "copy$tag" --annotation "dev.cryopod.restore=docker://$at:$tag" localhost/busybox true
    check 'it goes on' goes_on "copy$tag"
    podman rm -f -t 0 "copy$tag" > /dev/null
done
rm -rf /var/cache/cryopod

# Of a checkpoint whose large files are in a store. Both are plain, and so in memory.
configure /etc/cryopod/key
mkdir -m 700 /dev/shm/store
printf '[store]\npath = "/dev/shm/store"\n' >> /etc/cryopod/config.toml
run job --annotation dev.cryopod.store=on localhost/busybox sh -c 's=$(cat /secret/host); /cusim/cusim-client --mib 96; echo "$s"'
wait_for ticked job 3
cryopod-runtime checkpoint --image-path /dev/shm/images --work-path /dev/shm/work "$(podman inspect --format '{{.Id}}' job)" > /dev/null
pod rm -f -t 0 job > /dev/null
check 'bundle' cryopod bundle /dev/shm/images -o oci-archive:/tmp/bundled.tar --name "$at:3" "${sign[@]}" -q
dd if="$(ls /dev/shm/store/*/vram-0000.img)" of=/dev/shm/secret/gpu bs=64 skip=50000 count=1 status=none
rm -r /dev/shm/images /dev/shm/store
check 'push' cryopod push oci-archive:/tmp/bundled.tar "$at:3" --tls-verify=false -q
check 'a container from the bundle' run copy3 --annotation "dev.cryopod.restore=docker://$at:3" localhost/busybox true
check 'it goes on' goes_on copy3
podman rm -f -t 0 copy3 > /dev/null
rm -rf /var/cache/cryopod
python3 /tmp/find.py /etc /root /run /srv /tmp /var > /tmp/said
check 'still no file has a secret' sh -c 'cat /tmp/said; test ! -s /tmp/said'

# Another key, and none.
for key in third absent; do
    configure /etc/cryopod/$key
    for command in verify inspect 'unpack -o /tmp/never' 'import -e podman --restore' 'cache pull'; do
        # shellcheck disable=SC2086
        if cryopod $command oci-archive:/tmp/job.tar > /tmp/said 2>&1; then echo "$command: with the key $key" && exit 1; fi
        check "$command: refused" says /tmp/said 'encrypted, and (none of 1 identities|there is no identity; /etc/cryopod/absent: No such file)'
    done
    if run never --annotation "dev.cryopod.restore=docker://$at:1" localhost/busybox true; then echo "started with the key $key" && exit 1; fi
    check 'a container: refused' says /tmp/said 'encrypted, and'
    podman rm -f never > /dev/null 2>&1 || true
    check 'nothing was started' test -z "$(crun list -q)$(ls -A /run/cryopod/away 2> /dev/null)"
done
check 'nothing is left' sh -c '! ls -A /tmp /var/tmp /var/cache/cryopod | grep -E "never|cryopod-temp-|partial"'
