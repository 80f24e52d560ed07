# lib.sh: for the scripts that tests/packages/run starts in a bed with podman, where nothing of cryopod is installed.
# shellcheck shell=bash disable=SC2154
. /src/tests/testbed/lib.sh
. /src/tests/tests/scripts/archive/lib.sh
export DEBIAN_FRONTEND=noninteractive

# Every file of the root, but for logs, caches, and the databases of packages.
listed() {
    find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /run -o -path /tmp -o -path /src -o -path /packages \
        -o -path /opt -o -path /var/log -o -path /var/lib/dpkg -o -path /var/lib/apt -o -path /var/lib/rpm -o -path /var/cache \
        -o -path /root -o -path /var/lib/containers -o -path /var/lib/cni -o -path /etc/cni \) -prune -o -printf '%p %y %m %l\n' | sort
}

# installs KIND: cryopod without its CRIU; installs_criu KIND; removes KIND: everything. KIND is deb, rpm or tar.
installs() {
    case $1 in
        deb) apt-get install -q=2 -y --no-install-recommends /packages/new/cryopod_*.deb > /tmp/installed ;;
        # There is no rpm system to be had: rpm's program on Debian, which has the files that the rpm's dependencies stand for.
        rpm) rpm -i --nodeps /packages/new/cryopod-0*.rpm && rpm -V --nodeps cryopod ;;
        tar)
            tar --directory /tmp -xzf /packages/new/cryopod-*.tar.gz
            /tmp/cryopod-*/install.sh --dry-run > /tmp/installed
            check 'a dry run installs nothing' test ! -e /usr/bin/cryopod
            if /tmp/cryopod-*/install.sh < /dev/null > /tmp/installed 2>&1; then exit 1; fi
            check 'nor does it without an answer' test ! -e /usr/bin/cryopod
            /tmp/cryopod-*/install.sh --without-criu --yes > /tmp/installed
            ;;
    esac
}
installs_criu() {
    case $1 in
        deb) apt-get install -q=2 -y --no-install-recommends /packages/new/cryopod-criu_*.deb > /tmp/installed ;;
        rpm) rpm -i --nodeps /packages/new/cryopod-criu-*.rpm && rpm -V --nodeps cryopod-criu ;;
        tar) /tmp/cryopod-*/install.sh --yes > /tmp/installed ;;
    esac
}
removes() {
    case $1 in
        deb) apt-get purge -q=2 -y cryopod cryopod-criu > /tmp/removed ;;
        # What was changed is kept beside it, as rpm does.
        rpm) rpm -e cryopod cryopod-criu 2> /tmp/removed && rm -rf /etc/cryopod/config.toml.rpmsave && { [ ! -d /etc/cryopod ] || rmdir /etc/cryopod; } ;;
        tar) rm -rf /tmp/cryopod-* && /usr/lib/cryopod/install.sh --uninstall --purge --yes > /tmp/removed ;;
    esac
}

# Debian 12's crun was built without CRIU.
crun=crun
if ! crun --version 2> /dev/null | grep -q +CRIU; then crun=/packages/crun/crun; fi

# readme N: the Nth command of podman in the README, with the image, the simulated driver and a program of CUDA's in place of
# the reader's.
readme() {
    local line mounts
    line=$(grep '^podman ' /src/README.md | sed -n "$1p")
    mounts=$(printf -- '--volume %s ' "${binds[@]}")
    line=${line/ IMAGE/ --network none $mounts --env LD_LIBRARY_PATH=/cusim localhost/busybox /cusim/cusim-client}
    echo "$ $line" >&2
    eval "$line" > /dev/null
}

# podman's monitors end some time after their containers; until then the packages and the setup stay.
no_monitor() { ! pgrep -x conmon > /dev/null && ! pgrep -f '^[^ ]*podman .*container cleanup' > /dev/null; }

# example LOW: the README's first example over this low-level runtime.
example() {
    simulate "$1"
    cd /tmp
    readme 1
    wait_for ticked job 3
    readme 2
    check "$1: the checkpoint ended it" test "$(podman inspect -f '{{.State.Running}}' job)" = false
    check "$1: the archive is whole" cryopod verify -q job.tar.zst
    podman rm job > /dev/null
    readme 3
    check "$1: the restored container goes on" goes_on job
    podman rm --force --time 0 job > /dev/null
    wait_for no_monitor
    kill %?cusim-server && wait %?cusim-server 2> /dev/null || true
    rm -rf job.tar.zst /run/cusim /opt/cusim /dev/nvidia*
    cd /
}
