#!/bin/bash
# build.sh ROOT DIR: unpacks PyTorch for CPUs, Debian's packages, and what it needs beyond the test bed's root ROOT into
# DIR/root. Nothing is installed: programs find it by PYTHONPATH and LD_LIBRARY_PATH, which
# DIR/environment has for a DIR that is seen as /opt/torch.
#
# `tests/torch/build` runs it in mount and PID namespaces of its own, where an interrupted build leaves no mount and no
# process. The directory's name in the cache has a hash of this file: edit it, and a new one is built.
set -euo pipefail
root=$1 dir=$2

mkdir "$dir"/{root,work,upper,at}
at=$dir/at
mount -t overlay -o "lowerdir=$root,upperdir=$dir/upper,workdir=$dir/work" overlay "$at"
mount -t proc proc "$at/proc"
mount --rbind /dev "$at/dev"
cp --remove-destination /etc/resolv.conf "$at/etc/resolv.conf"

# The bed's root knows the mirror that it was built from. A mirror may be older than its lists are meant to be: so may
# debootstrap's, which does not look.
in_root() { chroot "$at" env DEBIAN_FRONTEND=noninteractive "$@"; }
in_root timeout 120 apt-get -o Acquire::Check-Valid-Until=false update -qq
in_root timeout 900 apt-get install -y --no-install-recommends --download-only python3-torch
for deb in "$at"/var/cache/apt/archives/*.deb; do
    case ${deb##*/} in
        libtorch-test_*) ;; # PyTorch's own tests
        *) dpkg-deb -x "$deb" "$dir/root" ;;
    esac
done
rm -rf "$dir"/root/usr/share "$dir"/root/usr/include

lib=/opt/torch/root/usr/lib
here=$lib/x86_64-linux-gnu
printf '%s\n' "PYTHONPATH=$lib/python3/dist-packages" "LD_LIBRARY_PATH=$here:$here/blas:$here/lapack:$lib" > "$dir/environment"

# A step of training: it works, and leaves the Python that it takes compiled.
mkdir -p "$at/opt/torch"
mount --bind "$dir" "$at/opt/torch"
mapfile -t environment < "$dir/environment"
in_root env "${environment[@]}" timeout 300 python3 - << 'PY'
import torch, torch.utils.data
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
optimizer = torch.optim.AdamW(model.parameters())
for batch in torch.utils.data.DataLoader(torch.ones(4, 4), num_workers=1, multiprocessing_context="fork"):
    model(batch).sum().backward()
    optimizer.step()
PY

umount -R "$at"
rm -rf "$dir"/{work,upper,at}
