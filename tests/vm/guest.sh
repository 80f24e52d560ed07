#!/bin/bash
# guest.sh CASE[:RUNTIME]...: init of the virtual machine. It runs the cases one after the other, each with $1 set to RUNTIME,
# or to each low-level runtime in turn if it has a line `# runtimes: NAME...`, each in a root, a mount and a PID namespace of
# its own. The devices and the cgroups are the machine's.
set -uo pipefail
case_limit=1200 # seconds; it took 300 on two processors that twenty others wanted, too

make_root() { # for a case: the disk and cryopod's binaries, below a tmpfs
    local dir
    mount -t tmpfs -o mode=755 case /mnt
    cd /mnt && mkdir lower upper work root
    mkdir -p lower/usr/local/{bin,lib/cryopod}
    cp /run/build/{cryopod,cryopod-runtime,containerd-shim-cryopod-v2} lower/usr/local/bin/ 2> /dev/null
    cp /run/build/cryopod-cuda-agent lower/usr/local/lib/cryopod/ 2> /dev/null
    cp /run/build/libcryopod_nvidia.so lower/usr/local/lib/cryopod/cryopod_nvidia.so 2> /dev/null
    mount -t overlay -o lowerdir=lower:/,upperdir=upper,workdir=work overlay root || return
    cd root && mkdir -p old var/lib/{containers,containerd,docker} opt/build
    for dir in run tmp var/lib/containers var/lib/containerd var/lib/docker; do
        mount -t tmpfs tmpfs "$dir" || return # overlay storage cannot lie on an overlay
    done
    chmod 1777 tmp && mkdir -p run/lock
    mount -t proc proc proc && mount --rbind /sys sys && mount --rbind /dev dev && mount --bind /src src || return
    mount --bind /run/build opt/build || return
    if [ -d /run/amd ]; then mkdir -p opt/amd && mount --bind /run/amd opt/amd || return; fi
    busybox pivot_root . old && umount -l old && rmdir old && cd /root && ip link set lo up
}

run_case() { # NAME [RUNTIME]
    local name=$1 file=/src/tests/vm/cases/$1.sh start=$SECONDS code=0
    shift
    echo "-- $name $*"
    if ! grep -q '^# needs: amd$' "$file"; then modprobe radeon; fi
    echo $$ > /sys/fs/cgroup/init/cgroup.procs
    # shellcheck disable=SC2016 # for the inner shell
    timeout -k 5 "$case_limit" unshare --mount --propagation private --pid --fork --kill-child --net --ipc --uts \
        bash -c '. /src/tests/vm/guest.sh; make_root && exec bash -euo pipefail -c ". /src/tests/testbed/lib.sh; . \"\$0\"" "$@"' \
        case "$file" "$@" 2>&1 || code=$?
    # Its processes are gone with its PID namespace.
    find /sys/fs/cgroup -mindepth 1 -depth -type d ! -path /sys/fs/cgroup/init -exec rmdir {} + 2> /dev/null
    case $code in
        0) echo "ok $name $* ($((SECONDS - start)) s)" && passed=$((passed + 1)) ;;
        124 | 137) echo "FAILED $name $*: not done within $case_limit s" && failed=$((failed + 1)) ;;
        *) echo "FAILED $name $*: exit code $code" && failed=$((failed + 1)) ;;
    esac
}

port() { # NAME: the device of this virtio port
    local entry
    for entry in /sys/class/virtio-ports/*; do
        if [ "$(cat "$entry/name")" = "$1" ]; then echo "/dev/${entry##*/}"; fi
    done
}

boot() {
    mount -t proc proc /proc
    mount -t sysfs sysfs /sys
    mount -t devtmpfs dev /dev # the initrd's is gone
    mkdir -p /dev/{pts,shm,mqueue}
    mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts /dev/pts
    mount -t tmpfs shm /dev/shm
    mount -t mqueue mqueue /dev/mqueue
    ln -sf pts/ptmx /dev/ptmx
    ln -sf /proc/self/fd /dev/fd
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
    mkdir /sys/fs/cgroup/init
    mount -t tmpfs run /run
    mkdir /run/build
    mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=512000,cache=loose build /run/build
    mkdir /run/amd
    mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=512000,cache=loose amd /run/amd 2> /dev/null || rmdir /run/amd
    hostname vm
    ip link set lo up
    # vgem first: it is to be renderD128. radeon comes before the first case that is not about AMD GPUs: its nodes stay when it
    # is unloaded, and to open one then is an oops (6.12).
    modprobe -a vgem amdgpu fuse tun
}

main() {
    local name runtime
    export HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 TERM=dumb
    cd /
    boot
    exec > "$(port out)" < /dev/null
    echo "vm: $(uname -r), up for $(cut -d. -f1 /proc/uptime) s"
    passed=0 failed=0
    for name in "$@"; do
        case $name in
            *:*) runtimes=("${name#*:}") name=${name%:*} ;;
            *) read -ra runtimes <<< "$(sed -n 's/^# runtimes: //p' "/src/tests/vm/cases/$name.sh")" ;;
        esac
        if [ ${#runtimes[@]} = 0 ]; then run_case "$name"; fi
        for runtime in "${runtimes[@]}"; do run_case "$name" "$runtime"; done
    done
    echo "$passed passed, $failed failed"
    echo $((failed > 0)) > "$(port code)"
    sleep 0.2
    echo o > /proc/sysrq-trigger
    sleep 10
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then main "$@"; fi
