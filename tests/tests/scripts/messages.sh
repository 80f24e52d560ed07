# messages.sh LOW: what an engine shows for a failed checkpoint is its cause, and nothing of an earlier one.
low=$1
low_level "$low"
fake_gpu_nodes
bundle /tmp/b /bin/sh /job
echo 'while :; do sleep 1; done' > /tmp/b/rootfs/job # one sleep alone would end when CRIU interrupts it
jq '.linux.devices = [{path: "/dev/nvidia0", type: "c", major: 195, minor: 0}]' /tmp/b/config.json > /tmp/b/new && mv /tmp/b/new /tmp/b/config.json
cd /tmp/b

cryopod-runtime create c1 < /dev/null > /dev/null 2>&1
if cryopod-runtime checkpoint --image-path /tmp/i1 c1 > /tmp/said 2>&1; then echo 'created: checkpointed'; exit 1; fi
[ "$(wc -l < /tmp/said)" = 1 ] && grep -qF 'a container cannot be checkpointed in created state; start it first' /tmp/said || { cat /tmp/said; exit 1; }
[ ! -e /tmp/i1 ]
cryopod-runtime start c1
wait_for in_program c1 sh
[ "$(cryopod-runtime state c1 | jq -r .status)" = running ]
echo 'ok: a container that is only created'

echo data > /tmp/file
if cryopod-runtime checkpoint --image-path /tmp/file c1 > /tmp/said 2>&1; then echo 'a file: checkpointed'; exit 1; fi
grep -qF '/tmp/file: the image path is not a directory; name another one' /tmp/said || { cat /tmp/said; exit 1; }
if grep -q 'free some space' /tmp/said; then cat /tmp/said; exit 1; fi
[ "$(cat /tmp/file)" = data ]
echo 'ok: an image path that is a file'

# The runtime gives up before CRIU starts, in a work directory where CRIU once failed.
mkdir /tmp/w
echo '(00.1) Error (criu/old.c:1): of last week' > /tmp/w/dump.log
if cryopod-runtime checkpoint --image-path /tmp/i2 --work-path /tmp/w --manage-cgroups-mode bogus c1 > /tmp/said 2>&1; then exit 1; fi
if grep -q 'last week' /tmp/said; then echo 'an old log is quoted'; cat /tmp/said; exit 1; fi
grep -qF 'the container goes on running: ' /tmp/said || { cat /tmp/said; exit 1; }
echo 'ok: an old dump.log'

# Engines that read the last error of a JSON log alone find the runtime's reason in ours.
case $low in
runc)
    args=(--manage-cgroups-mode bogus) reason='Invalid manage cgroups mode'
    case $(runc --version) in *' 1.'[01].*) ;; *) reason='invalid manage-cgroups-mode value' ;; esac # from 1.2 on
    ;;
crun) args=(--work-path /tmp/file/x) reason=/tmp/file/x ;;
esac
echo '{"level":"error","msg":"of an earlier operation"}' > /tmp/log.json
if cryopod-runtime --log /tmp/log.json --log-format json checkpoint --image-path /tmp/i3 "${args[@]}" c1 > /tmp/said 2>&1; then exit 1; fi
tail -n 1 /tmp/log.json | jq -e --arg reason "$reason" '.level == "error" and (.msg | startswith("cryopod: checkpoint of c1 failed") and (ascii_downcase | contains($reason | ascii_downcase)))' > /dev/null || { cat /tmp/log.json; exit 1; }
if tail -n 1 /tmp/log.json | grep -q earlier; then cat /tmp/log.json; exit 1; fi
echo "ok: the runtime's reason"

if cryopod-runtime checkpoint --image-path /tmp/i3 --manage-cgroups-mode ignore c1 > /tmp/said 2>&1; then echo 'without cgroups: checkpointed'; exit 1; fi
grep -qF 'no restore takes one that was made with --manage-cgroups-mode ignore' /tmp/said || { cat /tmp/said; exit 1; }
[ "$(cryopod-runtime state c1 | jq -r .status)" = running ]
echo 'ok: without cgroups'

