# main.sh: dump and restore of CUDA processes, as they come in containers.
simulate

start --mib 32
dump
check 'the image names the process and its steps' says /img/cryopod-nvidia.img '.version == 1 and .cuda_version == 13000
    and (.processes | length == 1 and .[0].comm == "cusim-client" and .[0].initial_state == "running"
        and ([.[0].steps[].step] == ["query", "lock", "checkpoint"]) and .[0].vram_bytes > 32 * 1048576)'
check 'the dumped process is gone' wait_for gone
check 'nothing is left to the agent' agent_says '.outcome == "clean"'
restore
check 'one process: the sum goes on' goes_on
check 'the restore is timed' says /run/op/restore/plugin-report.json \
    '.outcome == "done" and [.processes[0].steps[].step] == ["restore", "unlock"]'
dump
restore
check 'a restored process is dumped and restored again' goes_on
stop

start --mib 16 --procs 4 --gpus 0,1
ctl set slow-checkpoint=5000 slow-restore=5000
dump "{\"pids\": [$(pgrep -x -d, cusim-client)]}"
restore
check 'four processes on two GPUs: the sums go on' goes_on
each() { # STEP FILE: the spread of the four processes' times, 50 s in all if one after the other
    jq -e "[.processes[].steps[] | select(.step == \"$1\") | .micros] | length == 4 and add < 4 * 10000000" "$2" > /dev/null
}
check 'their checkpoints were timed' each checkpoint /img/cryopod-nvidia.img
check 'their restores were timed' each restore /run/op/restore/plugin-report.json
between() { # LOG FROM TO: milliseconds between two lines of CRIU's log
    awk -v from="$2" -v to="$3" 'function ms(s) {gsub(/[()]/, "", s); return s * 1000}
        index($0, from) {a = ms($1)} index($0, to) {b = ms($1)} END {exit !(b - a < 15000)}' "$1"
}
check 'their checkpoints overlapped' between /img/dump.log ': lock in' ': checkpoint in'
stop

start --mib 16 --fork-idle 2 --leak-fd --threads 2
dump
check 'device files that the driver left open are recorded' says /img/cryopod-nvidia.img \
    '.files | length > 0 and all(.path | startswith("/dev/nvidia"))'
restore
check 'forked children without CUDA and leaked device files: the sum goes on' goes_on
check 'the files are open again' sh -c 'ls -l /proc/[0-9]*/fd 2> /dev/null | grep -q /dev/nvidiactl'
stop

start --mib 16
dump '{"leave_running": true}' --leave-running
check 'left running: the sum goes on' goes_on
stop

start --mib 16 --gpus 0
dump
restore "{\"gpu_map\": [{\"old\": \"$GPU0\", \"new\": \"$GPU1\"}, {\"old\": \"$GPU1\", \"new\": \"$GPU0\"}]}"
check 'restored onto the other GPU: the sum goes on' goes_on
check 'and it is there' sh -c "/opt/build/cusim-ctl --socket $SIM status | jq -e '.clients | all(.gpus | keys == [\"$GPU1\"])'"
stop

setsid sleep 100 < /dev/null > /tmp/out 2>&1 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 10>&- 11>&- 12>&- 13>&- 14>&- 15>&- &
client_pid=$! && disown
asleep() { [ "$(cat "/proc/$client_pid/comm")" = sleep ]; } # no longer the shell that starts it
wait_for asleep
rm -rf /img/*
dump
check 'a process without CUDA leaves no image' test ! -e /img/cryopod-nvidia.img
restore
check 'and is restored' pkill -x sleep
