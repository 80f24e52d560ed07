# lib.sh: a second bed within this one, which is another host: its own engines, file systems, GPUs and network, and sshd.
# shellcheck shell=bash disable=SC2154
far=10.9.0.2

far_host() { # SHARED SCRIPT: runs the script there, with our directory SHARED as /out
    mkdir -p /tmp/far/mnt /root/.ssh
    ln -s / "/tmp/far/testbed-$TESTBED_SUITE-$(sha256sum < /src/tests/testbed/root.sh | cut -c1-12)"
    ssh-keygen -q -t ed25519 -N '' -f /root/.ssh/id_ed25519
    printf 'StrictHostKeyChecking accept-new\nLogLevel ERROR\n' > /root/.ssh/config
    cp -r /root/.ssh /tmp/far/key
    # Only what the root hands on, a cgroup below it can have.
    if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
        sed 's/\([a-z_]*\)/+\1/g' /sys/fs/cgroup/cgroup.controllers > /sys/fs/cgroup/cgroup.subtree_control || true
    fi
    SUITE=$TESTBED_SUITE CRYOPOD_CACHE=/tmp/far CRYOPOD_BIN_DIR=/opt/build /src/tests/testbed/testbed enter --cgroup "$TESTBED_CGROUP" \
        --bind /tmp/far/key:/key --bind "$1:/out" -- bash -eu -c "
            . /src/tests/testbed/lib.sh
            . /src/tests/tests/scripts/archive/lib.sh
            . /src/tests/tests/scripts/shim/lib.sh
            hostname far
            touch /key/up
            wait_for ip link show dev eth0 > /dev/null 2>&1
            ip address add $far/24 dev eth0 && ip link set eth0 up
            mkdir -p /run/sshd /root/.ssh
            cp /key/id_ed25519.pub /root/.ssh/authorized_keys
            /usr/sbin/sshd
            $2
            touch /key/ready
            sleep infinity" > /tmp/far.log 2>&1 &
    local bed=$! pid
    wait_for test -e /tmp/far/key/up
    pid=$(pgrep -f '^bash -eu -c .*hostname far' | tail -n 1)
    ip link add near type veth peer name eth0 netns "$pid"
    ip address add 10.9.0.1/24 dev near && ip link set near up
    until [ -e /tmp/far/key/ready ]; do
        kill -0 $bed || { cat /tmp/far.log && return 1; }
        sleep 0.1
    done
}
there() { ssh "root@$far" "$@"; }

# fault PATTERN COMMAND: the next ssh whose command line has PATTERN runs COMMAND in place of ssh; `real` is ssh itself.
mkdir -p /place
cat > /place/ssh << 'S'
#!/bin/bash
worker=$PPID parent=$(ps -o ppid= -p $PPID | tr -d ' ')
real() { /usr/bin/ssh "$@"; }
pattern=$(head -n 1 /tmp/fault 2> /dev/null)
if [ "$pattern" ] && [[ "$*" == *$pattern* ]]; then
    source <(tail -n +2 /tmp/fault && rm /tmp/fault)
else
    real "$@"
fi
S
chmod +x /place/ssh
fault() { printf '%s\n' "$@" > /tmp/fault; }
