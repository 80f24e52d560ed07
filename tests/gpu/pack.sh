#!/bin/bash
# pack.sh [OUT.tar.gz]: packs the container stack of the test bed's cached root (criu, runc, crun, podman, conmon
# and what they need) and the release binaries of this workspace into one file, by default dist/gpu-root.tar.gz.
# tests/gpu/run.sh runs in it on a GPU machine that has none of this.
# pack.sh engines [OUT.tar.zst]: packs containerd, ctr, docker and what they need beside that, by default into
# dist/gpu-engines.tar.zst. run.sh unpacks it over the other one. Both from the same suite: SUITE=forky, say.
#
#   GPU_PACK_LEVEL      of zstd, default 12; 17 is a tenth smaller, in minutes
#   GPU_PACK_WITHOUT    of: sim (the simulated driver), docker (the parts ctr and cri do without)
set -euo pipefail

workspace=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../.." && pwd)
engines=''
if [ "${1:-}" = engines ]; then engines=yes && shift; fi
out=$(realpath -m "${1:-$workspace/dist/gpu-$([ -n "$engines" ] && echo engines.tar.zst || echo root.tar.gz)}")
bin=${CRYOPOD_BIN_DIR:-${CARGO_TARGET_DIR:-$workspace/target}/release}
lib=usr/lib/x86_64-linux-gnu

without() { [[ " ${GPU_PACK_WITHOUT:-} " == *" $1 "* ]]; }
compress() { chroot "$bed" zstd -q --long=27 "-${GPU_PACK_LEVEL:-12}"; }
die() { echo "pack.sh: $*" >&2 && exit 1; }

"$workspace/tests/testbed/testbed" up
bed=$("$workspace/tests/testbed/testbed" status | sed -n 's/^[^ ]*  \(.*\)  (current)$/\1/p')
[ -d "$bed" ] || die "the test bed has no root; build it with: tests/testbed/testbed up"
for file in cryopod-runtime cryopod containerd-shim-cryopod-v2 cryopod-cuda-agent libcryopod_nvidia.so libcryopod_preload.so; do
    [ -n "$engines" ] || [ -e "$bin/$file" ] || die "$bin/$file is missing; build it with: make build"
done

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
chmod 755 "$root"
mkdir -p "$root"/{usr/{bin,sbin,lib64,lib/podman,share,local/bin,local/lib/cryopod},"$lib",etc/criu,tmp,proc,sys,dev,run} \
    "$root"/{var/tmp,var/lib/containers,root,host,old,opt/{driver,cusim,work},src}
for dir in bin sbin lib lib64; do ln -s "usr/$dir" "$root/$dir"; done

libraries_of() { # PATH in the bed: copies the libraries that the program loads
    local file
    while read -r file; do
        mkdir -p "$root/usr${file%/*}"
        [ -e "$root/usr${file#/usr}" ] || cp -L "$bed$file" "$root/usr${file#/usr}"
    done < <({ chroot "$bed" ldd "$1" 2> /dev/null || true; } | awk '/=> \//{sub("^/usr", "", $3); print $3}')
}
take() { # PATH in the bed, without the leading slash
    [ -e "$bed/$1" ] || die "the test bed has no $1"
    cp -L "$bed/$1" "$root/$1"
    libraries_of "/$1"
}
for program in sbin/{criu,runc,xtables-nft-multi} bin/{crun,podman,conmon,busybox,jq,bash,tar,zstd,gzip,mount,umount} \
    bin/{ip,cat,date,sleep,timeout,head,tail,sort,stat,pigz}; do
    take "usr/$program"
