#!/bin/bash
# picture.sh: makes docs/picture.svg, the README's picture: what a terminal shows when a container with two GPUs is
# checkpointed, removed and restored. Simulated driver. `make picture` runs it in the test bed and draws what it prints.
set -euo pipefail
# shellcheck source=tests/testbed/lib.sh
. /src/tests/testbed/lib.sh
sim=/run/cusim/server.sock
{
    mkimage
    low_level crun
    printf '[nvidia]\nlibcuda = ["/opt/cusim/libcuda.so.1"]\n' >> /etc/cryopod/config.toml
    sed -i 's|^\[engine\]|[engine]\nruntime = "cryopod-runtime"|' /etc/containers/containers.conf
    mkdir -p /run/cusim
    /opt/build/cusim-ctl --socket "$sim" install /opt/cusim
    /opt/build/cusim-server --socket "$sim" --dev-root /dev --gpus 2 --memory-mib 4096 > /tmp/server.log 2>&1 &
    wait_for test -S "$sim"
} > /dev/null
# What the user's own image and nvidia-container-runtime would bring.
podman() {
    if [ "$1" = run ]; then
        shift
        set -- run --network none --device /dev/nvidiactl --device /dev/nvidia-uvm -v /run/cusim:/run/cusim \
            -v /opt/cusim:/cusim:ro -e LD_LIBRARY_PATH=/cusim -v /usr/lib/x86_64-linux-gnu:/lib/x86_64-linux-gnu:ro \
            -v /usr/lib64:/lib64:ro "${@:1:$#-1}" localhost/busybox /cusim/cusim-client --mib 500 --procs 2 --gpus 0,1
    fi
    command podman "$@"
}
show() { # COMMAND...
    printf '$ %s\n' "$*"
    "$@" 2>&1 | cut -c1-100
}
gpus() { /opt/build/cusim-ctl --socket "$sim" status | jq -r '.gpus | to_entries[] | "  GPU \(.key): \([.value.pids[]] | add // 0 | . / 1048576 | floor) MiB in use"'; }
sums() { command podman logs job 2>&1 | awk '/ ok / {print "  process " $5 ": step " $1 ", sum of its GPU memory " $2}' | tail -n 2 | sort; }
ticked() { [ "$(command podman logs job 2>&1 | grep -c ' ok ')" -ge "$1" ]; }

show podman run -d --name job --device /dev/nvidia0 --device /dev/nvidia1 train
wait_for ticked 40
show gpus
show podman container checkpoint --export job.tar.zst job
show sums
show podman rm job
show gpus
show podman container restore --import job.tar.zst
wait_for ticked 60
show gpus
show sums
