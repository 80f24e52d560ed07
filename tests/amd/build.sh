#!/bin/bash
# build.sh ROOT DIR KERNEL CRIU...: builds in DIR, which must be empty, what `build` says, in the test bed's root ROOT with
# the compiler, kernel headers and libraries of its Debian. CRIU...: directories of CRIU's sources, criu-VERSION.
#
# `build` runs it in mount and PID namespaces of its own. The directory's name in the cache has a hash of this file.
set -euo pipefail
root=$1 dir=$2 kernel=$3
shift 3
here=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)

at=$dir/.at
mkdir "$at"
mount -t tmpfs tmpfs "$at"
mkdir "$at"/{upper,work,root}
mount -t overlay -o "lowerdir=$root,upperdir=$at/upper,workdir=$at/work" overlay "$at/root"
at=$at/root
mount -t proc proc "$at/proc"
mount --rbind /dev "$at/dev"
cp --remove-destination /etc/resolv.conf "$at/etc/resolv.conf"
mkdir "$at"/{amd,built}
mount --bind "$dir" "$at/built"
cp -r "$here"/{kfd,client.c,libdrm_amdgpu.c} "$at/amd/"
in_root() { chroot "$at" env DEBIAN_FRONTEND=noninteractive "$@"; }

in_root timeout 120 apt-get -o Acquire::Check-Valid-Until=false update -qq
in_root timeout 600 apt-get install -y --no-install-recommends gcc libc6-dev make protobuf-c-compiler libprotobuf-c-dev \
    libprotobuf-dev libdrm-dev libcompel-dev libcap-dev libelf1t64
# Not installed: the headers depend on the kernel's image.
in_root sh -euc 'cd /amd && timeout 300 apt-get download "linux-headers-$1" "linux-headers-${1%-amd64}-common" \
    "linux-kbuild-${1%-amd64}"' headers "$kernel"
for deb in "$at"/amd/*.deb; do dpkg-deb -x "$deb" "$at"; done
compiler=$(sed -n 's/^CONFIG_CC_VERSION_TEXT="\([^ "]*\).*/\1/p' "$at/usr/src/linux-headers-$kernel/.config")
if [ -z "$(in_root sh -c "command -v $compiler")" ]; then in_root ln -s gcc "/usr/bin/$compiler"; fi

plugin() { # CRIU's directory: amdgpu_plugin.so as CRIU's Makefile builds it, without all the rest that this asks for
    local version=${1##*/criu-}
    cp -r "$1" "$at/amd/criu"
    # shellcheck disable=SC2016
    in_root bash -euc '
        cd /amd/criu
        (cd images && protoc-c --proto_path=. --c_out=. ./*.proto google/protobuf/descriptor.proto)
        ln -s arch/x86/asm include/common/asm
        : > include/common/config.h
        cd plugins/amdgpu
        protoc-c --proto_path=. --c_out=. criu-amdgpu.proto
        mkdir "/built/plugin-$1"
        gcc -g -O2 -w -D_GNU_SOURCE -shared -nostartfiles -fPIC amdgpu_plugin*.c criu-amdgpu.pb-c.c \
            -o "/built/plugin-$1/amdgpu_plugin.so" -iquote ../../include -iquote ../../criu/include \
            -iquote ../../criu/arch/x86/include -iquote ../.. -iquote ../../images -I/usr/include/libdrm \
            -lpthread -lrt -ldrm -ldrm_amdgpu' plugin "$version"
    rm -r "$at/amd/criu"
}
for criu in "$@"; do plugin "$criu"; done

in_root gcc -O2 -Wall -Wextra -Werror -shared -fPIC -Wl,-soname,libdrm_amdgpu.so.1 -I/usr/include/libdrm \
    /amd/libdrm_amdgpu.c -o /built/libdrm_amdgpu.so.1
in_root gcc -O2 -Wall -Wextra -Werror -static /amd/client.c -o /built/kfd-client
in_root make -C "/usr/src/linux-headers-$kernel" M=/amd/kfd CONFIG_DEBUG_INFO_BTF_MODULES= modules
cp "$at/amd/kfd/mock_kfd.ko" "$dir/"
cp -L "$at/usr/lib/x86_64-linux-gnu/"{libdrm.so.2,libprotobuf-c.so.1} "$dir/" # where the bed's root has none

umount -R "$at" "$dir/.at"
rmdir "$dir/.at"
