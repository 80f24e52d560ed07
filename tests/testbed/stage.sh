#!/bin/bash
# stage.sh CMD [ARG]...: the inner half of `testbed enter`, which see. It runs three times: in the
# machine's namespaces to enter the run's cgroups, in the new namespaces to make the mounts, and in the
# bed as init of the PID namespace, with CMD as its child.
set -euo pipefail

enter_cgroups() {
    local dir
    while read -r dir; do
        echo $$ > "$dir/cgroup.procs"
    done <<< "$TESTBED_CGROUPS"
    local cgroup=--cgroup
    case $TESTBED_CGROUP in host*) cgroup= ;; esac
    TESTBED_STAGE=mounts exec unshare --mount --propagation private --pid --fork --kill-child \
        --net --ipc --uts $cgroup bash "$0" "$@"
}

show() { # SRC DST: a bind mount of a file or directory, its mount point made if need be
    [ -e "$1" ] || { echo "testbed: --bind: no such file or directory: $1" >&2 && exit 1; }
    if [ -d "$1" ]; then mkdir -p "$2"; else mkdir -p "${2%/*}" && touch "$2"; fi
    mount --rbind "$1" "$2"
}

show_binaries() { # file by file: a build that replaces one does not change it under a running test
    local file
    show "$TESTBED_BIN" opt/build
    mount -o remount,bind,ro opt/build
    for file in cryopod cryopod-runtime containerd-shim-cryopod-v2; do
        if [ -e "opt/build/$file" ]; then show "opt/build/$file" "usr/local/bin/$file"; fi
    done
    if [ -e opt/build/cryopod-cuda-agent ]; then
        show opt/build/cryopod-cuda-agent usr/local/lib/cryopod/cryopod-cuda-agent
    fi
    if [ -e opt/build/libcryopod_preload.so ]; then
        show opt/build/libcryopod_preload.so usr/local/lib/cryopod/libcryopod_preload.so
    fi
    if [ -e opt/build/libcryopod_nvidia.so ]; then
        show opt/build/libcryopod_nvidia.so usr/local/lib/cryopod/cryopod_nvidia.so
    fi
}

mount_devices() {
    mount -t tmpfs -o mode=755,size=1m dev dev
    mkdir dev/{pts,shm,mqueue,net}
    mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts dev/pts
    mount -t tmpfs shm dev/shm
    mount -t mqueue mqueue dev/mqueue
    cp -a /dev/{null,zero,full,random,urandom,tty} dev/
    mknod -m 666 dev/fuse c 10 229
    mknod -m 666 dev/net/tun c 10 200
    awk '$2 == "userfaultfd" {print $1}' /proc/misc | xargs -r mknod -m 600 dev/userfaultfd c 10
    ln -s pts/ptmx dev/ptmx
    ln -s /proc/self/fd dev/fd
    ln -s /proc/self/fd/0 dev/stdin
    ln -s /proc/self/fd/1 dev/stdout
    ln -s /proc/self/fd/2 dev/stderr
}

show_drivers() { # /proc/devices with the drivers of the nodes that tests make: any of these majors is a GPU's here
    local major
    {
        sed '/^$/,$d' proc/devices
        for major in 1 5 10 511; do printf '%3d nvidia\n%3d nvidia-uvm\n' "$major" "$major"; done
        for major in 1 5 10 510; do printf '%3d kfd\n%3d drm\n' "$major" "$major"; done
        printf '\n'
        sed '1,/^$/d' proc/devices
    } > run/proc-devices
    mount --bind run/proc-devices proc/devices
    # The kernel lets a user namespace mount /proc only where one without mounts over it can be seen.
    mkdir run/proc-whole
    mount -t proc proc run/proc-whole
}

