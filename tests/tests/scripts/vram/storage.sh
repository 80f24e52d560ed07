# storage.sh: GPU memory that the driver's custom storage hands to the agent, with CRIU alone. After plugin/lib.sh.
# shellcheck shell=bash disable=SC2154
simulate --driver 615.10 --log /tmp/cusim.log
on='{"vram": {"required": true, "custom_storage": true}}'
running='{"vram": {"required": true, "custom_storage": true}, "leave_running": true}'
last() { tail -n 1 /tmp/out | cut -d' ' -f2; }
small() { [ "$(cat /img/pages-*.img | wc -c)" -lt $((32 << 20)) ]; }
unmapped() { ! grep -q 'deleted' "/proc/$(pgrep -x cusim-client | head -n 1)/maps"; }
by_storage='.processes | all(.vram | length == 1 and all(.custom_storage and .address == 0))'
slowed() { grep -qs "\"slow-$1\"" /tmp/cusim.log; } # since the log was emptied
slow() { # STEP MS
    : > /tmp/cusim.log
    ctl set "slow-$1=$2"
}
printf '[nvidia]\nplugin = "/opt/build/libcryopod_nvidia.so"\nagent = "/opt/build/cryopod-cuda-agent"\nlibcuda = ["/opt/cusim/libcuda.so.1"]\n' > /tmp/config.toml
does_resume() { CRYOPOD_CONFIG=/tmp/config.toml /opt/build/cryopod resume "pid:$client_pid" > /tmp/said 2>&1 || { cat /tmp/said && false; }; }
state() { step "$client_pid" state | cut -d' ' -f3; }
is() { [ "$(state)" = "$1" ]; }

cycle() { # NAME cusim-client ARG...
    local name=$1 sum && shift
    start "$@"
    sum=$(last)
    dump "$on"
    check "$name: by custom storage" plugin_says "$by_storage"
    check "$name: not in CRIU's images" small
    restore "$on"
    check "$name: restored" goes_on
    check "$name: the same sum" test "$(last)" = "$sum"
    check "$name: nothing is left of it" unmapped
    stop
}
cycle random --mib 100
cycle small --mib 1
cycle zero --mib 200 --content zero
cycle '1 GiB' --mib 1024 --chunk-mib 512
cycle 'a process on two GPUs' --mib 60 --gpus 0,1
cycle 'two processes on two GPUs' --mib 80 --procs 2 --gpus 0,1

start --mib 100
sum=$(last)
for times in once twice; do
    rm -rf /img/*
    dump "$running" --leave-running
    check "left running, $times: it goes on" goes_on
    check "left running, $times: nothing is left of it" unmapped
done
restored_sum() { test "$(last)" = "$sum"; }
check 'left running: the same sum' restored_sum
stop

# Onto the other GPU.
start --mib 100
sum=$(last)
dump "$on"
restore "{\"vram\": {\"custom_storage\": true}, \"gpu_map\": [{\"old\": \"$GPU0\", \"new\": \"$GPU1\"}, {\"old\": \"$GPU1\", \"new\": \"$GPU0\"}]}"
check 'onto the other GPU: restored' goes_on
check 'onto the other GPU: the same sum' restored_sum
stop

# Not used: off, or the host lacks memory for it.
start --mib 100
dump '{"vram": {"required": true}}'
check 'off: as ever' plugin_says '.processes | all(.vram | all(.custom_storage | not) and all(.address > 0))'
restore "$on"
check 'off: restored' goes_on
stop
start --mib 100
sed 's/^MemAvailable:.*/MemAvailable:     100000 kB/' /proc/meminfo > /tmp/meminfo
mount --bind /tmp/meminfo /proc/meminfo
dump '{"vram": {"custom_storage": true}}'
umount /proc/meminfo
check 'too little memory: said' grep -q 'custom storage is not used: .*MiB are available' /img/dump.log
restore "$on"
check 'too little memory: restored' goes_on
stop

