# sample.sh: the deb on the root of the test bed: installed, podman set up, the README's example over crun, undone, purged.
# shellcheck shell=bash
. /src/tests/packages/lib.sh
sed -i '/cryopod-runtime/d; /engine.runtimes/d' /etc/containers/containers.conf
mkimage
cp -a /etc/containers /tmp/etc-containers
listed > /tmp/before
dpkg --install /packages/new/cryopod_*.deb > /tmp/installed
check 'it runs' test "$(type -P cryopod)" = /usr/bin/cryopod
cp /etc/cryopod/config.toml /tmp/config.toml
cryopod setup podman --yes | tee /tmp/said
check 'setup: tested' says /tmp/said '^Tested: '
example crun
cp /tmp/config.toml /etc/cryopod/config.toml
cryopod setup podman --undo --yes > /tmp/said
check 'undone' diff -r /etc/containers /tmp/etc-containers
# Removal undoes it, too.
cryopod setup podman --yes --no-test > /dev/null
podman --runtime cryopod-runtime run --detach --name still --network none localhost/busybox sleep 1000 > /dev/null
if dpkg --purge cryopod > /tmp/removed 2>&1; then exit 1; fi
check 'a container needs it: says so' says /tmp/removed 'not removed: containers run with it \(process [0-9]* is of one\): remove them first'
podman rm --force --time 0 still > /dev/null
wait_for no_monitor
dpkg --purge cryopod > /tmp/removed
check 'undone by the removal' diff -r /etc/containers /tmp/etc-containers
listed > /tmp/after
check 'nothing is left' diff /tmp/before /tmp/after
