#!/bin/bash
# root.sh SUITE MIRROR DIR: builds a Debian root as a user of podman has it, in DIR, which must be empty. The packages
# are tested in it. `testbed up` runs it, with TESTBED_ROOT_SCRIPT.
set -euo pipefail

suite=$1 mirror=$2 root=$3
packages=(
    podman conmon crun runc criu # the stack, of the suite's own versions
    iproute2 iptables procps jq busybox-static
    bash-completion man-db rpm # what the packages themselves are tried with
)

script=/usr/share/debootstrap/scripts/$suite # an older debootstrap does not know newer suites
[ -e "$script" ] || script=/usr/share/debootstrap/scripts/sid
debootstrap --variant=minbase --keyring=/usr/share/keyrings/debian-archive-keyring.gpg \
    "$suite" "$root" "$mirror" "$script"
# By apt, as debootstrap does not choose between alternatives.
printf '#!/bin/sh\nexit 101\n' > "$root/usr/sbin/policy-rc.d"
chmod +x "$root/usr/sbin/policy-rc.d"
DEBIAN_FRONTEND=noninteractive chroot "$root" apt-get install -y --no-install-recommends "${packages[@]}"
rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/*

# No systemd and no journal in the bed, and on a hybrid machine no pids controller with v2. The host's network: many
# kernels lack the firewall modules with which CRIU would lock one of the container's own.
mkdir -p "$root/etc/containers" "$root/src"
cat > "$root/etc/containers/containers.conf" <<'CONF'
[containers]
log_driver = "k8s-file"
netns = "host"
pids_limit = 0
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
CONF
printf '[storage]\ndriver = "overlay"\ngraphroot = "/var/lib/containers/storage"\nrunroot = "/run/containers/storage"\n' \
    > "$root/etc/containers/storage.conf"

# The file system of the containers: busybox, and nothing else.
tree=$(mktemp -d)
mkdir -p "$tree"/{bin,dev,etc,proc,root,run,sys,tmp} "$root/usr/local/share/testbed"
for applet in $(chroot "$root" busybox --list); do
    ln -s busybox "$tree/bin/$applet"
done
cp --remove-destination "$root/usr/bin/busybox" "$tree/bin/busybox" 2> /dev/null ||
    cp --remove-destination "$root/bin/busybox" "$tree/bin/busybox"
printf 'root:x:0:0:root:/root:/bin/sh\n' > "$tree/etc/passwd"
printf 'root:x:0:\n' > "$tree/etc/group"
tar -C "$tree" --owner=0 --group=0 --numeric-owner -cf "$root/usr/local/share/testbed/busybox.tar" .
rm -rf "$tree"
