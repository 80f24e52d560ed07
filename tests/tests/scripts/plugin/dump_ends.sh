# dump_ends.sh: dumps that end badly for reasons outside of the driver.
simulate

start --mib 16
before_criu='touch /run/op/dump/abort' dump_fails
check 'called off' plugin_says '.error.cause | test("called off")'
check 'called off: the sum goes on' goes_on
stop

exec 9< /dev/fuse # CRIU cannot dump it, and finds that out after the GPU part
start --mib 16
exec 9<&-
dump_fails
check 'CRIU fails after the GPU part: the sum goes on' goes_on
check 'nothing was left to the agent' agent_says '.outcome == "clean"'
stop

start --mib 16
# shellcheck disable=SC2016
printf '#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != post-dump ]\n' > /tmp/act
chmod +x /tmp/act
dump_fails '' --action-script /tmp/act
check 'a post-dump script fails: who is left puts back' agent_says ".outcome == \"$(after_post_dump)\""
check 'and the sum goes on' goes_on
stop

start --mib 16
ctl set hang-checkpoint
no_criu() { ! pgrep -x criu > /dev/null; }
{ wait_for grep -qs ': lock in' /img/dump.log && sleep 0.3 && pkill -KILL -x criu && wait_for no_criu; ctl clear; } &
dump_fails
check 'CRIU is killed in the checkpoint: the agent puts back' agent_says '.outcome == "rolled-back"'
check 'and the sum goes on' goes_on
stop

# A process that someone else has locked or checkpointed is left so.
for steps in lock 'lock checkpoint'; do
    start --mib 16
    # shellcheck disable=SC2086
    step "$client_pid" $steps > /dev/null
    was=$(step "$client_pid" state)
    dump '{"leave_running": true}' --leave-running
    check "left running as found ($steps)" test "$(step "$client_pid" state | cut -d' ' -f3)" = "$(cut -d' ' -f3 <<< "$was")"
    rm -rf /img/*
    dump
    restore
    check "restored as found ($steps)" test "$(step "$client_pid" state | cut -d' ' -f3)" = "$(cut -d' ' -f3 <<< "$was")"
    if [ "$steps" != lock ]; then step "$client_pid" restore > /dev/null; fi
    step "$client_pid" unlock > /dev/null
    check "and the sum goes on ($steps)" goes_on
    stop
done

start --mib 16
mkdir -p /run/bare && cp /opt/build/libcryopod_nvidia.so /run/bare/cryopod_nvidia.so
! criu dump -t "$client_pid" -D /img -o dump.log -v4 -L /run/bare --network-lock skip
check 'without a configuration' grep -q 'cryopod: Error: configuration: /run/bare/cryopod_nvidia.json: cannot read' /img/dump.log
operation /run/op/dump checkpoint && end_operation
! criu dump -t "$client_pid" -D /img -o dump.log -v4 -L /run/op/dump/plugins --network-lock skip
check 'without an agent' plugin_says '.error.step == "driver agent"'
operation /run/op/dump restore
! criu dump -t "$client_pid" -D /img -o dump.log -v4 -L /run/op/dump/plugins --network-lock skip 7>&-
end_operation
check 'with the configuration of another operation' grep -q 'it is for Restore, CRIU does Checkpoint' /img/dump.log
check 'the sum goes on' goes_on
stop
