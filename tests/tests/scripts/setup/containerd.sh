# containerd.sh: `cryopod setup kubernetes` on containerd's own default configuration, read by containerd.
low_level runc
mkdir -p /etc/containerd
conf=/etc/containerd/config.toml
{ echo '# mine' && containerd config default; } > $conf
# From 2.2 on the default has a directory of drop-ins; before, the file itself is changed.
cp $conf /tmp/before
containerd_up
cryopod setup kubernetes --yes > /tmp/said
cat /tmp/said
check 'tested, and not yet with the CRI' says /tmp/said '^Tested with ctr alone: a container.*systemctl restart containerd'
containerd_down -TERM
containerd_up
cryopod setup kubernetes --yes > /tmp/said
check 'tested' says /tmp/said '^Tested: a container'
check 'the RuntimeClass' says /tmp/said '^handler: cryopod$'
check 'no pod of the example' sh -c '! grep -q "kind: Pod" /tmp/said'
check 'nothing of the test is left' sh -c '! ctr namespaces list | grep cryopod-setup'
check 'containerd reads it' sh -c "containerd config dump | grep -q 'runtimes.cryopod.options'"
check 'and has all the rest' test "$(containerd config dump | grep -c runtimes.runc)" -ge 1
check 'the lines of the user stay' test -z "$(diff /tmp/before $conf | grep '^<')"
cryopod setup containerd --yes --no-test > /tmp/said
check 'a second time: nothing to do' says /tmp/said '^containerd is set up for cryopod.$'
echo '# later' >> $conf
cryopod setup kubernetes --undo --yes > /tmp/said
check 'undone' cmp $conf <(cat /tmp/before - <<< '# later')
check 'no backup is left' test ! -e /var/lib/cryopod/setup

printf 'version = 3\nimports = ["/etc/containerd/conf.d/*.toml"]\n' > $conf
cryopod setup kubernetes --yes --no-test > /tmp/said
check 'a drop-in' grep -q "runtimes.cryopod" /etc/containerd/conf.d/cryopod.toml
if containerd --version | grep -Eq ' v?2\.'; then
    check 'containerd reads the drop-in' sh -c "containerd config dump | grep -q 'runtimes.cryopod.options'"
fi
cryopod setup kubernetes --undo --yes > /tmp/said
check 'no drop-in is left' test ! -e /etc/containerd/conf.d
echo 'disabled_plugins = ["cri"]' > $conf
if cryopod setup kubernetes --yes > /tmp/said 2>&1; then exit 1; fi
check 'a disabled CRI: says so' says /tmp/said 'disables the CRI'

if containerd --version | grep -q ' 1\.'; then
    imported=/etc/containerd/conf.d/nvidia.toml
    mkdir -p "${imported%/*}"
    printf 'version = 2\nimports = ["/etc/containerd/conf.d/*.toml"]\n' > $conf
    printf 'version = 2\n[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]\nruntime_type = "io.containerd.runc.v2"\n' > $imported
    if cryopod setup kubernetes --yes --no-test > /tmp/said 2>&1; then exit 1; fi
    check 'an imported file that replaces the section: says so' says /tmp/said 'not know the runtime `cryopod`'
    cryopod setup kubernetes --undo --yes > /tmp/said
    cryopod setup kubernetes --config $imported --yes --no-test > /tmp/said
    check 'that file is set up' sh -c "containerd config dump | grep -q 'runtimes.cryopod.options'"
fi