# The same at a restore: a container of that name runs already.
cryopod-runtime checkpoint --leave-running --image-path /tmp/i4 c1
echo '(00.1) Error (criu/old.c:1): of last week' > /tmp/w/restore.log
if cryopod-runtime --log /tmp/log.json --log-format json restore -d --image-path /tmp/i4 --work-path /tmp/w c1 < /dev/null > /tmp/said 2>&1; then exit 1; fi
if grep -q 'last week' /tmp/said; then echo 'an old log is quoted'; cat /tmp/said; exit 1; fi
tail -n 1 /tmp/log.json | jq -e '.msg | startswith("cryopod: restore of c1 refused") and test("already exists")' > /dev/null || { cat /tmp/log.json; exit 1; }
[ "$(cryopod-runtime state c1 | jq -r .status)" = running ]
cryopod-runtime delete --force c1
cryopod-runtime restore -d --image-path /tmp/i4 --work-path /tmp/w c1 < /dev/null > /dev/null 2>&1
[ "$(cryopod-runtime state c1 | jq -r .status)" = running ]
cryopod-runtime delete --force c1
echo 'ok: a restore'

# Whatever ends a dump, with a GPU node and without: the first line is cryopod's, and has the cause. Standard error is where
# containerd's own shim looks, for that line alone, and runc's is `criu failed: type NOTIFY errno 0`.
real=$(command -v criu)
mkdir /tmp/bin /tmp/full
fails() { # TITLE WANT [FLAG...]
    if PATH=/tmp/bin:$PATH cryopod-runtime --log /tmp/log.json --log-format json checkpoint --image-path "${to:-/tmp/i5}" --work-path /tmp/w "${@:3}" c1 > /tmp/said 2>&1; then echo "$1: checkpointed"; exit 1; fi
    head -n 1 /tmp/said | grep -q "^cryopod: .*$2" || { echo "$1:"; cat /tmp/said; exit 1; }
    [ "$(cryopod-runtime state c1 2> /dev/null | jq -r .status)" = "${then:-running}" ]
    echo "ok: $1"
}
at_stage() { # STAGE COMMAND
    printf '#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != %s ] || %s\n' "$@" > /tmp/act
}
cp /etc/criu/default.conf /tmp/criu.conf
for devices in '[]' '[{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}]'; do
    echo "devices: $devices"
    jq --argjson devices "$devices" '.linux.devices = $devices' config.json > /tmp/new && mv /tmp/new config.json
    cryopod-runtime run -d c1 < /tmp/file > /dev/null 2>&1
    wait_for in_program c1 sh
    fails 'a file of the host is open' 'CRIU: .*\|/tmp/file'
    cryopod-runtime delete --force c1
    cryopod-runtime run -d c1 < /dev/null > /dev/null 2>&1
    wait_for in_program c1 sh
    fails 'a flag' "[Ii]nvalid manage\|unknown cgroup mode" --manage-cgroups-mode bogus
    mv "$real" "$real.away"
    fails 'no CRIU' 'criu was not found on PATH'
    mv "$real.away" "$real"
    mount -t tmpfs -o size=64k full /tmp/full
    to=/tmp/full fails 'a full disk' 'No space left'
    umount /tmp/full
    printf '#!/bin/sh\n[ "$1" != swrk ] || kill -KILL $$\nexec %s "$@"\n' "$real" > /tmp/bin/criu
    chmod +x /tmp/bin/criu
    fails 'CRIU is killed at its start' "$low: CRIU"
    rm /tmp/bin/criu
    at_stage network-lock 'exit 1' && chmod +x /tmp/act
    echo 'action-script /tmp/act' >> /etc/criu/default.conf
    fails 'a script that stops the dump' 'Script /tmp/act exited'
    at_stage post-dump 'exit 1'
    fails 'a script that stops it at the end' 'Script /tmp/act exited'
    at_stage network-lock 'kill -KILL $PPID'
    fails 'CRIU is killed in the middle' 'CRIU was killed in the middle of it'
    at_stage post-dump 'kill -KILL $PPID'
    to=/tmp/end fails 'CRIU is killed at the end' 'CRIU was killed in the middle of it'
    # All images were there. Those of the second container would be restored without what the plugin has saved.
    if [ "$devices" != '[]' ] && cryopod verify -q /tmp/end 2> /dev/null; then echo 'complete without metadata'; exit 1; fi
    rm -rf /tmp/end
    at_stage network-lock "kill -KILL \$(ps -o ppid= -p \$PPID)"
    case $low$devices in # crun's CRIU asks nobody, and goes on to the end
    'crun[]') to=/tmp/end then=stopped fails 'the runtime is killed in the middle' "no longer running: $low was ended by SIGKILL.*are complete" ;;
    *) fails 'the runtime is killed in the middle' "$low was ended by SIGKILL" ;;
    esac
    wait_for sh -c '! pgrep -x criu > /dev/null' # its log is the next one's
    cp /tmp/criu.conf /etc/criu/default.conf
    rm -rf /tmp/end
    cryopod-runtime delete --force c1
done
