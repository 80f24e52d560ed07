# fails.sh: each step of the VRAM files fails once. The memory then goes another way, or the dump fails and the process goes
# on; never is a sum wrong. Needs a plugin that can be told to fail.
simulate
PLUGIN=/opt/test-hooks/libcryopod_nvidia.so
vram() { jq -e "$1" /run/op/dump/plugin-report.json > /dev/null || { cat /run/op/dump/plugin-report.json && false; }; }

# `written`: after the writer has ended well.
for at in open map write empty written; do
    start --mib 100
    dump "{\"vram\": {\"test_fail_at\": \"$at\"}}"
    check "$at: through CRIU" vram '.vram == null and (.vram_left_out | length > 0)'
    check "$at: no trace of the VRAM files" test ! -e /img/vram-index.img
    restore
    check "$at: restored" goes_on
    stop
    start --mib 100
    dump_fails "{\"vram\": {\"required\": true, \"test_fail_at\": \"$at\"}}"
    check "$at: required, and so a failure" plugin_says '.error.cause | test("the VRAM files cannot be used")'
    check "$at: the process goes on" goes_on
    stop
done

start --mib 100
for at in back back-map; do
    rm -rf /img/*
    dump "{\"vram\": {\"required\": true, \"test_fail_at\": \"$at\"}, \"leave_running\": true}" --leave-running
    check "$at: it goes on all the same" goes_on
done
stop

start --mib 100
dump '{"vram": {"required": true}}'
restore '{"vram": {"test_fail_at": "in"}}'
check 'in: restored' goes_on
stop
start --mib 100
dump '{"vram": {"required": true}}'
restore '{"vram": {"test_fail_at": "userfault"}}'
check 'userfault: the driver waits' grep -q 'the driver waits until all has been read: test' /img/restore.log
check 'userfault: restored' goes_on
stop
unset PLUGIN

start --mib 100
sed 's/^MemAvailable:.*/MemAvailable:     100000 kB/' /proc/meminfo > /tmp/meminfo
mount --bind /tmp/meminfo /proc/meminfo
dump '{"vram": {}}'
umount /proc/meminfo
check 'too little memory: through CRIU' vram '.vram_left_out | test("MiB are available")'
restore '{"vram": {}}'
check 'too little memory: restored' goes_on
rm -rf /img/*
dump '{"vram": {"required": true}}'
mount --bind /tmp/meminfo /proc/meminfo
restore_fails
umount /proc/meminfo
check 'too little memory at the restore: said' grep -q 'cryopod: Error: .*MiB of host memory are needed' /img/restore.log
restore
check 'and with enough it is restored' goes_on
stop

start --mib 100
mount -t tmpfs -o size=40m tmpfs /img
dump_fails '{"vram": {}}'
check 'a full disk: said' plugin_says '.error.cause | test("vram-000..img: cannot be written: No space")'
check 'a full disk: the process goes on' goes_on
umount /img
stop

worker() { pgrep -f '^/proc/self/exe --vram-worker' > /dev/null; }
# It works for a moment only, which a look now and then may miss.
met() { local end=$((SECONDS + 300)) && until worker; do [ "$SECONDS" -lt "$end" ]; done; }
kill_worker() { met && pkill -KILL -f '^/proc/self/exe --vram-worker'; }
start --mib 100
kill_worker &
dump_fails '{"vram": {"codec": "zstd", "level": 19}}' # slow enough to be met at work
check 'the writer is killed: said' plugin_says '.error.cause | test("worker ended without an answer")'
check 'the writer is killed: nothing that could be taken for VRAM files' test ! -e /img/vram-index.img
check 'the writer is killed: the process goes on' goes_on
stop

# Left running, the writer is killed when the process runs again: it goes on, and there is nothing to restore from.
start --mib 100
kill_worker &
dump_fails '{"vram": {"codec": "zstd", "level": 19}, "leave_running": true}' --leave-running
check 'left running, the writer is killed: nothing that could be taken for VRAM files' test ! -e /img/vram-index.img
check 'left running, the writer is killed: it goes on' goes_on
stop

# The application is killed while the driver copies, and while its memory is written.
start --mib 100
ctl set hang-checkpoint
(wait_for grep -qs 'lock in' /img/dump.log && pkill -KILL -x cusim-client && ctl clear) &
killer=$!
dump_fails '{"vram": {}}'
wait "$killer"
check 'killed while the driver copies: the dump fails' plugin_says '.outcome == "failed"'
check 'killed while the driver copies: nothing is left' wait_for gone
check 'killed while the driver copies: no VRAM files' test ! -e /img/vram-index.img
stop
start --mib 100
(met && pkill -KILL -x cusim-client) &
killer=$!
dump_fails '{"vram": {"codec": "zstd", "level": 19}}'
wait "$killer"
check 'killed while its memory is written: nothing is left' wait_for gone
check 'killed while its memory is written: the agent ends' test "$agent_code" = 0
stop

# From here on as with an action script: CRIU asks at post-dump, and the memory is away at that time.
action_script='{"vram": {"required": true}, "action_script_file": "/etc/passwd"}'
printf '#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != post-dump ] || kill -KILL $PPID\n' > /tmp/act
chmod +x /tmp/act
start --mib 100
dump_fails "$action_script" --action-script /tmp/act
check 'CRIU is killed while the memory is away: the agent puts it back' agent_says '.outcome == "rolled-back"'
check 'and the process goes on' goes_on
stop

# shellcheck disable=SC2016
printf '#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != post-dump ]\n' > /tmp/act
start --mib 100
dump_fails "$action_script" --action-script /tmp/act
check 'a post-dump script fails: the memory is put back' agent_says ".outcome == \"$(after_post_dump)\""
check 'and the process goes on' goes_on
stop

printf '#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != post-dump ] || { pkill -KILL -x cryopod-cuda-ag; false; }\n' > /tmp/act
start --mib 100
dump_fails "$action_script" --action-script /tmp/act 2> /dev/null
check 'the agent is killed while the memory is away: the plugin says so' plugin_says '.error.step == "driver agent"'
step "$client_pid" restore > /dev/null
step "$client_pid" unlock > /dev/null
check 'and has put it back: the driver can restore the process' goes_on
stop

start --mib 100
dump '{"vram": {}}'
cp /img/vram-0000.img /tmp/shard
damage /img/vram-0000.img 5000000
restore_fails
check 'a damaged shard: said' grep -Eq 'cryopod: Error: .*vram-0000.img: chunk .* does not fit its digest' /img/restore.log
check 'a damaged shard: nothing is left' wait_for gone
cp /tmp/shard /img/vram-0000.img
restore_fails "{\"vram\": {\"digest\": \"$(printf '0%.0s' {1..64})\"}}"
wait_for gone
check 'another table than the recorded one: said' grep -q 'not the one that the checkpoint was made with' /img/restore.log
mv /img/vram-index.img /tmp/
restore_fails
wait_for gone
check 'no table: said' grep -q 'vram-index.img is missing' /img/restore.log
mv /tmp/vram-index.img /img/
restore
check 'whole again: restored' goes_on
stop
