# panics.sh: a hook that panics is an error for CRIU, and the process lives. Needs a plugin with test-hooks.
export PLUGIN=/opt/test-hooks/libcryopod_nvidia.so
simulate
for hook in pause checkpoint; do
    start --mib 16
    dump_fails "{\"test_panic_in\": \"$hook\"}"
    check "panic in $hook: an error for CRIU" plugin_says ".error.step == \"$hook\" and .error.cause == \"internal error\""
    check "panic in $hook: the sum goes on" goes_on
    stop
done
start --mib 16
try_dump '{"test_panic_in": "exit"}' || true
check 'panic at the exit: CRIU ends as it would' wait_for gone
restore
check 'and its images are good' goes_on
stop
start --mib 16 --fork-idle 1
dump_fails '{"test_panic_in": "dump file"}'
check 'panic in a device file: the sum goes on' goes_on
stop
start --mib 16
dump
restore_fails '{"test_panic_in": "resume"}'
check 'panic at the restore: nothing is left' wait_for gone
restore
check 'and the images are good' goes_on
stop
