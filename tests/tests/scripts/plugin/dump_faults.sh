# dump_faults.sh: whatever the driver does at a dump, the process goes on running.
simulate

fault() { # SWITCH CONDITION [LIMITS]: the dump fails with this report, and the sum goes on
    start --mib 16
    ctl set "$1"
    dump_fails "${3:-}"
    plugin_says ".outcome == \"failed\" and .error.pid == $client_pid and .error.comm == \"cusim-client\" and ($2)"
    ctl clear
    check "$1" goes_on
    check "$1: left as found" sh -c "[ \"\$(LD_LIBRARY_PATH=/opt/cusim /opt/build/cusim-step $client_pid state | tail -n 1 | cut -d' ' -f3)\" = running ]"
    stop
}
fault fail-checkpoint=CUDA_ERROR_NOT_SUPPORTED '.error.step == "checkpoint" and (.error.cause | test("NOT_SUPPORTED")) and (.error.remedy | test("managed memory"))'
fault fail-checkpoint '.error.step == "checkpoint"'
fault fail-checkpoint=CUDA_ERROR_OUT_OF_MEMORY '.error.remedy | test("memory")'
fault fail-lock '.error.step == "lock"'
fault fail-lock=CUDA_ERROR_NOT_SUPPORTED '.error.step == "lock"'
fault hang-lock '.error.step == "lock" and (.error.remedy | test("lock_timeout_ms"))' '{"lock_timeout_ms": 700}'
fault fail-get-state '.error.step == "query"'

# A driver call that hangs is given up; when it returns at last, the agent undoes what it did.
hanging() {
    start --mib 16
    ctl set "$1"
    rm -f /run/op/dump/plugin-report.json
    (wait_for test -s /run/op/dump/plugin-report.json && sleep 0.5 && ctl clear) &
    clearer=$!
    # Not so soon that a slow machine gives up another step.
    dump_fails '{"lock_timeout_ms": 700, "step_timeout_ms": 5000}'
    check "$1: given up" plugin_says '.error.cause | test("did not return within")'
    check "$1: undone when it returned" agent_says '.outcome == "rolled-back" and .processes[0].left == "running"'
    check "$1: the sum goes on" goes_on
    wait "$clearer"
    stop
}
hanging hang-lock-forever
hanging hang-checkpoint

# What nobody can undo is said.
start --mib 16
ctl set break-checkpoint
dump_fails
check 'break-checkpoint' agent_says '.outcome == "rollback-failed" and .processes[0].left == "failed"'
check 'and the agent says so' test "$agent_code" = 2
ctl clear
dump_fails
check 'a failed process is refused' plugin_says '.error.step == "query" and (.error.cause | test("failed"))'
stop

start --mib 16
ctl set cuinit-race
dump
check 'the race with cuInit is tried once more' wait_for gone

# One of several processes fails: the others are put back too.
start --mib 16 --procs 3
victim=$(pgrep -x cusim-client | tail -n 1)
ctl set "fail-checkpoint@$victim"
dump_fails
check 'one of three fails' plugin_says ".error.pid == $victim"
check 'all three go on' goes_on
ctl clear
dump
restore
check 'and can be dumped then' goes_on
stop
