# podman.sh: `cryopod setup podman`: shown, made, tested, repeated, undone.
low_level "$1"
conf=/etc/containers/containers.conf
sed -i '/cryopod-runtime/d; /engine.runtimes/d' $conf
echo '# the last line is the user'\''s' >> $conf
cp $conf /tmp/before
proposes() { cryopod check --json | jq -e '.checks[] | select(.name == "podman setup") | .remedy == "cryopod setup podman"' > /dev/null; }
check 'check proposes it' proposes
cryopod setup podman --dry-run > /tmp/said
check 'dry run: the diff' says /tmp/said '^\+cryopod-runtime = \["/usr/local/bin/cryopod-runtime"\]$'
if cryopod setup podman < /dev/null > /tmp/said 2>&1; then exit 1; fi
check 'no answer: says so' says /tmp/said 'give --yes'
if setpriv --reuid 65534 --clear-groups cryopod setup podman --yes > /tmp/said 2>&1; then exit 1; fi
check 'not root: says so' says /tmp/said 'run it as root'
check 'nothing was changed' cmp $conf /tmp/before

cryopod setup podman --yes > /tmp/said
check 'tested' says /tmp/said '^Tested: a container without a GPU was checkpointed and restored'
check 'a backup' cmp /var/lib/cryopod/setup/podman$conf /tmp/before
check 'the user'\''s lines stay' test -z "$(diff /tmp/before $conf | grep '^<')"
check 'podman knows the runtime' test "$(podman --runtime cryopod-runtime info --format '{{.Host.OCIRuntime.Path}}')" = /usr/local/bin/cryopod-runtime
if proposes; then exit 1; fi
nothing_left() { [ -z "$(podman ps --all --quiet)$(podman images --quiet)" ]; }
no_monitor() { ! pgrep -x conmon > /dev/null; } # it ends after its container, and an undo refuses until then
check 'nothing of the test is left' nothing_left
cp $conf /tmp/after
cryopod setup podman --yes --no-test > /tmp/said
check 'a second time: nothing to do' says /tmp/said '^podman is set up for cryopod.$'
check 'a second time: nothing changed' cmp $conf /tmp/after
cryopod setup podman --yes --no-test --default > /dev/null
check 'as the default runtime' test "$(podman info --format '{{.Host.OCIRuntime.Name}}')" = cryopod-runtime

# A test that fails says why, and leaves nothing.
mv /usr/sbin/criu /usr/sbin/criu.away
if cryopod setup podman --yes > /tmp/said 2>&1; then exit 1; fi
mv /usr/sbin/criu.away /usr/sbin/criu
check 'without CRIU: says so' says /tmp/said 'the test failed, and the setup stays .*criu'
check 'without CRIU: nothing is left' nothing_left
wait_for no_monitor

cryopod setup podman --undo --yes > /dev/null
check 'undone' cmp $conf /tmp/before
check 'undone: no backup is left' test ! -e /var/lib/cryopod/setup
# What the user changes after the setup stays.
cryopod setup podman --yes --no-test --default > /dev/null
echo '# later' >> $conf
cryopod setup podman --undo --yes > /dev/null
check 'undone, with a later change' cmp $conf <(cat /tmp/before - <<< '# later')
cryopod setup podman --undo --yes > /tmp/said
check 'undone twice' says /tmp/said 'nothing to undo'

# A file that is not TOML stays as it is.
echo '[engine' > $conf
if cryopod setup podman --yes > /tmp/said 2>&1; then exit 1; fi
check 'not TOML: names the file' says /tmp/said "$conf: TOML parse error"
check 'not TOML: unchanged' cmp $conf <(echo '[engine')
# Without a file of the user's: one of our own.
rm $conf
cryopod setup podman --yes --no-test > /dev/null
check 'a file of its own' test "$(podman --runtime cryopod-runtime info --format '{{.Host.OCIRuntime.Name}}')" = cryopod-runtime
check 'and no other' test ! -e $conf
cryopod setup podman --undo --yes > /dev/null
check 'no directory is left' test ! -e $conf.d

# A crun without CRIU: runc is named as long as an engine's setup or a container needs it.
config=/etc/cryopod/config.toml
cp /tmp/before $conf && rm $config
printf '#!/bin/sh\nif [ "$*" = --version ]; then echo crun; else exec /usr/bin/crun "$@"; fi\n' > /usr/local/bin/crun
chmod +x /usr/local/bin/crun
for engine in docker podman; do cryopod setup $engine --yes --no-test > /dev/null; done
cryopod setup docker --undo --yes > /tmp/said
check 'podman needs it: says so' says /tmp/said "^$config stays: podman needs it.$"
mkimage
pod run --detach --name c localhost/busybox sleep 1000 > /dev/null
if cryopod setup podman --undo --yes > /tmp/said 2>&1; then exit 1; fi
check 'a container needs it: says so' says /tmp/said 'containers run with cryopod \(process .*: remove them first'
check 'its runtime knows it' pod rm --force --time 0 c
wait_for no_monitor
cryopod setup podman --undo --yes > /dev/null
check 'the last undo takes it' test ! -e $config
