# mounts.sh LOW: containers whose mounts were made by a hook that does what nvidia-container-cli does. Without cryopod their
# checkpoint fails; with it they go through checkpoint, removal and restore, also after the driver has moved.
low=$1
mkimage
low_level "$low"
printf '[hooks]\ndrop = ["nvidia-container-runtime-hook", "once.sh"]\n[mounts]\nallow = ["/srv/driver"]\n' >> /etc/cryopod/config.toml
fake_gpu_nodes
# (/ is shared in the bed: binds of the host are slaves in a container)

driver() { # VERSION: a driver of the host, with its /proc directory
    mkdir -p "/srv/driver/$1/lib" "/srv/driver/$1/firmware"
    echo "cuda $1" > "/srv/driver/$1/lib/libcuda.so.$1"
    echo "ml $1" > "/srv/driver/$1/lib/libnvidia-ml.so.$1"
    echo "gsp $1" > "/srv/driver/$1/firmware/gsp_tu10x.bin"
    mkdir -p "/srv/driver/$1/share" && echo "share $1" > "/srv/driver/$1/share/profiles"
}
driver 560.35.03
mount -t tmpfs tmpfs /proc/driver # no driver is loaded here: the kernel's directory is made up
mkdir -p /proc/driver/nvidia/gpus/0000:65:00.0
echo 'NVRM version: NVIDIA UNIX x86_64 Kernel Module  560.35.03  Release Build' > /proc/driver/nvidia/version
echo 'Model: test' > /proc/driver/nvidia/gpus/0000:65:00.0/information

# The hook. (/proc/driver of a container is not the host's here, so the tmpfs goes over that and not over the directory in it.)
mkdir -p /usr/local/bin /etc/containers/oci/hooks.d
cat > /usr/local/bin/nvidia-container-runtime-hook <<'HOOK'
#!/bin/bash
set -eu
state=$(cat)
echo run >> /tmp/hook-runs
pid=$(jq .pid <<< "$state")
bundle=$(jq -r .bundle <<< "$state")
root=$(jq -r .root.path "$bundle/config.json")
cd "$bundle"
root=$(realpath "$root")
nsenter -t "$pid" -m bash -eu -c '
    root=$1 v=560.35.03
    bind() {
        if [ -d "$1" ]; then mkdir -p "$2"; else mkdir -p "${2%/*}" && touch "$2"; fi
        mount --bind "$1" "$2"
        mount -o remount,bind,ro,nosuid,nodev "$2"
    }
    for name in libcuda libnvidia-ml; do
        bind "/srv/driver/$v/lib/$name.so.$v" "$root/usr/lib/x86_64-linux-gnu/$name.so.$v"
        ln -sfn "$name.so.$v" "$root/usr/lib/x86_64-linux-gnu/$name.so.1"
    done
    bind "/srv/driver/$v/share" "$root/usr/share/nvidia"
    bind "/srv/driver/$v/firmware/gsp_tu10x.bin" "$root/lib/firmware/nvidia/$v/gsp_tu10x.bin"
    mount -t tmpfs -o mode=0555,nosuid,nodev,noexec tmpfs "$root/proc/driver"
    mkdir -p "$root/proc/driver/nvidia/gpus/0000:65:00.0"
    echo "ModifyDeviceFiles: 0" > "$root/proc/driver/nvidia/params"
    cat /proc/driver/nvidia/version > "$root/proc/driver/nvidia/version"
    bind /proc/driver/nvidia/gpus/0000:65:00.0 "$root/proc/driver/nvidia/gpus/0000:65:00.0"
    mkdir -p "$root/etc/nvidia/profiles.d"
    mount -t tmpfs -o nosuid,nodev,noexec tmpfs "$root/etc/nvidia/profiles.d"
    echo profile > "$root/etc/nvidia/profiles.d/10-container.conf"
' - "$root"
HOOK
chmod 755 /usr/local/bin/nvidia-container-runtime-hook
cat > /etc/containers/oci/hooks.d/nvidia.json <<'JSON'
{"version": "1.0.0", "hook": {"path": "/usr/local/bin/nvidia-container-runtime-hook"}, "when": {"annotations": {"^gpu$": "yes"}}, "stages": ["createRuntime"]}
JSON
cat > /etc/containers/oci/hooks.d/once.json <<'JSON'
{"version": "1.0.0", "hook": {"path": "/srv/once.sh"}, "when": {"annotations": {"^once$": "yes"}}, "stages": ["createRuntime"]}
JSON
printf '#!/bin/sh\nmkdir /tmp/once-$(cat /tmp/once-of)\n' > /srv/once.sh
chmod 755 /srv/once.sh

start() { # ARG...
    pod --hooks-dir /etc/containers/oci/hooks.d run -d --name c1 --network none --device /dev/nvidia0 "$@" localhost/busybox "${counter[@]}" > /dev/null
    wait_for counted c1 3
}
inside() { pod exec c1 sh -c 'cd /usr/lib/x86_64-linux-gnu; cat libcuda.so.1 libcuda.so.560.35.03 libnvidia-ml.so.1 /usr/share/nvidia/profiles /lib/firmware/nvidia/*/gsp_tu10x.bin /proc/driver/nvidia/params /proc/driver/nvidia/gpus/*/information /etc/nvidia/profiles.d/*'; }
wanted() { printf '%s\n' "cuda $1" "cuda $1" "ml $1" "share $1" "gsp $1" 'ModifyDeviceFiles: 0' 'Model: test' profile; }
goes_on() { # NAME
    local now && now=$(count c1)
    wait_for counted c1 $((now + 3)) || { echo "$1: stands still"; exit 1; }
    echo "ok: $1"
}
restore() { pod --hooks-dir /etc/containers/oci/hooks.d container restore --import "$1"; }

