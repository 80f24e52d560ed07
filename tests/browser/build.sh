#!/bin/bash
# build.sh ROOT DIR: installs Chromium and fonts over the test bed's root ROOT; what that adds is in DIR/upper.
#
# `tests/browser/build` runs it in mount and PID namespaces of its own, where an interrupted build leaves no mount and no
# process. The directory's name in the cache has a hash of this file: edit it, and a new one is built.
set -euo pipefail
root=$1 dir=$2

mkdir "$dir"/{work,upper,at}
at=$dir/at
mount -t overlay -o "lowerdir=$root,upperdir=$dir/upper,workdir=$dir/work" overlay "$at"
mount -t proc proc "$at/proc"
mount --rbind /dev "$at/dev"
cp --remove-destination /etc/resolv.conf "$at/etc/resolv.conf"

# The bed's root knows the mirror that it was built from. A mirror may be older than its lists are meant to be.
in_root() { chroot "$at" env DEBIAN_FRONTEND=noninteractive "$@"; }
in_root timeout 120 apt-get -o Acquire::Check-Valid-Until=false update -qq
in_root timeout 900 apt-get install -y --no-install-recommends chromium fonts-dejavu-core
in_root apt-get clean
in_root chromium --version
umount -R "$at"
rm -rf "$dir"/{work,at} "$dir"/upper/var/lib/apt "$dir"/upper/usr/share/{doc,locale,man}
