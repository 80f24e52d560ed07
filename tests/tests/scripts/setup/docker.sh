# docker.sh: `cryopod setup docker`, with a restart of the daemon, and its undoing.
low_level runc
cp /etc/docker/daemon.json /tmp/before
on_failure() { tail -n 15 /tmp/dockerd.log /tmp/containerd.log; }

cryopod setup docker --yes > /tmp/said
check 'no daemon: set up' grep -q cryopod-runtime /etc/docker/daemon.json
check 'no daemon: not tested' says /tmp/said '^Not tested: start docker.'
check 'the shim' test "$(readlink /usr/local/sbin/containerd-shim-runc-v2)" = /usr/local/bin/containerd-shim-cryopod-v2
cryopod setup docker --undo --yes > /dev/null
check 'undone' cmp /etc/docker/daemon.json /tmp/before
check 'undone: the shim' test ! -e /usr/local/sbin/containerd-shim-runc-v2

docker_daemons
cryopod setup docker --yes > /tmp/said
check 'before the restart: says so' says /tmp/said 'systemctl restart containerd docker'
check 'before the restart: not tested' says /tmp/said '^Not tested: docker has not read'
cryopod setup docker --yes --restart > /tmp/said
cat /tmp/said
check 'tested' says /tmp/said '^Tested: a container'
check 'nothing of the test is left' test -z "$(docker ps --all --quiet)$(docker images --quiet)"
docker import /usr/local/share/testbed/busybox.tar busybox > /dev/null
docker run --detach --name theirs --network none busybox sleep 1000 > /dev/null
if cryopod setup docker --undo --yes > /tmp/said 2>&1; then exit 1; fi
check 'a container of runc has our shim: says so' says /tmp/said 'since the setup of docker \(process [0-9]* is of one\): remove them first'
docker rm --force theirs > /dev/null
wait_for no_shims # its own ends after it
cryopod setup docker --undo --yes > /tmp/said
check 'without a word: containerd is restarted' says /tmp/said '^containerd was restarted.$'
check 'and finds its own shim' wait_for docker run --rm --network none busybox true
docker rmi busybox > /dev/null
cryopod setup docker --yes --restart --no-test > /dev/null
cryopod setup docker --undo --yes --restart > /dev/null
check 'undone after all' cmp /etc/docker/daemon.json /tmp/before
check 'docker does not know it' sh -c '! docker info --format "{{json .Runtimes}}" | grep cryopod'

echo '{"runtimes": ' > /etc/docker/daemon.json
if cryopod setup docker --yes > /tmp/said 2>&1; then exit 1; fi
check 'not JSON: names the file' says /tmp/said '/etc/docker/daemon.json: not a JSON object'
cp /tmp/before /etc/docker/daemon.json
if dockerd --help | grep -e --validate > /dev/null; then
    sed -i 's/^{/{"no-such-key": 1,/' /etc/docker/daemon.json
    cp /etc/docker/daemon.json /tmp/wrong
    if cryopod setup docker --yes > /tmp/said 2>&1; then exit 1; fi
    check 'docker would not start: says so' says /tmp/said 'daemon.json: docker would not start: .*no-such-key'
    check 'and changes nothing' cmp /etc/docker/daemon.json /tmp/wrong
    cp /tmp/before /etc/docker/daemon.json
fi
printf '#!/bin/sh\n' > /usr/local/sbin/containerd-shim-runc-v2
if cryopod setup docker --yes > /tmp/said 2>&1; then exit 1; fi
check 'a shim of somebody else: says so' says /tmp/said "is not cryopod's"
check 'and changes nothing' cmp /etc/docker/daemon.json /tmp/before