mount_cgroups() { # mounted inside the cgroup namespace, each hierarchy shows the run's directory as its root
    if [ "$TESTBED_CGROUP" = v2 ]; then
        mount -t cgroup2 cgroup2 sys/fs/cgroup
        leave_cgroup2_root sys/fs/cgroup
        return
    fi
    case $TESTBED_CGROUP in host*) show_cgroups && return ;; esac
    mount -t tmpfs -o mode=755 cgroup sys/fs/cgroup
    local at type options option kept
    while read -r at type options; do
        kept=
        for option in ${options//,/ }; do
            case $option in
                rw | ro | nosuid | nodev | noexec | *relatime | noatime | seclabel | xattr | release_agent=* | clone_children | nsdelegate | memory_*) ;;
                name=*) kept+=",none,$option" ;;
                *) kept+=",$option" ;;
            esac
        done
        mkdir -p ".$at"
        mount -t "$type" ${kept:+-o "${kept#,}"} cgroup ".$at"
        if [ "$type" = cgroup2 ]; then leave_cgroup2_root ".$at"; fi
    done <<< "$TESTBED_HIERARCHIES"
    local link
    for link in /sys/fs/cgroup/*; do # cpu -> cpu,cpuacct and the like
        if [ -L "$link" ]; then cp -P "$link" "sys/fs/cgroup/"; fi
    done
}

show_cgroups() { # the machine's own, in which a run can change its own directories alone
    local at type
    if [ "$TESTBED_CGROUP" = host ]; then mount --bind /sys/fs/cgroup sys/fs/cgroup; fi
    while read -r at type _; do
        case $TESTBED_CGROUP-$type in
            host-cgroup*) show_hierarchy "$at" ".$at" ;;
            host-v2-cgroup2) show_hierarchy "$at" sys/fs/cgroup ;;
        esac
    done <<< "$TESTBED_HIERARCHIES"
}

show_hierarchy() { # SRC DST
    mount --bind "$1" "$2"
    case $TESTBED_CGROUP in # crun starts no container where v2 has a controller beside v1, else hands it on from the root
        host) if [ -e "$2/cgroup.controllers" ]; then mount --bind /dev/null "$2/cgroup.controllers"; fi ;;
        host-v2) mount --bind /dev/null "$2/cgroup.subtree_control" ;;
    esac
    mount --bind "$1$TESTBED_CGROUP_PARENT" "$2$TESTBED_CGROUP_PARENT"
    mount -o remount,bind,ro "$2"
}

leave_cgroup2_root() { # a cgroup with processes of its own could give its children no controllers
    mkdir "$1/init"
    echo $$ > "$1/init/cgroup.procs"
}

make_mounts() {
    local workspace=$TESTBED_SRC bind
    mount -t tmpfs -o mode=755 testbed "$TESTBED_MNT"
    cd "$TESTBED_MNT"
    mkdir lower upper work root
    mount --bind "$TESTBED_ROOT" lower
    mount -t overlay -o lowerdir=lower,upperdir=upper,workdir=work overlay root
    cd root
    mkdir -p old var/lib/{containers,containerd,docker}
    local dir
    for dir in run tmp var/lib/containers var/lib/containerd var/lib/docker; do
        mount -t tmpfs tmpfs "$dir" # overlay storage cannot lie on an overlay
    done
    chmod 1777 tmp
    mkdir -p run/lock
    mount -t proc proc proc
    show_drivers
    mount -t sysfs sysfs sys
    mount_devices
    mount_cgroups

    mount --bind "$workspace" src
    mount -o remount,bind,ro src
    if [ -d "$TESTBED_BIN" ]; then show_binaries; fi
    while read -r bind; do
        if [ -n "$bind" ]; then show "${bind%%:*}" ".${bind#*:}"; fi
    done <<< "$TESTBED_BINDS"

    hostname testbed
    usr/bin/busybox pivot_root . old # newer util-linux has none
    umount -l old
    rmdir old
    mount --make-rshared / # as systemd does: what a runtime unmounts in a bind mount goes on the host, too
    cd /root
    ip link set lo up
    exec env -i HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        LANG=C.UTF-8 TERM="${TERM:-dumb}" PODMAN_IGNORE_CGROUPSV1_WARNING=1 TESTBED_STAGE=init \
        TESTBED_CGROUP="$TESTBED_CGROUP" TESTBED_CGROUP_PARENT="$TESTBED_CGROUP_PARENT" TESTBED_SUITE="$TESTBED_SUITE" bash /src/tests/testbed/stage.sh "$@"
}

# host_state: what of the host no container may change, a line each: KEY, tab, VALUE.
host_state() {
    sed -E 's/^([0-9]+) (.*)/mount \1\t\2/; s,//deleted,,' /proc/self/mountinfo # a build may replace a program meanwhile
    find /proc/sys/{kernel,fs/mqueue,net} -type f -perm -444 \
        \( -path '*/net/*' -o -path '*/mqueue/*' -o -name hostname -o -name domainname -o -name 'sem*' -o -name 'shm*' -o -name 'msg*' \) \
        ! -name nf_conntrack_count -exec grep -Hs . {} + | sed 's/:/\t/'
    local dir own='*' # the machine's own cgroups may change: other runs have theirs
    case $TESTBED_CGROUP in host*) own="*$TESTBED_CGROUP_PARENT*" ;; esac
    while IFS= read -r dir; do
        printf 'cgroup %s\tis there\n' "$dir"
        grep -Hs . "$dir"/{cgroup.freeze,freezer.state,cpuset.{cpus,mems},{cpu,io,memory,pids}.{max,high,weight}} \
            "$dir"/{memory.limit_in_bytes,cpu.{shares,cfs_quota_us},devices.list} | sed 's/:/\t/' || true
    done < <(find /sys/fs/cgroup -type d -path "$own" 2> /dev/null)
}

# unchanged BEFORE AFTER: all that was there is there and the same. What is new is the engines' own, as on any host.
# They may also have turned forwarding on, with which the kernel turns redirects off.
unchanged() {
    awk -F '\t' '
        NR == FNR { value[$1] = value[$1] FS $2; next }
        $1 in value && $1 ~ /forward|accept_redirects/ { delete value[$1]; next }
        { now[$1] = now[$1] FS $2 }
        END {
            for (key in value) if (value[key] != now[key]) {
                print "testbed: the host differs: " key ": before:" value[key] ", after:" now[key]
                code = 1
            }
            exit code
        }' <(echo "$1") <(echo "$2") >&2
}

case ${TESTBED_STAGE:-} in
    '') enter_cgroups "$@" ;;
    mounts) make_mounts "$@" ;;
    init) # bash reaps the orphans that come to init, and all of them end with it
        unset TESTBED_STAGE
        code=0
        before=$(host_state)
        "$@" || code=$?
        unchanged "$before" "$(host_state)" || [ "$code" -gt 0 ] || code=1
        # What is paused in a cgroup of version 1 cannot end: the bed would never end either.
        find /sys/fs/cgroup -name freezer.state 2> /dev/null | while read -r state; do
            echo THAWED > "$state" || true
        done 2> /dev/null
        exit "$code"
        ;;
esac
