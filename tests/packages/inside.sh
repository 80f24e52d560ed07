# inside.sh KIND: cryopod is installed, used and removed. KIND is deb, rpm or tar.
# shellcheck shell=bash
. /src/tests/packages/lib.sh
kind=$1
mkimage
cp -a /etc/containers /tmp/etc-containers
listed > /tmp/before

installs "$kind"
check 'it runs' cryopod --version
verbs=$(cryopod --help | sed -n '/^Commands:/,/^$/s/^  \([a-z]*\) .*/\1/p' | grep -v '^help$')
check 'all verbs' test "$(wc -w <<< "$verbs")" -ge 16
for verb in $verbs; do
    check "$verb: a man page" man -w "cryopod-$verb" > /dev/null
    for file in bash-completion/completions/cryopod fish/vendor_completions.d/cryopod.fish zsh/*/_cryopod; do
        # shellcheck disable=SC2086 # Debian has another directory for zsh
        check "$verb: in ${file%%/*}" grep -qw -- "$verb" /usr/share/$file > /dev/null
    done
done
check 'a man page of the runtime' man -w cryopod-runtime containerd-shim-cryopod-v2
check 'completions for bash' bash -c '. /usr/share/bash-completion/bash_completion; { _comp_load cryopod || __load_completion cryopod; } 2> /dev/null; complete -p cryopod'

# The host's own CRIU, if it is too old, and cryopod's in its place.
own=$(criu --version | sed -n 's/^Version: //p')
cryopod check > /tmp/checked || true
if criu_from 4.1; then
    check "its own CRIU $own serves" says /tmp/checked "^ok +criu +$own"
else
    check "its own CRIU $own is too old, and cryopod-criu is named" says /tmp/checked "^missing +criu +$own"
    check 'the remedy' says /tmp/checked 'install the package cryopod-criu'
fi
installs_criu "$kind"
cryopod check > /tmp/checked || true
check 'check: the CRIU' says /tmp/checked 'of the package cryopod-criu, in place of /usr/sbin/criu'
check 'check: what to do next' says /tmp/checked 'cryopod setup podman'
check "the host's own CRIU is as it was" test "$(criu --version | sed -n 's/^Version: //p')" = "$own"

cp /etc/cryopod/config.toml /tmp/config.toml
cryopod setup podman --yes | tee /tmp/said
check 'setup: tested' says /tmp/said '^Tested: '
cryopod check | tee /tmp/checked
check 'check: all is well' says /tmp/checked '^A container can be checkpointed'
if [ $crun != crun ]; then check 'runc in place of a crun without CRIU' says /tmp/checked 'low-level runtime +runc'; fi
cp /etc/cryopod/config.toml /tmp/config-set-up.toml
example $crun
example runc
cp /tmp/config-set-up.toml /etc/cryopod/config.toml

cryopod setup podman --undo --yes > /tmp/said
check 'undone' diff -r /etc/containers /tmp/etc-containers
check 'undone: the configuration' cmp /etc/cryopod/config.toml /tmp/config.toml
# Removal undoes it, too.
cryopod setup podman --yes --no-test > /dev/null
removes "$kind"
check 'undone by the removal' diff -r /etc/containers /tmp/etc-containers
listed > /tmp/after
check 'nothing is left' diff /tmp/before /tmp/after
check 'nor in /run and /var' test -z "$(ls -d /run/cryopod /var/lib/cryopod /var/cache/cryopod 2> /dev/null)"
