# preload.sh: GPU memory that the preload library hands over. After job.sh.
# shellcheck shell=bash disable=SC2154
glibc_image

# What the annotation asks for, and what it cannot have.
refuses_to_start() { # PATTERN ANNOTATION
    refused "$1" pod run --rm --annotation "$2" --network none localhost/busybox true
}
check 'a wrong value' refuses_to_start 'dev.cryopod.preload: "yes" is neither "on" nor "off"' dev.cryopod.preload=yes
check 'a container without glibc' refuses_to_start 'dev.cryopod.preload: the container has no glibc' dev.cryopod.preload=on

run_rootfs --mib 100 --chunk-mib 20 --gpus 0,1 --threads 2
last=$(sum)
check 'the library is in it' grep -q libcryopod_preload.so "/proc/$(pgrep -x cusim-client)/maps"
check 'left running' does pod container checkpoint --leave-running --export /tmp/job.tar job
check 'left running: handed over' recorded "$handed_over | length == 1 and .[0].bytes == 209715200"
check 'left running: the pause is recorded' sh -c 'cryopod inspect /tmp/job.tar | grep -q "^ *Pause .*could not work for"'
check 'left running: it goes on' goes_on
for times in once twice; do
    check "$times: checkpoint" does pod container checkpoint --export /tmp/job.tar job
    end
    check "$times: handed over" recorded "$handed_over | length == 1"
    check "$times: the driver has moved little" recorded '[.gpu.plugin_report.processes[].vram[] | select(.preload | not)] | length == 0'
    check "$times: inspect tells the way" sh -c 'cryopod inspect /tmp/job.tar | grep -q "copied 200.0 MiB through the preload library$"'
    check "$times: verified" does cryopod verify /tmp/job.tar
    # As after an update of cryopod, or on another host.
    rm -rf /var/lib/cryopod/preload
    check "$times: restore" does pod container restore --import /tmp/job.tar
    check "$times: it goes on" goes_on
    check "$times: the same sum" test "$(sum)" = "$last"
    check "$times: its memory is on the GPUs" used 'all(. > 100000000)'
done

check 'suspend' does cryopod suspend job
check 'suspended: nothing is in use' used 'all(. == 0)'
check 'resume' does cryopod resume job
check 'resumed: it goes on' goes_on
check 'suspend into files' does cryopod suspend --to /tmp/files job
check 'into files: nothing is in use' used 'all(. == 0)'
check 'resume from files' does cryopod resume job
check 'from files: it goes on' goes_on
for step in restore unlock; do
    for to in '' '--to /tmp/files'; do
        # shellcheck disable=SC2086
        check "$step fails ($to): suspend" does cryopod suspend $to job
        /opt/build/cusim-ctl --socket "$sim" set fail-$step:1 > /dev/null
        check "$step fails ($to): said" refused "it stays suspended.*: $step of process" cryopod resume job
        check "$step fails ($to): resume again" does cryopod resume job
        check "$step fails ($to): it goes on" goes_on
    done
done
/opt/build/cusim-ctl --socket "$sim" clear > /dev/null

# What fails leaves it running, with its memory.
id=$(pod inspect -f '{{.Id}}' job)
for at in lock checkpoint; do
    /opt/build/cusim-ctl --socket "$sim" set fail-$at:1 > /dev/null
    check "$at fails: said" refused 'goes on running' cryopod-runtime checkpoint --image-path /tmp/no "$id"
    check "$at fails: it goes on" goes_on
    check "$at fails: suspend says so" refused 'not suspended, and it runs on|goes on' sh -c "/opt/build/cusim-ctl --socket '$sim' set fail-$at:1 > /dev/null; cryopod suspend job"
    check "$at fails: and it goes on" goes_on
done
# It has been copied, and a part of it released, when the next part cannot be: all comes back, and the driver moves it.
/opt/build/cusim-ctl --socket "$sim" set "fail-unmap:1/1@$(pgrep -x cusim-client)" > /dev/null
check 'unmap fails: checkpoint' does pod container checkpoint --leave-running --export /tmp/job.tar job
check 'unmap fails: left to the driver' recorded "$handed_over | length == 0"
check 'unmap fails: it goes on' goes_on
end
check 'unmap fails: restore' does pod container restore --import /tmp/job.tar
check 'unmap fails: the restored one goes on' goes_on
check 'unmap fails: the same sum' test "$(sum)" = "$last"
id=$(pod inspect -f '{{.Id}}' job)
/opt/build/cusim-ctl --socket "$sim" clear > /dev/null
mkdir -p /tmp/small
for flag in '' --leave-running; do
    mount -t tmpfs -o size=40m tmpfs /tmp/small
    # shellcheck disable=SC2086
    check "a full disk ($flag): said" refused 'the container goes on running: .*No space left on device' cryopod-runtime checkpoint $flag --image-path /tmp/small --work-path /tmp "$id"
    check "a full disk ($flag): it goes on" goes_on
    umount /tmp/small
