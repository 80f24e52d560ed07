#!/bin/bash
# root.sh SUITE MIRROR DIR: builds the test bed's Debian root in DIR, which must be empty.
#
# Run by `testbed up` in mount and PID namespaces of its own, so an interrupted build leaves no mount
# and no process. The root's name in the cache has a hash of this file: edit it, and a new one is built.
set -euo pipefail

# what is tested
stack=(criu libcriu2 python3-pycriu runc crun podman conmon netavark aardvark-dns containerd docker.io docker-cli skopeo)
packages=(
    "${stack[@]}" docker-compose
    # what the tests and the tools above call
    iptables nftables iproute2 kmod procps strace jq zstd pigz ca-certificates
    # archives: another reader, a registry, what decrypts and checks signatures, ssh to another host, curl for calls to the CRI (Debian has no crictl); the examples' kubectl
    checkpointctl docker-registry age cosign curl kubectl openssh-client openssh-server
    # what the containers run: busybox, and real programs that tests checkpoint
    busybox-static python3 python3-uvicorn python3-uvloop redis-server
)

suite=$1 mirror=$2 root=$3

# Debian's experimental has single packages, for use over a whole suite.
base=$suite
if [ "$suite" = experimental ]; then base=forky; fi
script=/usr/share/debootstrap/scripts/$base # an older debootstrap does not know newer suites
[ -e "$script" ] || script=/usr/share/debootstrap/scripts/sid
debootstrap --variant=minbase --keyring=/usr/share/keyrings/debian-archive-keyring.gpg \
    --include="$(IFS=, && echo "${packages[*]}")" "$base" "$root" "$mirror" "$script"

if [ "$suite" != "$base" ]; then
    echo "deb $mirror $suite main" > "$root/etc/apt/sources.list.d/$suite.list"
    # The mirror may be a snapshot, whose lists have expired; debootstrap takes them too.
    chroot "$root" apt-get -o Acquire::Check-Valid-Until=false update
    DEBIAN_FRONTEND=noninteractive chroot "$root" apt-get install -y --no-install-recommends \
        --target-release "$suite" "${stack[@]}"
fi

if [ "$suite" = trixie ]; then # an S3 server, whose dependencies debootstrap does not find
    DEBIAN_FRONTEND=noninteractive chroot "$root" apt-get install -y --no-install-recommends python3-moto python3-flask-cors
fi

rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/* \
    "$root"/usr/share/{doc,man,locale,info}/*

# No systemd and no journal in the bed, no network, and on a hybrid machine no pids controller with v2.
cat > "$root/etc/containers/containers.conf" <<'CONF'
[containers]
log_driver = "k8s-file"
netns = "none"
pids_limit = 0
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
[engine.runtimes]
cryopod-runtime = ["/usr/local/bin/cryopod-runtime"]
CONF
cat > "$root/etc/containers/storage.conf" <<'CONF'
[storage]
driver = "overlay"
graphroot = "/var/lib/containers/storage"
runroot = "/run/containers/storage"
CONF

# Containers here have no network, and many kernels lack the firewall modules criu would lock it with.
# Not in runc.conf or crun.conf: criu 4.1 reads past its arguments, and crashes, on `network-lock` there.
mkdir -p "$root/etc/criu"
echo 'network-lock skip' > "$root/etc/criu/default.conf"

# The file system of the containers: busybox, and nothing else.
tree=$(mktemp -d)
mkdir -p "$tree"/{bin,dev,etc,proc,root,run,sys,tmp}
for applet in $(chroot "$root" busybox --list); do
    ln -s busybox "$tree/bin/$applet"
done
cp --remove-destination "$root/usr/bin/busybox" "$tree/bin/busybox"
printf 'root:x:0:0:root:/root:/bin/sh\n' > "$tree/etc/passwd"
printf 'root:x:0:\n' > "$tree/etc/group"
mkdir -p "$root/usr/local/share/testbed" "$root/usr/local/lib/cryopod" "$root/src"
tar -C "$tree" --owner=0 --group=0 --numeric-owner -cf "$root/usr/local/share/testbed/busybox.tar" .
rm -rf "$tree"
