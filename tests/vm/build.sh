#!/bin/bash
# build.sh ROOT DIR: makes the virtual machine in DIR, which must be empty, from the test bed's root ROOT:
#   tools/       qemu and what it needs, unpacked
#   vmlinuz      the kernel of ROOT's Debian
#   initrd       busybox, and the modules without which nothing can be mounted
#   disk.img     ROOT, the kernel's modules and a server of NFS, as ext4
#
# `tests/vm/run` runs it in mount and PID namespaces of its own, where an interrupted build leaves no mount and no
# process. The machine's name in the cache has a hash of this file: edit it, and a new one is built.
set -euo pipefail
root=$1 dir=$2

# Modules that the initrd loads, and those that are unpacked on the disk: the emulated processor takes seconds
# for what is one here.
boot_modules=(virtio_blk ext4 overlay 9p 9pnet_virtio)
unpacked_modules=("${boot_modules[@]}" amdgpu vgem radeon cuse nfsd nfsv4 veth)

mkdir "$dir"/{tools,work,upper,at}
at=$dir/at
mount -t overlay -o "lowerdir=$root,upperdir=$dir/upper,workdir=$dir/work" overlay "$at"
mount -t proc proc "$at/proc"
mount --rbind /dev "$at/dev"
cp --remove-destination /etc/resolv.conf "$at/etc/resolv.conf"

# The bed's root knows the mirror that it was built from.
in_root() { chroot "$at" env DEBIAN_FRONTEND=noninteractive "$@"; }
in_root timeout 120 apt-get -o Acquire::Check-Valid-Until=false update -qq # of a mirror that is behind
in_root timeout 600 apt-get install -y --no-install-recommends --download-only linux-image-amd64 qemu-system-x86 e2fsprogs
mkdir "$at/mnt/vm"
mount --bind "$dir" "$at/mnt/vm"
mkdir "$dir/kernel"
for deb in "$at"/var/cache/apt/archives/*.deb; do
    case ${deb##*/} in
        linux-image-[0-9]* | linux-binary-[0-9]* | linux-base-[0-9]* | linux-modules-[0-9]*) dpkg-deb -x "$deb" "$dir/kernel" ;;
        linux-* | systemd* | libsystemd* | udev* | initramfs* | dracut*) ;; # what installing a kernel would take
        *) dpkg-deb -x "$deb" "$dir/tools" ;;
    esac
done
# A server of NFS for the disk. Its scripts, and what they would start, are not needed.
in_root apt-get clean
in_root timeout 600 apt-get install -y --no-install-recommends --download-only nfs-kernel-server
for deb in "$at"/var/cache/apt/archives/*.deb; do dpkg-deb -x "$deb" "$dir/kernel"; done
rm -rf "$dir"/{tools,kernel}/usr/share/{doc,man,locale} "$dir"/kernel/etc
mv "$(find "$dir/kernel" -name 'vmlinuz*' -type f)" "$dir/vmlinuz" # in boot, or since forky with the modules

modules=$(echo "$dir"/kernel/usr/lib/modules/*)
release=${modules##*/}
needs() { in_root modprobe -d /mnt/vm/kernel/usr -S "$release" --show-depends "$@" | sed -n "s|^insmod /mnt/vm/||p"; }
in_root depmod -b /mnt/vm/kernel/usr "$release"
for module in "${unpacked_modules[@]}"; do
    for file in $(needs "$module"); do
        case $file in *.xz) [ ! -e "$dir/$file" ] || unxz "$dir/$file" ;; esac
    done
done
in_root depmod -b /mnt/vm/kernel/usr "$release"

mkdir -p "$dir"/early/{bin,modules,proc,sys,dev,disk}
cp "$root/usr/bin/busybox" "$dir/early/bin/"
for module in "${boot_modules[@]}"; do needs "$module"; done | awk '!seen[$0]++' | while read -r file; do
    cp "$dir/$file" "$dir/early/modules/"
    echo "${file##*/}" >> "$dir/early/modules/order"
done
cat > "$dir/early/init" <<'INIT'
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t devtmpfs dev /dev
exec < /dev/console > /dev/console 2>&1
while read -r module; do insmod "/modules/$module" || exit; done < /modules/order
mount -t ext4 -o ro /dev/vda /disk || exit
mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=512000,cache=loose src /disk/src || exit
exec switch_root /disk /bin/bash /src/tests/vm/guest.sh "$@"
INIT
ln -s busybox "$dir/early/bin/sh"
sed -i '1s|.*|#!/bin/sh|' "$dir/early/init"
chmod 755 "$dir/early/init"
(cd "$dir/early" && find . | "$root/usr/bin/busybox" cpio -o -H newc 2> /dev/null | gzip -1) > "$dir/initrd"

# The disk is never written to, so it has neither room nor a journal.
mkdir "$at/mnt/disk"
mount -t overlay -o "lowerdir=$dir/kernel:$root" disk "$at/mnt/disk"
size=$(du -sk --apparent-size "$at/mnt/disk" | cut -f1)
in_root env LD_LIBRARY_PATH=/mnt/vm/tools/usr/lib/x86_64-linux-gnu /mnt/vm/tools/usr/sbin/mke2fs -q -t ext4 -m 0 \
    -O ^has_journal,^resize_inode -d /mnt/disk /mnt/vm/disk.img $((size * 5 / 4))k

umount -R "$at"
rm -rf "$dir"/{kernel,early,work,upper,at}
