# keep.sh: a copy of GPU memory that stays in host memory between suspends. After job.sh.
# shellcheck shell=bash disable=SC2154
glibc_image
keep() { sed -i '/^\[suspend\]/,$d' /etc/cryopod/config.toml && printf '[suspend]\nkeep = %s\n' "$1" >> /etc/cryopod/config.toml; }
pid() { pgrep -x cusim-client; }
# What `cryopod top` says is kept, in MiB.
kept() { cryopod top --json | jq "[.[] | select(.step == \"copy kept\").done_bytes] | add // 0 | . / 1048576 | floor"; }
moved() { sed -nE 's/.*in host memory, ([0-9]+)\.[0-9] MiB moved$/\1/p' /tmp/said; }
between() { # LOW HIGH NUMBER
    [ "$3" -ge "$1" ] && [ "$3" -le "$2" ] || { echo "$3"; false; }
}
turn() { # WHAT LOW HIGH: suspends, and resumes; the suspend moves from LOW to HIGH MiB
    check "$1: suspend" does cryopod suspend job
    check "$1: moved $2 to $3 MiB" between "$2" "$3" "$(moved)"
    check "$1: nothing is in use" used 'all(. == 0)'
    check "$1: resume" does cryopod resume job
    check "$1: it goes on" goes_on
}
run_rootfs --mib 100 --chunk-mib 20 --gpus 0,1 --train-mib 30
check 'without the key: suspend' does cryopod suspend job
check 'without the key: it says nothing of it' test -z "$(moved)"
check 'without the key: resume' does cryopod resume job
check 'without the key: nothing is kept' test "$(kept)" = 0
keep 1
turn 'first' 200 200
check 'first: the copy is kept' between 200 210 "$(kept)"
check 'resume says so' grep -q 'of host memory keep the copy' /tmp/said
# Not more than some ticks change.
turn 'second' 1 99
turn 'third' 1 99
check 'third: the copy is still as large' between 200 210 "$(kept)"

# Whoever holds the copy dies, or the driver fails: the container goes on, and what comes next is right.
killed() { # PROGRAM STEP VERB
    local switch=hang-$2 verb
    if [ "$2" = lock ]; then switch=hang-lock-forever; fi
    set_switch "$switch:1"
    does cryopod "$3" job & verb=$!
    wait_for hangs_or_ended "$switch" "$verb"
    pkill -KILL -x "$1" || true
    clear_switches
    wait "$verb" || true
    wait_for no_agent
    does cryopod resume job || true
    check "$1 is killed at $2: it goes on" goes_on
}
for step in export launch unmap lock checkpoint; do killed cryopod-cuda-ag $step suspend; done
killed cryopod checkpoint suspend
turn 'killed' 1 200
check 'killed: suspend' does cryopod suspend job
killed cryopod-cuda-ag restore resume
turn 'after that' 1 200
check 'killed: suspend once more' does cryopod suspend job
killed cryopod-cuda-ag unlock resume
turn 'and after that' 1 200
set_switch "fail-unmap:1/1@$(pid)"
does cryopod suspend job || true
clear_switches
does cryopod resume job || true
check 'unmap fails: it goes on' goes_on
turn 'unmap failed' 1 200

set_switch fail-launch:1
turn 'no digests' 200 200
clear_switches
check 'no digests: nothing is kept' test "$(kept)" = 0

# Limits, checkpoints and ends.
check 'a checkpoint' does pod container checkpoint --leave-running --export /tmp/job.tar job
check 'a checkpoint has no copy' test "$(tar -tvf /tmp/job.tar | awk '$3 > 260000000' | wc -l)" = 0
check 'a checkpoint: nothing is kept' test "$(kept)" = 0
check 'a checkpoint: it goes on' goes_on
turn 'after a checkpoint' 200 200
check 'without the key again: suspend' does sh -c "sed -i '/^\[suspend\]/,\$d' /etc/cryopod/config.toml; cryopod suspend job"
check 'without the key again: resume' does cryopod resume job
check 'without the key again: nothing is kept' test "$(kept)" = 0
keep 1
turn 'first again' 200 200
memory() { awk '/^Shmem:/ {print int($2 / 1024)}' /proc/meminfo; }
before=$(memory)
check 'suspended at the end' does cryopod suspend job
end
check 'removed while suspended: nothing is in use' used 'all(. == 0)'
freed() { [ "$(memory)" -le $((before - 190)) ]; }
check 'removed while suspended: its copy is gone' wait_for freed
run_rootfs --mib 540 --chunk-mib 30 --procs 2 --gpus 0,1
check 'larger than the limit: suspend and resume' does sh -c 'cryopod suspend job && cryopod resume job'
check 'larger than the limit: it goes on' goes_on
check 'larger than the limit: nothing is kept' test "$(kept)" = 0
end
run_rootfs --mib 100 --chunk-mib 20 --gpus 0,1
turn 'one more' 200 200
check 'one more: kept' between 200 210 "$(kept)"
before=$(memory)
pkill -KILL -x cusim-client
check 'killed: its copy is gone' wait_for freed
end
check 'no operation is left' test -z "$(find /run/cryopod -mindepth 1 -maxdepth 1 -not -name suspended)"
