# elsewhere.sh: an archive of podman's on a host that has nothing for it: `cryopod check` tells what podman would miss, each
# with the command that provides it, and podman fails for the same reason; with all of them provided, the restore works.
mkimage
simulate crun
podman volume create books > /dev/null
mkdir -p /srv/data/in
echo kept > /srv/data/in/file
podman network create --subnet 10.77.0.0/24 backend > /dev/null
pod run -d --name job --network backend "${nodes[@]/#/--device=}" "${binds[@]/#/--volume=}" -v books:/books -v /srv/data:/data \
    -e LD_LIBRARY_PATH=/cusim localhost/busybox /cusim/cusim-client --mib 16 > /dev/null
wait_for ticked job 3
pod exec job sh -c 'echo read > /books/page'
before=$(sum job)
id=$(podman inspect -f '{{.Image}}' job)
container=$(podman inspect -f '{{.Id}}' job)
podman save -q -o /tmp/image.tar localhost/busybox > /dev/null
pod container checkpoint --leave-running --ignore-volumes --export /tmp/bare.tar.zst job > /dev/null
pod container checkpoint --export /tmp/job.tar.zst job > /dev/null
pod rm -f -t 0 job > /dev/null
cryopod pack -q /tmp/job.tar.zst -o oci:/tmp/layout

# Another host: another storage (overlay wants another file system below), no network of that name, no runtime of that name.
cp /etc/containers/containers.conf /tmp/first.conf
sed -i '/^cryopod-runtime/d' /etc/containers/containers.conf
sed -i 's,/var/lib/containers/storage,/var/lib/second,; s,/run/containers/storage,/run/second,' /etc/containers/storage.conf
mkdir -p /var/lib/second && mount -t tmpfs second /var/lib/second
podman network rm -f backend > /dev/null
mv /srv/data /srv/away
logs() { podman logs "$1" 2>&1; }
podman images -q > /tmp/images
check 'another storage' test ! -s /tmp/images

says_no() { # NAME WANT...: exit code 1, and each
    local code=0 name=$1 want && shift
    cryopod check "${options[@]}" /tmp/job.tar.zst > /tmp/said 2>&1 || code=$?
    [ $code = 1 ] || { echo "$name: exit code $code" && cat /tmp/said && exit 1; }
    for want in "$@"; do grep -qF -- "$want" /tmp/said || { echo "$name: not told: $want" && cat /tmp/said && exit 1; }; done
    echo "ok: $name"
}
says_yes() { cryopod check "$@" > /tmp/said || { cat /tmp/said && return 1; }; } # ARG...
podman_fails() { # NAME PATTERN: podman itself, for the reason that the check tells
    if podman container restore --import /tmp/job.tar.zst > /tmp/said 2>&1; then echo "$1: podman restores it" && exit 1; fi
    check "$1: podman says no, too" says /tmp/said "$2"
    podman rm -f -t 0 job > /dev/null 2>&1 || true
    podman rm -f "$container" > /dev/null 2>&1 || true # at times its storage is left without the container
    podman volume rm -f books > /dev/null 2>&1 || true
}
options=()
says_no 'everything is missing, at once' \
    "podman does not have the container's image localhost/busybox:latest (id ${id:0:12})" 'podman load -i image.tar' \
    'podman knows no runtime cryopod-runtime' 'cryopod-runtime = ["/usr/local/bin/cryopod-runtime"]' \
    'podman does not have the network backend' 'podman network create --subnet 10.77.0.0/24 backend' \
    'pid files into "/run/containers/storage/' 'mkdir -p "/run/containers/storage/' \
    '"/srv/data" of its host at "/data", and it is not here' 'mkdir -p "/srv/data"' \
    'This checkpoint cannot be restored on this host'
check 'five reasons' test "$(grep -c '^refused' /tmp/said)" = 5
code=0 && cryopod check --json /tmp/job.tar.zst > /tmp/json || code=$?
jq -e --arg code "$code" '$code == "1" and (.ok | not) and (.refusals | length == 5 and all(.what != "" and .remedy != ""))' /tmp/json > /dev/null
echo 'ok: the same as JSON'
code=0 && cryopod check /tmp/layout > /tmp/said || code=$?
check 'the same of an image' test "$code $(grep -c '^refused' /tmp/said)" = '1 5'
podman_fails 'the runtime' 'cryopod-runtime'