done
take "$lib/libcriu.so.2"
if [ -n "$engines" ]; then
    find "$root/usr" -type f > "$root/tmp/in-the-other-pack"
    for program in bin/{containerd,containerd-shim-runc-v2,ctr,curl} $(without docker || echo bin/docker sbin/dockerd); do take "usr/$program"; done
    xargs rm < "$root/tmp/in-the-other-pack"
    mkdir "$root/kept"
    mv "$root"/usr "$root/kept/"
    rm -rf "${root:?}"/{bin,sbin,lib,lib64,etc,tmp,proc,sys,dev,run,var,root,host,old,opt,src}
    mv "$root"/kept/usr "$root/" && rmdir "$root/kept"
    find "$root" -type d -empty -delete
    mkdir -p "$root/etc" "${out%/*}"
    # shellcheck disable=SC2016
    chroot "$bed" dpkg-query -W -f '${Package} ${Version}\n' containerd docker.io > "$root/etc/engine-versions"
    tar -C "$root" --owner=0 --group=0 --numeric-owner -c . | compress > "$out.part"
    mv "$out.part" "$out"
    echo "packed $(du -h "$out" | cut -f1) into $out"
    exit
fi
# podman looks for it and, without networks, never runs it.
printf '#!/bin/sh\nexit 1\n' > "$root/usr/lib/podman/netavark" && chmod +x "$root/usr/lib/podman/netavark"
for file in libdl.so.2 libpthread.so.0 librt.so.1 libm.so.6 libgcc_s.so.1; do cp -L "$bed/$lib/$file" "$root/$lib/"; done
cp -L "$bed/lib64/ld-linux-x86-64.so.2" "$root/usr/lib64/"
cp -rL "$bed/etc/containers" "$bed/etc/passwd" "$bed/etc/group" "$root/etc/"
cp "$bed/etc/criu/default.conf" "$root/etc/criu/"
if [ -d "$bed/usr/share/containers" ]; then cp -rL "$bed/usr/share/containers" "$root/usr/share/"; fi
touch "$root"/etc/{subuid,subgid}
for name in iptables ip6tables iptables-restore ip6tables-restore iptables-save ip6tables-save; do
    ln -sf xtables-nft-multi "$root/usr/sbin/$name"
done
for applet in $(chroot "$bed" busybox --list); do
    [ -e "$root/usr/bin/$applet" ] || [ -e "$root/usr/sbin/$applet" ] || ln -s busybox "$root/usr/bin/$applet"
done
# shellcheck disable=SC2016
chroot "$bed" dpkg-query -W -f '${Package} ${Version}\n' criu crun runc podman conmon > "$root/etc/stack-versions"

install -m 755 "$bin"/{cryopod-runtime,cryopod,containerd-shim-cryopod-v2} "$root/usr/local/bin/"
install -m 755 "$bin/cryopod-cuda-agent" "$root/usr/local/lib/cryopod/"
install -m 644 "$bin/libcryopod_nvidia.so" "$root/usr/local/lib/cryopod/cryopod_nvidia.so"
install -m 644 "$bin/libcryopod_preload.so" "$root/usr/local/lib/cryopod/"
git -C "$workspace" describe --always --dirty > "$root/etc/cryopod-commit" 2> /dev/null || echo unknown > "$root/etc/cryopod-commit"
if [ -e "$bin/examples/digests" ]; then install -m 755 "$bin/examples/digests" "$root/usr/local/bin/"; fi # for the part `digests`
if [ -e "$bin/bench-pages" ]; then install -m 755 "$bin/bench-pages" "$root/usr/local/bin/"; fi # for the part `archive`
for file in cusim-client cusim-step cusim-probe cusim-server cusim-ctl libcuda_sim.so; do # the test driver, if built
    if [ -e "$bin/$file" ] && ! without sim; then install -m 755 "$bin/$file" "$root/opt/cusim/"; fi
done

mkdir -p "${out%/*}"
# The machine may have no zstd: it comes first, with the rest beside it.
tar -C "$root" --owner=0 --group=0 --numeric-owner -c . | compress > "$out.rest"
mv "$out.rest" "$root/rest.tar.zst"
(
    cd "$root"
    libraries=$(chroot "$bed" ldd /usr/bin/zstd | awk '/=> \//{sub("^/usr/", "/", $3); print "usr" $3}')
    # shellcheck disable=SC2086
    tar --owner=0 --group=0 --numeric-owner -c lib lib64 usr/lib64 usr/bin/zstd $libraries rest.tar.zst
) | gzip -1 > "$out.part"
mv "$out.part" "$out"
echo "packed $(du -h "$out" | cut -f1) into $out"
