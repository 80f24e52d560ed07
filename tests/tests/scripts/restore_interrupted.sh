# restore_interrupted.sh LOW: a restore of a GPU container that is interrupted, or whose CRIU is killed, leaves nothing
# of the container, and the checkpoint as it was; the next restore works.
low=$1
mkimage
low_level "$low"
fake_gpu_nodes
bundle /tmp/b sleep 1000
cd /tmp/b
out=/tmp/b/rootfs/out # in the container: CRIU cannot restore what is open outside of it
jq --arg run 'exec > /out 2>&1; i=0; while :; do echo $i; i=$((i + 1)); sleep 0.1; done' '.process.args = ["sh", "-c", $run]
    | .root.readonly = false | .linux.devices += [{path: "/dev/nvidia0", type: "c", major: 195, minor: 0, fileMode: 438}]' config.json > c && mv c config.json
cryopod-runtime run --detach c1 < /dev/null > /dev/null 2>&1
past() { [ "$(tail -n 1 $out)" -ge "$1" ]; }
wait_for past 3
cryopod-runtime checkpoint --image-path /tmp/b/checkpoint --work-path /tmp c1
[ -e /tmp/b/checkpoint/cryopod.json ]
cp $out /tmp/out.then # CRIU wants a file to be as long as it was
sum=$(cd checkpoint && sha256sum -- * | sha256sum)