# Stock: CRIU cannot dump it, and says which mount.
RUNTIME=$low
start --annotation gpu=yes
if pod container checkpoint --export /tmp/stock.tar c1 > /tmp/said 2>&1; then echo 'stock: succeeded'; exit 1; fi
log=$(pod inspect -f '{{.StaticDir}}' c1)/dump.log
grep -h -E "has unreachable sharing|doesn't have a proper root mount" "$log" > /tmp/stock || { cat /tmp/said "$log"; exit 1; }
echo "ok: stock $low: $(grep -o -E 'mnt: .*' /tmp/stock | head -n 1)"
pod rm -f -t 0 c1 > /dev/null
unset RUNTIME

start --annotation gpu=yes
[ "$(inside)" = "$(wanted 560.35.03)" ] || { inside; exit 1; }
pod container checkpoint --export /tmp/c1.tar c1 > /dev/null
pod rm -f -t 0 c1 > /dev/null
tar -xOf /tmp/c1.tar checkpoint/cryopod.json > /tmp/metadata.json 2> /dev/null || tar --zstd -xOf /tmp/c1.tar checkpoint/cryopod.json > /tmp/metadata.json
jq -e '[.mounts.foreign[] | .path] | length == 5 and index("/usr/lib/x86_64-linux-gnu/libcuda.so.560.35.03") != null' /tmp/metadata.json > /dev/null || { cat /tmp/metadata.json; exit 1; }
jq -e '.mounts.own == ["/proc/driver", "/etc/nvidia/profiles.d"] and (.mounts.foreign[] | select(.path == "/usr/lib/x86_64-linux-gnu/libcuda.so.560.35.03") | .kind == "file" and .host_path == "/srv/driver/560.35.03/lib/libcuda.so.560.35.03" and (.sha256 | length == 64) and .in_use == false)' /tmp/metadata.json > /dev/null || { cat /tmp/metadata.json; exit 1; }
runs=$(wc -l < /tmp/hook-runs)
restore /tmp/c1.tar > /dev/null
goes_on 'restored on the same driver'
[ "$(inside)" = "$(wanted 560.35.03)" ] || { inside; exit 1; }
[ "$(wc -l < /tmp/hook-runs)" = "$runs" ] || { echo 'the hook ran again'; exit 1; }

# Once more, from the restored container, and onto another driver version.
pod container checkpoint --export /tmp/c2.tar c1 > /dev/null
pod rm -f -t 0 c1 > /dev/null
driver 570.10.01
rm -rf /srv/driver/560.35.03
sed -i 's/560\.35\.03/570.10.01/' /proc/driver/nvidia/version
restore /tmp/c2.tar > /dev/null
goes_on 'restored again, on another driver version'
[ "$(inside)" = "$(wanted 570.10.01)" ] || { inside; exit 1; }
pod rm -f -t 0 c1 > /dev/null

# What is not there, and what no checkpoint may mount by itself: refused by name, and nothing is left.
refused() { # NAME WANT
    if restore /tmp/c2.tar > /tmp/said 2>&1; then echo "$1: restored"; exit 1; fi
    grep -qF -- "$2" /tmp/said || { echo "$1: said"; cat /tmp/said; exit 1; }
    pod rm -f -t 0 c1 > /dev/null 2>&1 || true
    [ -z "$(ls -A /run/cryopod)" ]
    echo "ok: $1"
}
mv /srv/driver/570.10.01/lib/libcuda.so.570.10.01 /tmp/
refused 'a library is missing' 'the mount /usr/lib/x86_64-linux-gnu/libcuda.so.560.35.03 cannot be provided: this host has no /srv/driver/570.10.01/lib/libcuda.so.570.10.01'
mv /tmp/libcuda.so.570.10.01 /srv/driver/570.10.01/lib/
sed -i '/^allow/d' /etc/cryopod/config.toml
refused 'not a place of the driver' 'none of the driver'"'"'s places; if the checkpoint is trusted'

# A hook that fails when it runs a second time: runc runs it again at a restore, crun runs none.
echo stock > /tmp/once-of
RUNTIME=$low
start --annotation once=yes
pod container checkpoint --export /tmp/c3.tar c1 > /dev/null
pod rm -f -t 0 c1 > /dev/null
if restore /tmp/c3.tar > /tmp/said 2>&1; then
    [ "$low" = crun ] || { echo 'stock runc: restored'; exit 1; }
else
    [ "$low" = runc ] && grep -q hook /tmp/said || { cat /tmp/said; exit 1; }
fi
echo "ok: stock $low and the hook: $(tail -n 1 /tmp/said | head -c 200)"
pod rm -f -t 0 c1 > /dev/null 2>&1 || true
unset RUNTIME
echo cryopod > /tmp/once-of
start --annotation once=yes
pod container checkpoint --export /tmp/c3.tar c1 > /dev/null
pod rm -f -t 0 c1 > /dev/null
restore /tmp/c3.tar > /dev/null
goes_on 'a hook that cannot run twice'
