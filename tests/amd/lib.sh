# lib.sh: for cases of the virtual machine with `# needs: amd`: AMD GPUs that answer and do not exist.
# shellcheck shell=bash

# machine NAME [PARAMETER=VALUE...]: the machine has the GPUs of tests/amd/machines/NAME.topology, and no others, from
# renderD128 on. Parameters are the module's (tests/amd/kfd/main.c).
machine() {
    local name=$1 && shift
    rmmod mock_kfd 2> /dev/null || true
    rmmod amdgpu radeon vgem 2> /dev/null || true
    modprobe drm_shmem_helper
    insmod /opt/amd/mock_kfd.ko topology="${MACHINES:-/src/tests/amd/machines}/$name.topology" "$@"
    # Without udev the nodes of /dev are devtmpfs's.
    [ -c /dev/kfd ] && [ -c /dev/dri/renderD128 ]
}

# no_machine: what a case leaves must go before the next one starts.
no_machine() {
    rmmod mock_kfd
    modprobe -a vgem radeon amdgpu
}

# plugin VERSION: CRIU's amdgpu plugin of that version, and what it needs, as a distribution would have them.
plugin() {
    local lib=/usr/lib/x86_64-linux-gnu file
    mkdir -p /usr/lib/criu
    cp "/opt/amd/plugin-$1/amdgpu_plugin.so" /usr/lib/criu/
    cp /opt/amd/libdrm_amdgpu.so.1 $lib/
    for file in libdrm.so.2 libprotobuf-c.so.1; do
        if [ ! -e "$lib/$file" ]; then cp "/opt/amd/$file" $lib/; fi
    done
}

# amd_image: the image localhost/kfd: busybox, and the client of the KFD.
amd_image() {
    cp /usr/local/share/testbed/busybox.tar /tmp/kfd.tar
    tar -C /opt/amd --transform 's|^|./bin/|' -rf /tmp/kfd.tar kfd-client
    podman import -q /tmp/kfd.tar localhost/kfd > /dev/null
    rm /tmp/kfd.tar
}

# gpu_run NAME MINORS [PODMAN-OPTION...] -- [CLIENT-OPTION...]: a container of the client with these render nodes.
gpu_run() {
    local name=$1 minors=$2 minor options=() && shift 2
    for minor in $minors; do options+=(--device "/dev/dri/renderD$minor"); done
    while [ "$1" != -- ]; do options+=("$1") && shift; done
    shift
    pod run -d --name "$name" --network none --device /dev/kfd "${options[@]}" localhost/kfd kfd-client "$@" > /dev/null
}

# rounds NAME N: the client in container NAME has come to round N; ends the case if something was wrong.
rounds() {
    local wrong
    if wrong=$(printed "$1" | grep WRONG); then echo "$1: $wrong" && exit 1; fi
    counted "$1" "$2" 2> /dev/null
}

# gpus_of NAME: what the container's processes can open of /dev/dri and /dev/kfd, and which nodes are there.
gpus_of() {
    # shellcheck disable=SC2016 # for the container's shell
    pod exec "$1" sh -c 'for node in /dev/kfd /dev/dri/*; do
        echo "$node $(stat -c %t:%T $node) $( (: <> $node) 2>&1 | sed "s/.*: //")"; done'
}