# One after the other, as the check says.
sed -i '/^\[engine.runtimes\]/a cryopod-runtime = ["/usr/local/bin/cryopod-runtime"]' /etc/containers/containers.conf
says_no 'the runtime is there' 'does not have the container'"'"'s image'
podman_fails 'the image' 'busybox'
podman import -q --change ENV=another=one /usr/local/share/testbed/busybox.tar localhost/busybox > /dev/null
says_no 'an image of that name, another one' "podman's image localhost/busybox:latest is not the container's, which has the id ${id:0:12}" 'podman save -o image.tar'
podman_fails 'the network' 'backend'
podman network create --subnet 10.77.0.0/24 backend > /dev/null
check 'the network is there' sh -c "! cryopod check /tmp/job.tar.zst | grep -q backend"
podman_fails 'another image' 'image'
podman rmi -f localhost/busybox > /dev/null
podman load -q -i /tmp/image.tar > /dev/null
podman untag localhost/busybox:latest
says_no 'the image without its name' 'would pull that' "podman tag $id localhost/busybox:latest"
podman_fails 'the image without its name' 'busybox'
podman tag "$id" localhost/busybox:latest
check 'the image is there' sh -c "! cryopod check /tmp/job.tar.zst | grep -q image"
podman network rm -f backend > /dev/null
podman network create --subnet 10.78.0.0/24 backend > /dev/null
says_no 'a network of that name, other addresses' "has no place for the container's address 10.77.0." '--subnet 10.77.0.0/24 backend'
podman_fails 'other addresses' '10\.77\.0\.'
podman network rm -f backend > /dev/null
podman network create --subnet 10.77.0.0/24 backend > /dev/null
podman_fails 'the directory of the pid files' 'pidfile'
cryopod-runtime delete --force "$container" # which podman has left behind
eval "$(cryopod check /tmp/job.tar.zst | grep -o 'mkdir -p "/run/.*"')"
podman_fails 'the bind mount' '/srv/data'
mv /srv/away /srv/data
check 'all is there: it can be restored' says_yes /tmp/job.tar.zst
podman volume create books > /dev/null
says_no 'a volume of that name' 'podman has a volume books already' --ignore-volumes 'podman volume rm books'
if podman container restore --import /tmp/job.tar.zst > /tmp/said 2>&1; then exit 1; fi
check 'a volume of that name: podman says no, too' says /tmp/said 'volume with name books already exists'
check 'a volume of that name, to be used as it is' says_yes --ignore-volumes /tmp/job.tar.zst
podman volume rm books > /dev/null

podman container restore --import /tmp/job.tar.zst > /dev/null
check 'restored: the sum goes on' goes_on job
check 'restored: the same sum' test "$(sum job)" = "$before"
check 'restored: volume and bind mount' test "$(podman exec job cat /books/page /data/in/file | tr '\n' ' ')" = 'read kept '
podman rm -f -t 0 job > /dev/null
podman volume rm -f books > /dev/null

# An archive that was made without the volumes' content.
if cryopod check --ignore-volumes /tmp/bare.tar.zst > /tmp/said; then echo 'a volume that is nowhere: checked' && exit 1; fi
check 'a volume that is nowhere' says /tmp/said 'does not have the volume books, and its content is not in the archive'
podman volume create books > /dev/null
echo read > /var/lib/second/volumes/books/_data/page
if cryopod check /tmp/bare.tar.zst > /tmp/said; then echo 'a volume without content: checked' && exit 1; fi
check 'a volume whose content podman looks for in the archive' says /tmp/said 'does not have the content of the volume books'
check 'the volume as it is here' says_yes --ignore-volumes /tmp/bare.tar.zst
podman container restore --ignore-volumes --import /tmp/bare.tar.zst > /dev/null
check 'the volume as it is here: the sum goes on' goes_on job
podman rm -f -t 0 job > /dev/null

# Another engine.
if cryopod check -e docker /tmp/job.tar.zst > /tmp/said 2>&1; then echo 'docker: checked' && exit 1; fi
check "docker: no daemon" says /tmp/said "docker's daemon does not answer"
mkdir -p /tmp/docker
dockerd --data-root /tmp/docker --iptables=false --ip6tables=false --bridge=none > /tmp/dockerd.log 2>&1 &
wait_for docker info > /dev/null 2>&1
if cryopod check -e docker /tmp/job.tar.zst > /tmp/said 2>&1; then echo 'docker: checked' && exit 1; fi
check "docker: the image" says /tmp/said "docker does not have the container's image localhost/busybox:latest"
docker load -q -i /tmp/image.tar > /dev/null
check 'docker: with its image' says_yes -e docker /tmp/job.tar.zst
containerd > /tmp/containerd.log 2>&1 &
wait_for ctr version > /dev/null
if cryopod check -e containerd /tmp/job.tar.zst > /tmp/said 2>&1; then echo 'containerd: checked' && exit 1; fi
check "containerd: the image" says /tmp/said "containerd does not have the container's image localhost/busybox:latest in its namespace default"
podman volume rm -f books > /dev/null
ctr images import /tmp/image.tar > /dev/null
check 'containerd: with its image' says_yes -e containerd /tmp/job.tar.zst
