# lib.sh: for cases of the virtual machine with `# needs: amd`: AMD GPUs that answer and do not exist.
# shellcheck shell=bash

scratch=${scratch:-/tmp}

# machine NAME [PARAMETER=VALUE...]: the machine has the GPUs of tests/amd/machines/NAME.topology or of what `like` made, and
# no others, from renderD128 on. Parameters are the module's (tests/amd/kfd/main.c).
machine() {
    local name=$1 file=/src/tests/amd/machines/$1.topology && shift
    if [ -e "/tmp/machines/$name.topology" ]; then file=/tmp/machines/$name.topology; fi
    within 20 unloaded || { lsmod | grep -E 'mock_kfd|amdgpu|vgem'; exit 1; }
    modprobe drm_shmem_helper
    insmod /opt/amd/mock_kfd.ko topology="$file" "$@"
    # Without udev the nodes of /dev are devtmpfs's.
    [ -c /dev/kfd ] && [ -c /dev/dri/renderD128 ] && ! [ -d /sys/module/radeon ]
}

# A process that has just ended may still have a node open.
unloaded() {
    local module
    for module in mock_kfd amdgpu vgem; do
        if [ -d "/sys/module/$module" ]; then rmmod "$module" 2> /dev/null || return 1; fi
    done
}

# like NAME FROM SED-COMMAND...: the description of another machine, from that of FROM.
like() {
    local name=$1 from=/src/tests/amd/machines/$2.topology command edits=() && shift 2
    for command in "$@"; do edits+=(-e "$command"); done
    mkdir -p /tmp/machines
    sed "${edits[@]}" "$from" > "/tmp/machines/$name.topology"
    if cmp -s "$from" "/tmp/machines/$name.topology"; then echo "$name is no other machine" && exit 1; fi
}

# start LOW MACHINE: the beginning of a case: cryopod over LOW, a machine, CRIU's plugin and an image.
start() {
    low_level "$1"
    # As `cryopod setup podman` does: else podman shows the first line of all that says "No such file", and CRIU's helper for
    # cgroups says so when CRIU gives up.
    mkdir -p /etc/containers/containers.conf.d
    printf '[engine]\nruntime_supports_json = ["crun", "runc", "cryopod-runtime"]\n' > /etc/containers/containers.conf.d/json.conf
    trap 'pod rm -f -t 0 -a > /dev/null; no_machine' EXIT
    machine "$2"
    plugin "$(criu --version | sed -n 's/^Version: //p')"
    amd_image
}

# no_machine: what a case leaves must go before the next one starts.
no_machine() {
    within 20 unloaded
    modprobe -a vgem amdgpu
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

# gpus_of NAME [MINOR...]: the nodes of GPUs in the container's /dev and what comes of opening each, and which of these render
# minors its device rules allow.
gpus_of() {
    local name=$1 && shift
    # shellcheck disable=SC2016 # for the container's shell
    pod exec --privileged "$name" sh -c 'opens() { if (: <> $1) 2> /tmp/said; then echo opens; else sed "s/.*: //" /tmp/said; fi; }
        for node in /dev/kfd /dev/dri/*; do echo "$node $(stat -c %t:%T $node) $(opens $node)"; done
        for minor in "$@"; do
            mknod /tmp/node c 226 $minor && echo "226:$minor $(opens /tmp/node)" && rm /tmp/node
        done' sh "$@"
}

# saved_or_not NAME ARCHIVE [OPTION...]: it is checkpointed into ARCHIVE, if that can be; what podman said is in $scratch/said.
saved_or_not() {
    local name=$1 archive=$2 && shift 2
    pod container checkpoint "$@" --export "$archive" "$name" > "$scratch/said" 2>&1
}

# saved NAME ARCHIVE [OPTION...]: the container is checkpointed into ARCHIVE and removed; $before is its last round.
saved() {
    saved_or_not "$@" || { cat "$scratch/said" && tail -n 40 /var/lib/containers/storage/overlay-containers/*/userdata/dump.log && exit 1; }
    before=$(count "$1")
    pod rm -f -t 0 "$1" > /dev/null
}

# stays NAME: the container whose checkpoint has failed goes on, its queues too.
stays() {
    local round
    round=$(count "$1")
    wait_for rounds "$1" $((round + 5))
}

# back NAME ARCHIVE [OPTION...]: it is restored from ARCHIVE and goes on from round $before, without a gap.
back() {
    local name=$1 archive=$2 && shift 2
    pod container restore "$@" --import "$archive" > "$scratch/said" 2>&1 || { cat "$scratch/said" && exit 1; }
    wait_for rounds "$name" $((before + 5))
    printed "$name" > "$scratch/numbers"
    seq 0 "$(tail -n 1 "$scratch/numbers")" | cmp - "$scratch/numbers"
}

# not_back ARCHIVE PATTERN: it is not restored, for a reason like this, and the archive is as it was.
not_back() {
    local sum
    sum=$(sha256sum < "$1")
    if pod container restore --import "$1" > /tmp/said 2>&1; then echo "it was restored, in spite of $2" && exit 1; fi
    says /tmp/said "$2" || exit 1
    [ "$(sha256sum < "$1")" = "$sum" ] || { echo "the archive is another" && exit 1; }
    # Nothing of it is left.
    podman rm -f -t 0 -a > /dev/null
}

# predicts ARCHIVE CODE: `cryopod check` says whether it would be restored here: 0 yes, 1 no.
predicts() {
    local code=0
    cryopod check "$1" > /tmp/predicted 2>&1 || code=$?
    [ "$code" = "$2" ] || { echo "cryopod check: $code, not $2" && cat /tmp/predicted && exit 1; }
}

# setting TABLE LINE...: more lines of the configuration, besides those of low_level.
setting() {
    local table=$1 && shift
    printf '[%s]\n' "$table" >> /etc/cryopod/config.toml
    printf '%s\n' "$@" >> /etc/cryopod/config.toml
}
