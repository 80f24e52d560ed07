# application.sh LOW: the application takes part in its checkpoint and restore, by the annotations dev.cryopod.exec.*.
low=$1
mkimage
low_level "$low"
from=/srv/checkpoints
mkdir -p "$from"
printf '[restore]\nallow = ["%s"]\n' "$from" >> /etc/cryopod/config.toml
mkdir -p /etc/containers/containers.conf.d
echo -e '[engine]\nruntime_supports_json = ["crun", "runc", "cryopod-runtime"]' > /etc/containers/containers.conf.d/json.conf
on_failure() { cat /tmp/said; printed server; }
# shellcheck disable=SC2016
loop='echo awake > /state; while :; do tee /shown < /state; sleep 0.1; done'
server() { # NAME ARG...
    local name=$1 && shift
    pod run -d --name "$name" --network none "$@" localhost/busybox sh -c "$loop" > /dev/null
    wait_for is_now "$name" awake
}
is_now() { printed "$1" | tail -n 1 | grep -qx "$2"; }
before=dev.cryopod.exec.before-checkpoint after=dev.cryopod.exec.after-checkpoint restored=dev.cryopod.exec.after-restore

# It sleeps in the images, and awakes wherever it runs. Its command ends when it has said so.
server server --annotation "$before=echo asleep > /state; until grep -qx asleep /shown; do sleep 0.1; done" --annotation "$after=[\"/bin/sh\", \"-c\", \"echo again > /state\"]" \
    --annotation "$restored=echo restored > /state"
check 'checkpoint, left running' pod container checkpoint --leave-running -e "$from/left.tar.zst" server
check 'it was told that it goes on' wait_for is_now server again
check 'it slept before' sh -c "podman logs server 2>&1 | grep -qx asleep"
check 'checkpoint' pod container checkpoint -e "$from/server.tar.zst" server
check 'asleep in the images' wait_for is_now server asleep # conmon may have it still to write
podman rm -f -t 0 server > /dev/null
check 'restore' pod container restore --import "$from/server.tar.zst"
check 'it was told that it is restored' wait_for is_now server restored
podman rm -f -t 0 server > /dev/null
check 'a copy' pod run -d --name copy --network none --annotation "dev.cryopod.restore=$from/server.tar.zst" \
    --annotation "$restored=echo copy > /state" localhost/busybox true
check 'the copy was told' wait_for is_now copy copy
podman rm -f -t 0 copy > /dev/null

fails() { # NAME WANT ARG...: the checkpoint fails, and the container goes on
    local name=$1 want=$2 && shift 2
    server server "$@" --annotation "$after=echo again > /state"
    if pod container checkpoint server > /tmp/said 2>&1; then echo "$name: no error" && exit 1; fi
    check "$name" grep -qF -- "$want" /tmp/said
    check 'it was told that it goes on' wait_for is_now server again
    podman rm -f -t 0 server > /dev/null
}
fails 'a command that fails' 'it failed with exit code 3: no room' --annotation "$before=echo no room >&2; exit 3"
fails 'a command that hangs' 'it did not end within 10 s and was killed' --annotation "$before=exec sleep 4321" --annotation dev.cryopod.exec.limit=10
check 'nothing is left of it' sh -c '! ps ax | grep -v grep | grep -F "sleep 4321"'
fails 'no such program' 'dev.cryopod.exec.before-checkpoint' --annotation "$before=[\"/none\"]"
if pod run -d --name none --annotation dev.cryopod.exec.limit=0 localhost/busybox true > /tmp/said 2>&1; then exit 1; fi
check 'no limit' grep -qF 'dev.cryopod.exec.limit: "0" is not within 1 and' /tmp/said
podman rm -f -t 0 none > /dev/null 2>&1 || true
check 'no operation is left' test -z "$(ls -A /run/cryopod)"

# After a restore the container runs, whatever its command does.
server server --annotation "$before=true" --annotation "$restored=exit 5"
pod container checkpoint server > /dev/null
check 'a command that fails after the restore' pod container restore server
check 'it runs' test "$(podman inspect -f '{{.State.Status}}' server)" = running
podman rm -f -t 0 server > /dev/null
