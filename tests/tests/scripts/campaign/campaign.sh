# campaign.sh LOW SEED ROUNDS [ONLY]: random operations on random containers, each with a random fault; campaign.py tells what
# must hold after each. ONLY: numbers of the operations that are carried out, the others are left out.
# shellcheck disable=SC2154
low=$1 seed=$2 rounds=$3 only=${4:-}
# File systems of their own, which the campaign makes full.
mkdir -p /srv/cp /srv/out /run/cryopod
for dir in /var/lib/{containers,containerd,docker} /tmp /run/cryopod /srv/cp; do mount -t tmpfs -o size=2g,mode=755 tmpfs $dir; done
chmod 1777 /tmp
mkimage
# The preload library is for images with glibc.
mkdir -p /tmp/glibc/lib64 /tmp/glibc/lib/x86_64-linux-gnu
tar -C /tmp/glibc -xf /usr/local/share/testbed/busybox.tar
cp /usr/lib/x86_64-linux-gnu/lib{c,m,gcc_s,dl,pthread,rt}.so.* /tmp/glibc/lib/x86_64-linux-gnu/ 2> /dev/null || true
cp -L /lib64/ld-linux-x86-64.so.2 /tmp/glibc/lib64/
tar -C /tmp/glibc -cf /tmp/glibc.tar . && pod import -q /tmp/glibc.tar localhost/glibc > /dev/null && rm -r /tmp/glibc
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
    for image in busybox glibc; do podman save -q --format oci-archive -o /tmp/$image.oci localhost/$image; done
fi
python3 "/src/tests/tests/scripts/campaign/${PROGRAM:-campaign}.py" "$low" "$engines" "$seed" "$rounds" "$only"
