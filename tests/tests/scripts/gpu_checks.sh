# gpu_checks.sh LOW: what is refused before a restore starts, on the simulated driver and on a KFD topology without a GPU:
# all that does not hold at once, with both sides and the remedy; the archive is as before. `cryopod check` says the same.
low=$1
mkimage
mkdir -p /run/cusim /run/standin /usr/lib64/criu
configure() { # LINE...
    low_level "$low"
    printf '[nvidia]\nlibcuda = ["/opt/cusim/libcuda.so.1"]\n' >> /etc/cryopod/config.toml
    [ $# = 0 ] || printf '%s\n' "$@" >> /etc/cryopod/config.toml
}
configure
sim=/run/cusim/server.sock
/opt/build/cusim-ctl --socket "$sim" install /opt/cusim > /dev/null
gpu0=GPU-c0da0000-5130-4d00-8000-000000000000
serve() { # DRIVER MODEL MIB COMPUTE MIG...: the machine's two GPUs, or as many as models follow
    [ -z "${server:-}" ] || { kill "$server" && wait "$server" || true; }
    rm -f "$sim"
    printf 'driver = "%s"\n' "$1" > /tmp/machine.toml
    shift
    while [ $# -ge 4 ]; do
        printf '[[gpu]]\nname = "%s"\nmemory_mib = %s\ncompute = %s\nmig = %s\n' "$1" "$2" "$3" "$4" >> /tmp/machine.toml
        shift 4
    done
    /opt/build/cusim-server --socket "$sim" --dev-root /dev --proc-root /run/simulated --config /tmp/machine.toml > /tmp/server.log 2>&1 &
    server=$!
    wait_for serves
}
h200=('NVIDIA H200' 512 '[9, 0]' false)
l4=('NVIDIA L4' 256 '[8, 9]' true)
serve 580.159.04 "${h200[@]}" "${h200[@]}"
mount --bind /run/simulated/driver /proc/driver

pod run -d --name job --network none --device /dev/nvidiactl --device /dev/nvidia-uvm --device /dev/nvidia0 --device /dev/nvidia1 \
    -v /run/cusim:/run/cusim -v /opt/cusim:/cusim:ro -e LD_LIBRARY_PATH=/cusim \
    -v /usr/lib/x86_64-linux-gnu:/lib/x86_64-linux-gnu:ro -v /usr/lib64:/lib64:ro \
    localhost/busybox /cusim/cusim-client --mib 100 --gpus 0 > /dev/null
ticked() { [ "$(printed "$1" | grep -c ok)" -ge "$2" ]; }
wait_for ticked job 3
pod container checkpoint --leave-running --export /tmp/job.tar --compress none job > /dev/null
pod container checkpoint --leave-running --export /tmp/job.tar.gz --compress gzip job > /dev/null
pod container checkpoint --leave-running --create-image localhost/saved job > /dev/null
podman save --format oci-dir -o /tmp/layout localhost/saved > /dev/null 2>&1
pod container checkpoint --export /tmp/job.tar.zst --compress zstd job > /dev/null
pod rm -f -t 0 job > /dev/null
mkdir /tmp/directory && tar --zstd -xf /tmp/job.tar.zst -C /tmp/directory
jq -e --arg gpu "$gpu0" '.gpu.gpus[0].properties.compute_capability == "9.0" and .gpu.gpus[0].properties.mig == false
    and (.gpu.processes[0].gpu_memory | length == 1 and .[0].gpu == $gpu and .[0].bytes >= 100 * 1048576)' \
    /tmp/directory/checkpoint/cryopod.json > /dev/null || { jq .gpu /tmp/directory/checkpoint/cryopod.json; exit 1; }

# NVIDIA's library makes the nodes of all GPUs where it may; the container may not open those that it was not given.
pod run -d --name made --cap-add MKNOD --network none --device /dev/nvidiactl --device /dev/nvidia-uvm --device /dev/nvidia0 \
    -v /run/cusim:/run/cusim -v /opt/cusim:/cusim:ro -e LD_LIBRARY_PATH=/cusim \
    -v /usr/lib/x86_64-linux-gnu:/lib/x86_64-linux-gnu:ro -v /usr/lib64:/lib64:ro \
    localhost/busybox /cusim/cusim-client --mib 16 --gpus 0 > /dev/null
wait_for ticked made 3 # until then it is not connected to the driver, and may not even be the client
podman exec made mknod /dev/nvidia1 c 1 11 # of those that stand for a GPU, one that its device cgroup does not let it open
check 'a container that has made a node is checkpointed' pod container checkpoint --keep made
record=$(podman inspect -f '{{.StaticDir}}' made)/checkpoint/cryopod.json
check 'the node is no GPU of it' jq -e '[.gpu.gpus[].id] == ["'$gpu0'"] and all(.gpu.nodes[]; .path != "/dev/nvidia1")' "$record"
check 'restored' pod container restore --keep made
podman rm -f -t 0 made > /dev/null

told() { # NAME WANT...: in /tmp/said
    local name=$1 want
    shift
    for want in "$@"; do grep -qF -- "$want" /tmp/said || { echo "$name: not told: $want"; cat /tmp/said; exit 1; }; done
}
quiet() { ! pgrep -x "$1" > /dev/null; }
refused() { # NAME ARCHIVE WANT...: the restore, and `cryopod check` with it; nothing remains, nothing has changed
    local name=$1 archive=$2 sum code=0
    shift 2
    sum=$(sha256sum < "$archive")
    if pod container restore --import "$archive" > /tmp/said 2>&1; then echo "$name: restored"; exit 1; fi
    told "$name" 'the restore was refused and the checkpoint is untouched' "$@"
    wait_for quiet 'cusim-client|criu' && [ -z "$(ls -A /run/cryopod)" ]
    podman ps -aq | xargs -r podman rm -f -t 0 > /dev/null
    cryopod check --json "$archive" > /tmp/check.json || code=$?
    [ "$code" = 1 ] && jq -r '.refusals[] | "\(.what); \(.remedy)"' /tmp/check.json > /tmp/said && told "$name, checked" "$@"
    [ "$(sha256sum < "$archive")" = "$sum" ] || { echo "$name: the archive has changed"; exit 1; }
    echo "ok: $name"
}
works() { # NAME ARCHIVE
    cryopod check "$2" > /tmp/said || { echo "$1: the check says no"; cat /tmp/said; exit 1; }
    told "$1" 'This checkpoint can be restored on this host.'
    pod container restore --import "$2" > /dev/null
    [ -n "$(podman ps -q)" ]
    podman ps -aq | xargs -r podman rm -f -t 0 > /dev/null
    echo "ok: $1"
}
how() { echo "(relaxed by \`$1 = false\` under [checks] in the configuration, or the annotation dev.cryopod.check.$1=off)"; }

for what in /tmp/job.tar /tmp/job.tar.gz /tmp/job.tar.zst /tmp/directory /tmp/directory/checkpoint /tmp/layout; do
    cryopod check --json "$what" > /tmp/check.json || { echo "$what:"; cat /tmp/check.json; exit 1; }
    jq -e --arg gpu "$gpu0" '.ok and .refusals == [] and .map[0] == {from: $gpu, to: $gpu, why: ""} and all(.checks[]; .verdict == "ok")
        and ([.checks[].name] | unique) == ["cpu", "nvidia-compute-capability", "nvidia-driver", "nvidia-driver-minimum", "nvidia-free-memory",
            "nvidia-gpu-count", "nvidia-host-memory", "nvidia-memory", "nvidia-mig", "nvidia-model"]' /tmp/check.json > /dev/null \
        || { echo "$what:"; cat /tmp/check.json; exit 1; }
done
echo 'ok: every form of archive is checked'
for what in /tmp/none /etc/passwd /usr/local/share/testbed/busybox.tar; do
    code=0 && cryopod check "$what" > /tmp/said 2>&1 || code=$?
    [ "$code" = 2 ] && grep -qF "$what" /tmp/said || { echo "$what: $code"; cat /tmp/said; exit 1; }
done
cryopod check --map 0=1,1=0 --json /tmp/job.tar | jq -e --arg gpu "$gpu0" '.ok and (.map[] | select(.from == $gpu) | .to) != $gpu' > /dev/null
echo 'ok: what is no checkpoint; another map'

serve 565.1.1 "${l4[@]}" "${l4[@]}"
sed 's/^MemAvailable:.*/MemAvailable:     102400 kB/' /proc/meminfo > /tmp/meminfo && mount --bind /tmp/meminfo /proc/meminfo
/opt/build/cusim-ctl --socket "$sim" reserve "$gpu0" $((200 << 20)) > /dev/null
refused 'another machine' /tmp/job.tar.zst "nvidia-driver: the checkpoint has 580.159.04, this host has 565.1.1; update this host's NVIDIA driver" \
    "nvidia-driver-minimum: the checkpoint has GPU state, which needs driver 570 or newer, this host has 565.1.1; update" \
    "nvidia-model of $gpu0: the checkpoint has NVIDIA H200, this host has NVIDIA L4; restore on a GPU of the same model" "$(how nvidia-model)" \
    "nvidia-compute-capability of $gpu0: the checkpoint has 9.0, this host has 8.9" "nvidia-memory of $gpu0: the checkpoint has 512 MiB, this host has 256 MiB" \
    "nvidia-mig of $gpu0: the checkpoint has MIG mode off, this host has MIG mode on" 'nvidia-smi -mig 0' \
    "nvidia-free-memory of $gpu0: the checkpoint has 108 MiB in use, this host has 56 MiB free" "$(how nvidia-free-memory)" \
    'nvidia-host-memory: the checkpoint has ' 'this host has 100 MiB available on the host; free memory on this host'
umount /proc/meminfo
serve 580.159.04 "${h200[@]}" "${h200[@]}"
sed 's/ sse4_2 / /' /proc/cpuinfo > /tmp/cpuinfo && mount --bind /tmp/cpuinfo /proc/cpuinfo
refused 'an older CPU' /tmp/job.tar 'cpu: the checkpoint has ' 'this host has none of sse4_2; restore on a CPU that has them' "$(how cpu)"
umount /proc/cpuinfo
serve 580.159.04 "${h200[@]}"
refused 'fewer GPUs' /tmp/job.tar 'nvidia-gpu-count: the checkpoint has 2, this host has 1; restore on a host with at least as many NVIDIA GPUs'
serve 580.95.05 "${h200[@]}" "${h200[@]}"
refused 'an older driver' /tmp/job.tar.gz 'nvidia-driver: the checkpoint has 580.159.04, this host has 580.95.05' "$(how nvidia-driver)"
cryopod check --off nvidia-driver /tmp/job.tar.gz > /tmp/said
told 'switched off by the command line' 'relaxed  nvidia-driver'
configure '[checks]' 'nvidia-driver = false'
works 'an older driver, relaxed' /tmp/job.tar.gz
configure

# AMD: what CRIU's plugin would compare.
mknod -m 666 /dev/kfd c 10 237
mkdir -p /dev/dri && mknod -m 666 /dev/dri/renderD128 c 226 128 && mknod -m 666 /dev/dri/renderD129 c 226 129
mount -t tmpfs class /sys/class
tree() { # GPUS KEY=VALUE...
    rm -rf /sys/class/kfd
    python3 /src/tests/tests/standin/kfd.py tree /sys/class/kfd/kfd/topology "$@"
}
tree 1
python3 /src/tests/tests/standin/kfd.py image /sys/class/kfd/kfd/topology /run/standin/kfd.img
cp /standin/amdgpu_plugin.so /usr/lib64/criu/
amd() { # ARCHIVE ARG...
    local archive=$1
    shift
    # The plugin that stands in has its files there. CRIU sees of the host what is the container's.
    pod run -d --name amd --network none --device /dev/kfd --device /dev/dri/renderD128 -v /run/standin:/standin "$@" localhost/busybox \
        sh -c 'exec 3<>/dev/kfd; i=0; while :; do echo $i; i=$((i + 1)); sleep 0.1; done' > /dev/null
    wait_for counted amd 2
    pod container checkpoint --export "$archive" amd > /dev/null
    pod rm -f -t 0 amd > /dev/null
}
amd /tmp/amd.tar
works 'AMD: the same GPU' /tmp/amd.tar
tree 1 fw_version=59 sdma_fw_version=17 caches_count=4 num_gws=63 vram_size=34351349760 capability=513
all=(KFD_FW_VER_CHECK KFD_SDMA_FW_VER_CHECK KFD_CACHES_COUNT_CHECK KFD_NUM_GWS_CHECK KFD_VRAM_SIZE_CHECK KFD_CAPABILITY_CHECK)
refused 'AMD: every switchable check' /tmp/amd.tar "${all[@]}"
tree 1 device_id=29711
refused 'AMD: another device' /tmp/amd.tar device_id 0x7408 0x740f
tree 1 fw_version=59
rm -f /run/standin/log
configure '[checks]' 'KFD_FW_VER_CHECK = false'
works 'AMD: relaxed by the configuration' /tmp/amd.tar
grep -qx 'amdgpu_plugin env KFD_FW_VER_CHECK=0' /run/standin/log && grep -qx 'amdgpu_plugin env KFD_NUMA_CHECK=1' /run/standin/log
configure
tree 1
amd /tmp/annotated.tar --annotation dev.cryopod.check.KFD_FW_VER_CHECK=off
tree 1 fw_version=59
rm -f /run/standin/log
works 'AMD: relaxed by an annotation' /tmp/annotated.tar
grep -qx 'amdgpu_plugin env KFD_FW_VER_CHECK=0' /run/standin/log

# A plugin whose search does not end: the restore does, and nothing of it is left.
tree 1
touch /run/standin/loop
configure '[limits]' 'restore_s = 20' 'abort_s = 2' # CRIU must have come to the plugin by then
sum=$(sha256sum < /tmp/amd.tar)
if pod container restore --import /tmp/amd.tar > /tmp/said 2>&1; then echo 'the plugin loops: restored'; exit 1; fi
told 'the plugin loops' 'it took longer than 20 s' 'amdgpu_plugin.so was at work, whose search for GPUs does not end' 'KFD_NUMA_CHECK=off' 'limits.restore_s'
podman ps -aq | xargs -r podman rm -f -t 0 > /dev/null 2>&1
wait_for quiet "criu|sleep|$low|cryopod-runtime" && [ -z "$(ls -A /run/cryopod)" ] && [ "$(sha256sum < /tmp/amd.tar)" = "$sum" ]
echo 'ok: the plugin loops'
rm /run/standin/loop
configure
works 'AMD: afterwards' /tmp/amd.tar