done
agent() { wait_for pgrep -x cryopod-cuda-ag > /dev/null && sleep "$1" && pkill -KILL -x cryopod-cuda-ag; }
for after in 0.2 0.6 1; do
    agent $after & killer=$!
    does cryopod-runtime checkpoint --leave-running --image-path /tmp/killed --work-path /tmp "$id" || true
    wait $killer || true
    rm -rf /tmp/killed
    # What the driver holds at that moment needs another agent.
    does cryopod resume job || true
    check "the agent is killed after $after s: it goes on" goes_on
done
end
# Two processes: their memory is written while both are copied.
run_rootfs --mib 160 --chunk-mib 16 --procs 2 --gpus 0,1
last=$(sum)
static=$(pod inspect -f '{{.StaticDir}}' job)
# The writer has a lower priority than the rest: the driver waits for it here.
written() { [ -n "$(find "$static/checkpoint" -name 'vram-0*.img' -size +0 2> /dev/null)" ]; }
set_switch hang-checkpoint:1
(wait_for hangs_at hang-checkpoint && wait_for written && clear_switches) &
check 'two: checkpoint' does pod container checkpoint --keep job
check 'two: handed over' jq -e "$handed_over | length == 2" "$static/checkpoint/cryopod.json"
check 'two: some was written ahead' grep -q '[1-9][0-9]* of [0-9]* chunks of GPU memory were written ahead' "$static/dump.log"
check 'two: restore' does pod container restore --keep job
check 'two: it goes on' goes_on
check 'two: the same sum' test "$(sum)" = "$last"
# One of them keeps its memory: when it is copied and partly released, or after the other one has been copied.
second=$(pgrep -nx cusim-client)
switch() { /opt/build/cusim-ctl --socket "$sim" set "$1@$second" > /dev/null; }
leaves() { # HOW SWITCH...
    local how=$1 && shift
    for switch; do switch "$switch"; done
    check "two, one $how: checkpoint" does pod container checkpoint --leave-running --export /tmp/job.tar job
    /opt/build/cusim-ctl --socket "$sim" clear > /dev/null
    check "two, one $how: the other's is handed over" recorded "$handed_over | length == 1"
    check "two, one $how: verified" does cryopod verify /tmp/job.tar
    check "two, one $how: it goes on" goes_on
}
leaves 'cannot release it' fail-unmap:1/1
# The first export of each of its ten pieces is for the copy ahead.
leaves 'cannot export it' slow-export=5000:1/10 fail-export:1/10
end
check 'two, one left: restore' does pod container restore --import /tmp/job.tar
check 'two, one left: it goes on' goes_on
check 'two, one left: the same sum' test "$(sum)" = "$last"
end

# Frees beside a capture, and questions about memory that is away: it ends if one fails.
run_rootfs --mib 64 --chunk-mib 16 --threads 2 --frees
for times in once twice; do
    check "frees, $times: left running" does pod container checkpoint --leave-running --export /tmp/job.tar job
    check "frees, $times: handed over" recorded "$handed_over | length == 1"
    check "frees, $times: it goes on" goes_on
done
end

# Without the library: as ever.
run --annotation dev.cryopod.preload=off --mib 100
check 'off: checkpoint' does pod container checkpoint --export /tmp/job.tar job
check 'off: nothing is handed over' recorded "$handed_over | length == 0"
end
# Images that claim a library which the process does not have.
mkdir /tmp/forged && tar -C /tmp/forged -xf /tmp/job.tar
jq -c '.version = 4 | .processes[].vram |= map(. + {preload: true, address: 0})' /tmp/forged/checkpoint/cryopod-nvidia.img > /tmp/img
cp /tmp/img /tmp/forged/checkpoint/cryopod-nvidia.img
tar -C /tmp/forged -cf /tmp/forged.tar .
check 'no library in it: the restore fails' refused 'the preload library, which its GPU memory belongs to, is not in it' pod container restore --import /tmp/forged.tar
check 'no library in it: nothing is left' wait_for sh -c '! pgrep -x cusim-client'
end
# Images without the memory from which the driver restores: it faults, in the init process of the container.
jq -c '.processes[].vram = []' /tmp/img > /tmp/forged/checkpoint/cryopod-nvidia.img
tar -C /tmp/forged -cf /tmp/forged.tar .
check 'no memory in it: the restore fails' refused "signal 11 ended it in the driver's thread" pod container restore --import /tmp/forged.tar
check 'no memory in it: nothing is left' wait_for sh -c '! pgrep -x cusim-client'
end
check 'off: restore' does pod container restore --import /tmp/job.tar
check 'off: it goes on' goes_on
end
check 'no operation is left' test -z "$(find /run/cryopod -mindepth 1 -maxdepth 1 -not -name suspended)"
