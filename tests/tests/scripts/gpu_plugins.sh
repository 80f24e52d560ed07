# gpu_plugins.sh LOW: for a container with /dev/kfd CRIU loads exactly the amdgpu plugin, for one with /dev/nvidia0 exactly
# cryopod's, for one with neither none; and an amdgpu plugin that CRIU cannot load is refused before the freeze.
low=$1
mkimage
mkdir -p /run/standin /usr/lib64/criu /run/cusim /etc/cryopod
cp /standin/cuda_plugin.so /usr/lib64/criu/ # stands by, and is for nobody. (Debian's CRIU looks in /usr/lib/criu by itself.)
configure() { # LINE...: what is added to the configuration
    low_level "$low"
    printf '[nvidia]\nlibcuda = ["/opt/cusim/libcuda.so.1"]\n' >> /etc/cryopod/config.toml
    [ $# = 0 ] || printf '%s\n' "$@" >> /etc/cryopod/config.toml
}
configure
mknod -m 666 /dev/kfd c 10 237 # opens, and CRIU asks its plugins about it
mkdir -p /dev/dri && mknod -m 666 /dev/dri/renderD128 c 226 128
mount -t tmpfs class /sys/class
python3 /src/tests/tests/standin/kfd.py tree /sys/class/kfd/kfd/topology 1
python3 /src/tests/tests/standin/kfd.py image /sys/class/kfd/kfd/topology /run/standin/kfd.img
sim=/run/cusim/server.sock
/opt/build/cusim-ctl --socket "$sim" install /opt/cusim > /dev/null
/opt/build/cusim-server --socket "$sim" --dev-root /dev --proc-root /run/simulated --gpus 1 --memory-mib 256 > /tmp/server.log 2>&1 &
wait_for serves
mount --bind /run/simulated/driver /proc/driver

# What an operation's plugin directory holds while CRIU is at work.
printf '#!/bin/sh\nls -A /run/cryopod/*/plugins 2> /dev/null | grep "[.]so$" >> /tmp/in-directory\nexit 0\n' > /tmp/look.sh
chmod 755 /tmp/look.sh
echo 'action-script /tmp/look.sh' >> /etc/criu/default.conf
fresh() { rm -f /tmp/in-directory /run/standin/log && touch /tmp/in-directory /run/standin/log; }
is() { # NAME FILE WANT...: the lines of FILE, each once
    local name=$1 file=$2
    shift 2
    diff <([ $# = 0 ] || printf '%s\n' "$@" | sort -u) <(sort -u "$file") || { echo "$name: $file is otherwise"; exit 1; }
}
round() { # NAME ARG...: run, checkpoint, export, remove, restore
    local name=$1
    shift
    pod run -d --name c1 --network none "$@" > /dev/null
    wait_for counted c1 3
    [ -z "${uses:-}" ] || wait_for "$uses"
    pod container checkpoint --export /tmp/c1.tar c1 > /dev/null
    local before && before=$(count c1)
    pod rm -f -t 0 c1 > /dev/null
    pod container restore --import /tmp/c1.tar > /dev/null
    wait_for counted c1 $((before + 3))
    pod rm -f -t 0 c1 > /dev/null
    [ -z "$(ls -A /run/cryopod 2> /dev/null)" ]
    echo "ok: $name"
}
on_kfd=(--device /dev/kfd --device /dev/dri/renderD128)
uses_kfd=(localhost/busybox sh -c 'exec 3<>/dev/kfd; i=0; while :; do echo $i; i=$((i + 1)); sleep 0.1; done')

refused() { # NAME WANT...: the checkpoint of a running container with an open /dev/kfd; it goes on
    local name=$1 want now
    shift
    fresh
    if cryopod-runtime checkpoint --image-path /tmp/none "$id" > /tmp/said 2>&1; then echo "$name: succeeded"; exit 1; fi
    for want in 'the container goes on running: process' ' the AMD driver, and ' "$@"; do
        grep -qF -- "$want" /tmp/said || { echo "$name: not told: $want"; cat /tmp/said; exit 1; }
    done
    [ ! -s /tmp/in-directory ] && [ ! -s /run/standin/log ] && [ ! -e /tmp/none ] # CRIU was not started
    now=$(count c1) && wait_for counted c1 $((now + 2))
    [ -z "$(ls -A /run/cryopod 2> /dev/null)" ]
    echo "ok: $name"
}
pod run -d --name c1 --network none "${on_kfd[@]}" "${uses_kfd[@]}" > /dev/null
wait_for counted c1 3
id=$(pod inspect -f '{{.Id}}' c1)
refused 'absent' 'amdgpu_plugin.so, is in none of /usr/lib/criu, /usr/lib64/criu, /usr/libexec/criu' 'Debian and Ubuntu have no package of it: build it from CRIU'
place() { rm -f /usr/lib64/criu/amdgpu_plugin.so && cp "/standin/$1.so" /usr/lib64/criu/amdgpu_plugin.so; }
place newer-abi && refused 'built for a newer ABI' 'is built for plugin ABI 0x400, and CRIU 4.' 'takes up to 0x' 'install the plugin that belongs to the installed CRIU'
place more-hooks && refused 'built for a newer CRIU' 'is built for 99 hooks, and CRIU 4.' 'it was built for a newer CRIU'
place no-library && refused 'not loadable: a library' 'cannot be loaded: the library libnowhere.so is not on this host' 'libdrm'
place other-symbols && refused 'not loadable: a symbol' 'cannot be loaded: it wants criu_of_another_time, which this CRIU has not'
echo text > /usr/lib64/criu/amdgpu_plugin.so && refused 'not a library' '/usr/lib64/criu/amdgpu_plugin.so is not a 64-bit ELF file'
cp "$(readlink -f /usr/lib/*/libcriu.so.2)" /usr/lib64/criu/amdgpu_plugin.so && refused 'no plugin' 'has no CR_PLUGIN_DESC: it is no CRIU plugin'
configure '[amd]' 'plugin = "/opt/none.so"' && refused 'configured and absent' '/opt/none.so (amd.plugin in /etc/cryopod/config.toml) is not there'
configure
pod rm -f -t 0 c1 > /dev/null

place amdgpu_plugin
fresh
round 'AMD alone' "${on_kfd[@]}" "${uses_kfd[@]}"
is 'AMD alone' /tmp/in-directory amdgpu_plugin.so
is 'AMD alone' /run/standin/log 'amdgpu_plugin init dump' 'amdgpu_plugin hook DUMP_EXT_FILE /dev/kfd' 'amdgpu_plugin init restore' \
    'amdgpu_plugin hook RESUME_DEVICES_LATE' 'amdgpu_plugin exit done' 'amdgpu_plugin env KFD_'{FW_VER,SDMA_FW_VER,CACHES_COUNT,NUM_GWS,VRAM_SIZE,NUMA,CAPABILITY}_CHECK=1
cp /tmp/c1.tar /tmp/amd.tar

fresh
on_nvidia=(--device /dev/nvidiactl --device /dev/nvidia-uvm --device /dev/nvidia0 -v /run/cusim:/run/cusim -v /opt/cusim:/cusim:ro
    -e LD_LIBRARY_PATH=/cusim -v /usr/lib/x86_64-linux-gnu:/lib/x86_64-linux-gnu:ro -v /usr/lib64:/lib64:ro)
in_use() { /opt/build/cusim-ctl --socket "$sim" status | jq -e '[.gpus[].pids[]] | add >= 16777216' > /dev/null; }
uses=in_use round 'NVIDIA alone' "${on_nvidia[@]}" localhost/busybox sh -c '/cusim/cusim-client --mib 16 > /dev/null & i=0; while :; do echo $i; i=$((i + 1)); sleep 0.1; done'
is 'NVIDIA alone' /tmp/in-directory cryopod_nvidia.so
is 'NVIDIA alone' /run/standin/log

fresh
round 'nodes that nobody uses' "${on_kfd[@]}" "${on_nvidia[@]}" localhost/busybox "${counter[@]}"
is 'nodes that nobody uses' /tmp/in-directory
is 'nodes that nobody uses' /run/standin/log

fresh
round 'neither' localhost/busybox "${counter[@]}"
is 'neither' /tmp/in-directory
is 'neither' /run/standin/log

# The same refusals at a restore: nothing is started, the archive stays.
sum=$(sha256sum < /tmp/amd.tar)
for case in 'newer-abi:plugin ABI 0x400' 'no-library:libnowhere.so is not on this host'; do
    place "${case%%:*}"
    fresh
    if pod container restore --import /tmp/amd.tar > /tmp/said 2>&1; then echo "restored with ${case%%:*}"; exit 1; fi
    for want in 'the checkpoint is untouched: the checkpoint holds the state of AMD GPUs, and the CRIU plugin' "${case#*:}"; do
        grep -qF -- "$want" /tmp/said || { echo "${case%%:*}: not told: $want"; cat /tmp/said; exit 1; }
    done
    is "${case%%:*}" /run/standin/log
    [ "$(sha256sum < /tmp/amd.tar)" = "$sum" ] && [ -z "$(ls -A /run/cryopod)" ]
    pod rm -f -t 0 c1 > /dev/null 2>&1 || true
    echo "ok: at a restore: ${case%%:*}"
done