cat > /tmp/stages.sh <<'EOF'
#!/bin/bash
[ "$CRTOOLS_SCRIPT_ACTION" = "$(cat /tmp/stop-at 2> /dev/null)" ] || exit 0
touch /tmp/reached
until [ -e /tmp/go-on ]; do sleep 0.02; done
EOF
chmod 755 /tmp/stages.sh
echo 'action-script /tmp/stages.sh' >> /etc/criu/default.conf
cgroup=$(jq -r '.linux.cgroupsPath // "c1"' config.json)
in_cgroup() { cat /sys/fs/cgroup{,/*}/"$cgroup"/cgroup.procs 2> /dev/null; }
nothing_left() {
    [ -z "$(in_cgroup)" ] && ! pgrep -x 'criu|sleep|cryopod-runtime' > /dev/null && [ -z "$(ls -A /run/cryopod)" ] && ! "$low" list -q 2> /dev/null | grep -qx c1
}
for signal in TERM INT; do
    for stage in setup-namespaces post-setup-namespaces; do
        rm -f /tmp/reached /tmp/go-on
        echo $stage > /tmp/stop-at
        # Signals that a shell's background job would ignore are set back.
        env --default-signal cryopod-runtime restore --detach --bundle /tmp/b --image-path /tmp/b/checkpoint --work-path /tmp c1 < /dev/null > /tmp/said 2>&1 &
        wrapper=$!
        wait_for test -e /tmp/reached
        kill -$signal $wrapper
        touch /tmp/go-on
        if wait $wrapper; then echo "SIG$signal at $stage: restored"; exit 1; fi
        grep -q "the checkpoint is untouched: it was interrupted by SIG$signal" /tmp/said || { echo "SIG$signal at $stage:"; cat /tmp/said; exit 1; }
        "$low" delete --force c1 > /dev/null 2>&1 || true # as an engine does after a failed restore
        wait_for nothing_left || { pgrep -ax 'criu|sleep|cryopod-runtime'; ls /run/cryopod; exit 1; }
        [ "$(cd checkpoint && sha256sum -- * | sha256sum)" = "$sum" ]
        echo "ok: SIG$signal at $stage"
    done
done

victim() { # WHO: its pid
    case $1 in
        criu) pgrep -o -x criu ;;
        processes) pgrep -o -x sh -P "$(pgrep -x "$low" -P $wrapper)" ;; # the first, and so all
    esac
}
killed() { # WHO STAGE SAYS: the restore fails and says so; nothing is left
    rm -f /tmp/reached /tmp/go-on
    echo "$2" > /tmp/stop-at
    cryopod-runtime restore --detach --bundle /tmp/b --image-path /tmp/b/checkpoint --work-path /tmp c1 < /dev/null > /tmp/said 2>&1 &
    wrapper=$!
    wait_for test -e /tmp/reached
    [ "$2" != pre-resume ] || [ -n "$(in_cgroup)" ]
    kill -KILL "$(victim "$1")"
    touch /tmp/go-on
    if wait $wrapper; then echo "$1 killed at $2: restored"; exit 1; fi
    grep -q "the checkpoint is untouched: $3" /tmp/said || { cat /tmp/said; exit 1; }
    "$low" delete --force c1 > /dev/null 2>&1 || true
    wait_for nothing_left || { pgrep -ax 'criu|sleep|cryopod-runtime'; ls /run/cryopod; in_cgroup; exit 1; }
    [ "$(cd checkpoint && sha256sum -- * | sha256sum)" = "$sum" ]
    echo "ok: $1 killed at $2"
}
# The container's first process waits for CRIU without a limit, and the runtime with it.
killed criu setup-namespaces 'CRIU was killed'
# Before its first question CRIU has a child for a moment, which sleeps. It outlives a killed CRIU, and holds its connection
# to the runtime and its log open.
mkdir /tmp/early
mkfifo /tmp/early/fifo
cat > /tmp/early/criu <<'EOF'
#!/bin/bash
[ "$1" = swrk ] || exec /usr/sbin/criu "$@"
exec 9>> /tmp/restore.log
(exec 8<> /tmp/early/fifo && read -r _ <&8) &
kill -KILL $$
EOF
chmod 755 /tmp/early/criu
if PATH=/tmp/early:$PATH cryopod-runtime restore --detach --bundle /tmp/b --image-path /tmp/b/checkpoint --work-path /tmp c1 < /dev/null > /tmp/said 2>&1; then exit 1; fi
grep -q 'the checkpoint is untouched: CRIU was killed' /tmp/said || { cat /tmp/said; exit 1; }
"$low" delete --force c1 > /dev/null 2>&1 || true
wait_for nothing_left || { pgrep -ax 'criu|sleep|cryopod-runtime'; ls /run/cryopod; exit 1; }
echo 'ok: criu killed before its first question'
# CRIU does not learn of the end of the container's first process, which is the runtime's child, and waits for its next step.
killed processes post-restore "the container's processes were killed"
# CRIU is about to let the processes go. It waits for the first of them, which waits for the others, which only CRIU can reap.
# CRIU 4.3 reaps them and ends by itself, unless it goes on only when the wrapper's patience with it is over.
lost="the container's processes were killed"
if criu_from 4.3; then lost="\\(CRIU: Error .*: Unable to detach [0-9]*: No such process\\|$lost\\)"; fi
killed processes pre-resume "$lost"
# What CRIU had restored would run on. The cgroup is there, of a runtime that was killed.
for hierarchy in $(awk '$3 ~ /^cgroup2?$/ {print $2}' /proc/mounts); do mkdir -p "$hierarchy/$cgroup" 2> /dev/null || true; done
killed criu pre-resume ''
cat /tmp/out.then > $out

# After CRIU's last question there is no way back: the restore is completed, as if the signal had come later.
rm -f /tmp/reached /tmp/go-on
echo post-restore > /tmp/stop-at
before=$(tail -n 1 $out)
env --default-signal cryopod-runtime restore --detach --bundle /tmp/b --image-path /tmp/b/checkpoint --work-path /tmp c1 < /dev/null &
wrapper=$!
wait_for test -e /tmp/reached
kill -TERM $wrapper
touch /tmp/go-on
wait $wrapper
wait_for past $((before + 3))
[ "$("$low" state c1 | jq -r .status)" = running ]
echo 'ok: too late'
"$low" kill c1 KILL
wait_for sh -c "[ \"\$($low state c1 | jq -r .status)\" = stopped ]"
cryopod-runtime delete c1

# The wrapper is killed. crun restores nothing where the directory that it makes for CRIU is left.
rm -f /tmp/reached /tmp/go-on
echo setup-namespaces > /tmp/stop-at
cryopod-runtime restore --detach --bundle /tmp/b --image-path /tmp/b/checkpoint --work-path /tmp c1 < /dev/null > /tmp/said 2>&1 &
wrapper=$!
wait_for test -e /tmp/reached
kill -KILL $wrapper
wait $wrapper || true
touch /tmp/go-on
wait_for sh -c '! pgrep -x criu > /dev/null'
cryopod-runtime delete --force c1 > /dev/null 2>&1 || true

rm -f /tmp/stop-at
cat /tmp/out.then > $out
before=$(tail -n 1 $out)
cryopod-runtime restore --detach --bundle /tmp/b --image-path /tmp/b/checkpoint --work-path /tmp c1 < /dev/null
wait_for past $((before + 3))
[ "$(cd checkpoint && sha256sum -- * | sha256sum)" = "$sum" ]
echo 'ok: the next restore'
"$low" kill c1 KILL
wait_for sh -c "[ \"\$($low state c1 | jq -r .status)\" = stopped ]"
cryopod-runtime delete c1

# A container in the foreground can be paused while it runs.
cat /tmp/out.then > $out
cryopod-runtime restore --bundle /tmp/b --image-path /tmp/b/checkpoint --work-path /tmp c1 < /dev/null > /tmp/said 2>&1 &
wrapper=$!
wait_for past $((before + 3))
cryopod-runtime pause c1
cryopod-runtime resume c1
echo 'ok: a pause in the foreground'
"$low" kill c1 KILL
wait $wrapper || true
