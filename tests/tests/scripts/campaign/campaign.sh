# campaign.sh LOW SEED ROUNDS [ONLY]: random operations on random containers, each with a random fault; campaign.py tells what
# must hold after each. ONLY: numbers of the operations that are carried out, the others are left out.
# shellcheck disable=SC2154
low=$1 seed=$2 rounds=$3 only=${4:-}
# File systems of their own, which the campaign makes full.
mkdir -p /srv/cp /srv/out /run/cryopod
for dir in /var/lib/{containers,containerd,docker} /tmp /run/cryopod /srv/cp; do mount -t tmpfs -o size=2g,mode=755 tmpfs $dir; done
chmod 1777 /tmp
mkimage
simulate "$low" --proc-root /run/simulated
mount --bind /run/simulated/driver /proc/driver
printf '[restore]\nallow = [{ from = "/srv/cp", variable = true }]\n[store]\ngrace_s = 0\n' >> /etc/cryopod/config.toml
mkdir -p /etc/containers/containers.conf.d
echo -e '[engine]\nruntime_supports_json = ["crun", "runc", "cryopod-runtime"]' > /etc/containers/containers.conf.d/json.conf
engines=podman
if [ "$low" = runc ]; then
    engines=podman,docker,ctr
    # Our shim in place of containerd's own, so that docker's options of a checkpoint reach it.
    mkdir -p /place
    ln -s /usr/local/bin/containerd-shim-cryopod-v2 /place/containerd-shim-runc-v2
    podman save -q --format oci-archive -o /tmp/busybox.oci localhost/busybox
fi
python3 "/src/tests/tests/scripts/campaign/${PROGRAM:-campaign}.py" "$low" "$engines" "$seed" "$rounds" "$only"