# What fails later leaves the process running, with its memory.
start --mib 100
ctl set fail-copy:1/2
dump "$running" --leave-running
check 'a copy fails once: it goes on' goes_on
stop
start --mib 100
mount -t tmpfs -o size=40m tmpfs /img
dump_fails "$on"
check 'a full disk: said' plugin_says '.error.cause | test("vram-000..img: cannot be written: No space")'
check 'a full disk: it goes on' goes_on
check 'a full disk: nothing is left of it' unmapped
umount /img
stop
worker() { pgrep -f '^/proc/self/exe --vram-worker' > /dev/null; }
start --mib 100
(wait_for worker && pkill -KILL -f '^/proc/self/exe --vram-worker') &
dump_fails '{"vram": {"custom_storage": true, "codec": "zstd", "level": 19}}'
check 'the writer is killed: said' plugin_says '.error.cause | test("worker ended without an answer")'
check 'the writer is killed: it goes on' goes_on
stop
action_script='{"vram": {"required": true, "custom_storage": true}, "action_script_file": "/etc/passwd"}'
# shellcheck disable=SC2016
printf '#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != post-dump ] || kill -KILL $PPID\n' > /tmp/act
chmod +x /tmp/act
start --mib 100
dump_fails "$action_script" --action-script /tmp/act
check 'CRIU is killed while the memory is away: the agent puts it back' agent_says '.outcome == "rolled-back"'
check 'CRIU is killed: it goes on' goes_on
stop
start --mib 100
slow copy 200
(wait_for slowed copy && pkill -KILL -x criu) &
dump_fails "$on" 2> /dev/null
check 'CRIU is killed while it is copied: the agent puts it back' agent_says '.outcome == "rolled-back"'
ctl clear
check 'CRIU is killed while it is copied: it goes on' goes_on
stop

# The agent is killed at each step. In the driver's call, and while it copies, the driver's operation stays open.
agent_dies() { wait_for "$@" && pkill -KILL -x cryopod-cuda-ag; }
start --mib 100
slow checkpoint 3000
agent_dies slowed checkpoint &
dump_fails "$on" 2> /dev/null
ctl clear
check 'the agent is killed in the call: said' plugin_says '.error.step == "driver agent"'
check 'the agent is killed in the call: the driver waits to be told that it is complete' wait_for is 4
stop
start --mib 100
slow copy 500
agent_dies slowed copy &
dump_fails "$on" 2> /dev/null
ctl clear
check 'the agent is killed while it copies: said' plugin_says '.error.step == "driver agent" and (.error.remedy | test("restart"))'
check 'the agent is killed while it copies: the images are no checkpoint' test ! -e /img/vram-index.img
check 'the agent is killed while it copies: the process is stopped for good' is 4
stop
# Complete: the process keeps its memory, and another agent brings it back.
# shellcheck disable=SC2016
printf '#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != post-dump ] || { pkill -KILL -x cryopod-cuda-ag; false; }\n' > /tmp/act
start --mib 100
sum=$(last)
dump_fails "$action_script" --action-script /tmp/act 2> /dev/null
check 'the agent is killed afterwards: the process keeps its memory' grep -q 'cryopod: .* keeps its GPU memory in host memory' /img/dump.log
check 'the agent is killed afterwards: it is checkpointed' is checkpointed
check 'the agent is killed afterwards: another one brings it back' does_resume
check 'the agent is killed afterwards: it goes on' goes_on
check 'the agent is killed afterwards: the same sum' restored_sum
check 'the agent is killed afterwards: nothing is left of it' unmapped
stop

# Restores.
start --mib 100
dump "$on"
cp /img/vram-0000.img /tmp/shard
for at in 100 5000000; do
    damage /img/vram-0000.img $at
    restore_fails "$on"
    check "damaged at $at: said" grep -Eq 'cryopod: Error: .*vram-0000.img: chunk .* does not fit its digest' /img/restore.log
    check "damaged at $at: nothing is left" wait_for gone
    cp /tmp/shard /img/vram-0000.img
done
for switch in fail-restore:1 fail-copy fail-complete:1; do
    ctl set $switch
    restore_fails "$on"
    check "$switch: nothing is left" wait_for gone
    ctl clear
    wait_for freed
done
slow copy 500
agent_dies slowed copy &
restore_fails "$on" 2> /dev/null
ctl clear
check 'the agent is killed in a restore: nothing is left' wait_for gone
wait_for freed
restore "$on"
check 'and then it is restored' goes_on
stop
