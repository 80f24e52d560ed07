# too-old.sh: on a host whose C library is too old the packages and install.sh refuse, and say why.
# shellcheck shell=bash
. /src/tests/testbed/lib.sh
ldd --version | sed -n 1p
if apt-get install -y --no-install-recommends /packages/new/cryopod_*.deb > /tmp/said 2>&1; then exit 1; fi
check 'apt refuses, and names the C library' says /tmp/said 'cryopod : Depends: libc6 \(>= 2\.'
tar --directory /tmp -xzf /packages/new/cryopod-*.tar.gz
if /tmp/cryopod-*/install.sh --yes > /tmp/said 2>&1; then exit 1; fi
cat /tmp/said
check 'install.sh refuses, and says what it needs' says /tmp/said 'glibc 2\.[0-9]+ or newer'
check 'nothing is installed' test -z "$(ls -d /usr/bin/cryopod /usr/lib/cryopod /etc/cryopod 2> /dev/null)"
