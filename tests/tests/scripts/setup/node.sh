# node.sh: `cryopod setup kubernetes --node-root`, on nodes of every layout. Afterwards the node has what it had before, byte by
# byte, also if the setup or its undoing is killed on the way. systemctl only writes down what it is asked. The last node is
# the bed itself, where containerd reads the configuration and a container is checkpointed.
node=/tmp/node
# An installer with small files beside its program.
own=/tmp/own
mkdir -p $own/bin $own/lib/cryopod/criu/lib
cp /usr/local/bin/cryopod $own/bin
for name in bin/cryopod-runtime bin/containerd-shim-cryopod-v2 lib/cryopod/cryopod_nvidia.so lib/cryopod/criu/{criu,lib/libc.so.6}; do
    echo "$name" > $own/$name
done
chmod +x $own/bin/*
PATH=$own/bin:$PATH
ours=/opt/cryopod/bin/cryopod-runtime
rm -f /etc/cryopod/config.toml
cp /etc/containerd/config.toml /tmp/debian.toml
mv /usr/local/bin/systemctl /tmp/restarts
cat > /usr/local/bin/systemctl << 'SH'
#!/bin/sh
echo "$*" >> /run/asked
case $* in *" k3s" | *" rke2-server") exit 3 ;; esac
SH
printf '#!/bin/sh\n' > /usr/local/bin/crio
chmod +x /usr/local/bin/{systemctl,crio}
node() { # a node with nothing but programs
    local name
    umount $node/usr $node/proc 2> /dev/null || true
    rm -rf $node && mkdir -p $node/{usr,proc,dev,run,etc/cni,var/lib,opt/theirs/bin}
    for name in bin sbin lib lib64; do ln -s usr/$name $node/$name; done
    mount --bind /usr $node/usr
    mount -t proc proc $node/proc
    mknod $node/dev/null c 1 3
}
state() { # [DIRECTORY...]: of the large files only the sizes: hashing them took most of the time
    local all=("$@")
    if [ $# = 0 ]; then all=(etc var opt); fi
    (cd $node && find "${all[@]}" -printf '%p %y %m %U %G %l\n' && find "${all[@]}" -type f -size +1M -printf '%p %s\n' &&
        find "${all[@]}" -type f -size -1025k -exec sha256sum {} +) | LC_ALL=C sort
}
setup() { cryopod setup kubernetes --node-root $node --yes --restart "$@" > /tmp/said; }
install() { setup --no-test --settings /tmp/settings; }
settings() { printf '[restore]\nallow = ["%s"]\n' "$1" > /tmp/settings; }
# killed CALL:N OPTION...: kills it at its Nth system call of this name.
killed() {
    local at=$1 && shift
    if ! strace -f -qq -o /tmp/trace -e signal=none -e "inject=${at%:*}:signal=KILL:when=${at#*:}" \
        cryopod setup kubernetes --node-root $node --yes --restart --no-test "$@" > /tmp/said 2>&1; then kills=$((kills + 1)); fi
}
on_failure() { diff /tmp/before <(state); tail -n 5 /tmp/said $node/run/asked /tmp/containerd.log 2> /dev/null; }

# layout SERVICE FILE [POINT...]: sets the node up, brings other files and settings, and takes it back. FILE names the runtime.
layout() {
    local service=$1 file=$node$2 point kills=0 && shift 2
    settings /srv/one
    state > /tmp/before
    install
    check "$service: the runtime" grep -q /opt/cryopod/bin/ "$file"
    check "$service: the files" diff -r $own $node/opt/cryopod
    check "$service: the settings" cmp /tmp/settings $node/etc/cryopod/config.toml
    check "$service: restarted" grep -qx "restart $service" $node/run/asked
    state > /tmp/after
    install
    check "$service: a second time" says /tmp/said 'is set up for cryopod.$'
    settings /srv/two
    echo old > $node/opt/cryopod/lib/cryopod/old
    install
    check "$service: new settings" cmp /tmp/settings $node/etc/cryopod/config.toml
    check "$service: no older file" test ! -e $node/opt/cryopod/lib/cryopod/old
    setup --undo
    check "$service: as before" cmp /tmp/before <(state)
    settings /srv/one
    for point in "$@"; do
        killed "$point" --settings /tmp/settings
        install
        check "$service: killed at $point, and run again" cmp /tmp/after <(state)
        killed "$point" --undo
        setup --undo
        check "$service: taking it back killed at $point, and run again" cmp /tmp/before <(state)
        killed "$point" --settings /tmp/settings
        setup --undo
        check "$service: killed at $point, and taken back" cmp /tmp/before <(state)
    done
    check "$service: it was killed" test $kills -ge $(($# * 2))
}

node
mkdir $node/etc/containerd
cp /tmp/debian.toml $node/etc/containerd/config.toml
layout containerd /etc/containerd/config.toml mkdir:1 mkdir:4 mkdir:6 fsync:1 fsync:4 fsync:9 rename:1 rename:3 rename:7 rename:9
node # Debian 13 and later, with a directory of containerd's; the node has settings of its own
mkdir -p $node/etc/containerd $node/etc/cryopod
printf 'version = 3\nimports = ["/etc/containerd/conf.d/*.toml"]\n' > $node/etc/containerd/config.toml
state > /tmp/before
install
check 'a drop-in' grep -q /opt/cryopod $node/etc/containerd/conf.d/cryopod.toml
echo '# mine' > $node/etc/cryopod/config.toml
install
check 'the settings of the node stay' cmp $node/etc/cryopod/config.toml <(echo '# mine')
rm $node/etc/cryopod/config.toml
setup --undo
check 'a drop-in: as before' cmp /tmp/before <(state)
# k3s and rke2 write config.toml at each start: from a template, or with a directory of files.
for of in k3s:2:config.toml.tmpl k3s:3:config-v3.toml.tmpl rke2:2:config.toml.tmpl rke2:3:config-v3.toml.d/cryopod.toml; do
    IFS=: read -r name version file <<< "$of"
    dir=/var/lib/rancher/$name/agent/etc/containerd
    node
    mkdir -p $node$dir
    { [ "$version" = 2 ] && cat /tmp/debian.toml || containerd config default; } > $node$dir/config.toml
    sed -i "s/^version.*/version = $version/" $node$dir/config.toml
    # As their own template has it; Debian's file has no table of runc.
    if [ "$version" = 2 ] && ! grep -q runtimes.runc $node$dir/config.toml; then
        printf '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]\nruntime_type = "io.containerd.runc.v2"\n' >> $node$dir/config.toml
    fi
    case $file in *.d/*) sed -i "s|^imports.*|imports = ['$dir/config-v3.toml.d/*.toml']|" $node$dir/config.toml ;; esac
    case $name in k3s) service=k3s-agent ;; *) service=rke2-agent ;; esac
    layout $service $dir/$file rename:4
    # What they would make of the template: TOML, which containerd 1.7 reads if it is of version 2.
    install
    case $file in *.tmpl)
        sed -e "/template \"base\"/{r $node$dir/config.toml" -e 'd}' $node$dir/$file > /tmp/rendered.toml
        check "$of: TOML" python3 -c 'import tomllib; tomllib.load(open("/tmp/rendered.toml", "rb"))'
        if [ "$version" = 2 ]; then
            containerd --config /tmp/rendered.toml config dump > /tmp/dump
            check "$of: containerd reads it" grep -q 'runtime_path = ./opt/cryopod/bin/containerd-shim-cryopod-v2' /tmp/dump
        fi ;;
    esac
    setup --undo
done
node
mkdir -p $node/etc/crio/crio.conf.d $node/run/crio
printf '[crio.runtime]\ndefault_runtime = "crun"\n[crio.runtime.runtimes.crun]\nmonitor_path = "/usr/libexec/crio/conmon"\n' > $node/etc/crio/crio.conf.d/10-crio.conf
touch $node/run/crio/crio.sock
layout crio /etc/crio/crio.conf.d/90-cryopod.conf mkdir:3 rename:2

# What still runs is not taken away.
install
mkdir -p /opt/cryopod/bin
cp /usr/bin/sleep $ours
$ours 1000 &
runs() { [ "$(readlink "/proc/$1/exe")" = $ours ]; } # no longer the shell that starts it
wait_for runs $!
if cryopod setup kubernetes --node-root $node --yes --restart --undo > /tmp/said 2>&1; then exit 1; fi
check 'a pod runs: says so' says /tmp/said "process $! is of one\): remove them first"
kill $! && wait $! || true
rm -r /opt/cryopod
setup --undo

# The bed itself as the node.
rm -r $own && hash -r
rm /usr/local/bin/crio
mv /tmp/restarts /usr/local/bin/systemctl
systemd_outside
umount $node/usr $node/proc
rm -rf $node && mkdir $node
mount --rbind / $node
containerd_up
state etc opt > /tmp/before # containerd itself writes and removes files below var
setup
cat /tmp/said
check 'containerd was restarted' says /tmp/said '^containerd was restarted.$'
check 'tested' says /tmp/said '^Tested: a container'
check 'containerd reads it' sh -c "containerd config dump | grep -q 'runtime_path = .*/opt/cryopod/bin/containerd-shim-cryopod-v2'"
setup
check 'a second time: no restart' sh -c '! grep -q restarted /tmp/said && grep -q "^Tested: " /tmp/said'
wait_for no_shims # that of the test ends after its container
setup --undo
check 'as before' cmp /tmp/before <(state etc opt)
check 'no backup, no file of the test' sh -c '! ls -d /var/lib/cryopod/setup /var/tmp/.cryopod-* 2> /dev/null'

# As a node of CRI-O, which has no client: cryopod-runtime alone runs the test.
mkdir -p /etc/crio /run/crio
touch /run/crio/crio.sock
printf '#!/bin/sh\n' > /usr/local/bin/crio
printf '#!/bin/sh\n' > /usr/local/bin/systemctl
chmod +x /usr/local/bin/{crio,systemctl}
setup
check 'CRI-O: tested' says /tmp/said '^Tested: a container'
check 'CRI-O: no file of the test' sh -c '! ls -d /var/tmp/.cryopod-* 2> /dev/null'
setup --undo
