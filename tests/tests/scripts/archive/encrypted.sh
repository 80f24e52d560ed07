# encrypted.sh: secrets of a process's memory and of its GPU memory are in no file once an archive is encrypted, nor in a
# registry. Who has a recipient's key restores it from there; for others nothing starts.
mkimage
simulate crun
registry
mkdir -p /dev/shm/secret /etc/cryopod
head -c 48 /dev/urandom | base64 -w 0 > /dev/shm/secret/host
ssh-keygen -q -t ed25519 -N '' -f /etc/cryopod/key
ssh-keygen -q -t ed25519 -N '' -f /etc/cryopod/third
at=127.0.0.1:5000/team/job
configure() { # KEY: that of who reads
    cat > /etc/cryopod/config.toml << T
[runtime]
low_level = "crun"
[nvidia]
libcuda = ["/opt/cusim/libcuda.so.1"]
[restore]
allow = ["docker://127.0.0.1:5000/team"]
[cache]
insecure_registries = ["127.0.0.1:5000"]
[encrypt]
recipients = ["/etc/cryopod/key.pub"]
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
            if os.path.isfile(path) and not os.path.islink(path) and os.path.getsize(path):
                content = open(path, 'rb').read()
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
check 'export' cryopod export job -e podman -o oci-archive:/tmp/job.tar --compression none -q
pod rm -f -t 0 job > /dev/null
check 'push' cryopod push oci-archive:/tmp/job.tar "$at:1" --tls-verify=false -q
check 'pack to a registry: encrypted again' cryopod pack oci-archive:/tmp/job.tar -o "docker://$at:2" --tls-verify=false -q
python3 /tmp/find.py /etc /root /run /srv /tmp /var > /tmp/said
check 'no file has a secret' sh -c 'cat /tmp/said; test ! -s /tmp/said'

check 'verify' cryopod verify -q oci-archive:/tmp/job.tar
check 'inspect' sh -c 'cryopod inspect oci-archive:/tmp/job.tar | grep -q job'
check 'import' cryopod import oci-archive:/tmp/job.tar -e podman --restore -q
check 'import: the sum goes on' goes_on job
pod rm -f -t 0 job > /dev/null
check 'import: as an image of podman' cryopod import oci-archive:/tmp/job.tar -e podman --name localhost/job:1 -q
pod container restore localhost/job:1 > /dev/null
check 'its image: the sum goes on' goes_on job
pod rm -f -t 0 job > /dev/null
for tag in 1 2; do
    check "a container from the registry: $tag" run "copy$tag" --annotation "dev.cryopod.restore=docker://$at:$tag" localhost/busybox true
    check 'it goes on' goes_on "copy$tag"
    podman rm -f -t 0 "copy$tag" > /dev/null
done
rm -rf /var/cache/cryopod

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
