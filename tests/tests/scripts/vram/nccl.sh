# nccl.sh: ranks over NCCL, whose communicators leave and come back. After job.sh.
# shellcheck shell=bash disable=SC2154
program=cusim-nccl
glibc_image
shm() { echo "/proc/$(pgrep -n -x cusim-nccl)/root/dev/shm"; }
run_rootfs --ranks 2 --mib 8 --interval-ms 50
for times in once twice; do
    check "$times: checkpoint" does pod container checkpoint --export /tmp/job.tar job
    end
    check "$times: nothing is in use" used 'all(. == 0)'
    check "$times: restore" does pod container restore --import /tmp/job.tar
    check "$times: the sums go on" goes_on
done
check 'left running' does pod container checkpoint --leave-running --export /tmp/job.tar job
check 'left running: the sums go on' goes_on
id=$(pod inspect -f '{{.Id}}' job)
pod pause job > /dev/null # as docker and containerd do before a checkpoint
check 'paused: checkpoint' does cryopod-runtime checkpoint --leave-running --image-path /tmp/paused "$id"
pod unpause job > /dev/null
check 'paused: the sums go on' goes_on
set_switch hang-checkpoint:1
cryopod-runtime checkpoint --leave-running --image-path /tmp/killed "$id" > /tmp/said 2>&1 &
checkpoint=$!
wait_for hangs_at hang-checkpoint
pkill -9 -x cryopod-cuda-ag
clear_switches
code=0 && wait $checkpoint || code=$?
check 'the agent killed: said' test "$code" != 0
check 'the agent killed: the sums go on' goes_on
# Killed wherever it is: ranks wait for their GPUs' work, and destroy and make communicators, at different times.
touch "$(shm)/nccl-slow"
for after in 0.2 0.5 0.8 1.1 1.4; do
    cryopod-runtime checkpoint --leave-running --image-path "/tmp/killed.$after" "$id" > /tmp/said 2>&1 &
    checkpoint=$!
    sleep "$after"
    pkill -9 -x cryopod-cuda-ag || true
    wait $checkpoint || true
    check "the agent killed after $after s: the sums go on" goes_on
done
rm "$(shm)/nccl-slow"
check 'suspend' does cryopod suspend job
check 'suspended: nothing is in use' used 'all(. == 0)'
check 'resume' does cryopod resume job
check 'resumed: the sums go on' goes_on
for at in lock checkpoint; do
    /opt/build/cusim-ctl --socket "$sim" set fail-$at:1 > /dev/null
    check "$at fails: said" refused 'goes on running' cryopod-runtime checkpoint --image-path /tmp/no "$id"
    check "$at fails: the sums go on" goes_on
done
/opt/build/cusim-ctl --socket "$sim" clear > /dev/null
end

# A copy waits for its start, and nobody answers until then.
run_rootfs --ranks 2 --mib 8 --interval-ms 50
pod container checkpoint --export /tmp/job.tar job > /dev/null
end
printf '[restore]\nallow = [{ from = "/tmp" }]\n' >> /etc/cryopod/config.toml
extra=(--annotation dev.cryopod.restore=/tmp/job.tar)
check 'a copy: its sums go on' run_rootfs --ranks 2 --mib 8 --interval-ms 50
check 'a copy: checkpoint' does pod container checkpoint --export /tmp/copy.tar job
extra=()
end

# Ranks that do not come level.
printf '[nccl]\nquiesce_s = 2\n' >> /etc/cryopod/config.toml
prints() { printed job | grep "$1" > /dev/null; } # all of it is read: whoever prints would die of a closed pipe
run_rootfs --ranks 2 --interval-ms 50 --stay-at 60
touch "$(shm)/nccl-stay"
check 'a rank stays: it does' wait_for prints '^59 .* p1'
check 'a rank stays: said' refused 'did not come level within 2 s .*has made [0-9]+ of [0-9]+ collective calls' pod container checkpoint --export /tmp/no.tar job
rm "$(shm)/nccl-stay"
check 'a rank stays: the sums go on' goes_on
sed -i '/^\[nccl\]/,+1d' /etc/cryopod/config.toml
# Communicators that cannot be made again: the job sees NCCL's own error, and the checkpoint is whole.
touch "$(shm)/nccl-fail"
pod container checkpoint --leave-running --export /tmp/no.tar job > /tmp/said 2>&1 || true
check 'no communicators: said' grep -q "NCCL's communicators were not made again: .*NCCL's error 2" /tmp/said
check 'no communicators: the job sees it' wait_for prints "NCCL's error 6"
end

# What cannot be made again.
run_rootfs --ranks 2 --hinder window
check 'a window: said' refused 'has called ncclCommWindowRegister' pod container checkpoint --export /tmp/no.tar job
check 'a window: the sums go on' goes_on
end
run_rootfs --ranks 3 --mixed
check 'mixed: checkpoint' does pod container checkpoint --export /tmp/job.tar job
end
check 'mixed: restore' does pod container restore --import /tmp/job.tar
check 'mixed: the sums go on' goes_on
end

# Without the library: refused, and the message tells of it.
pod create --name job --network none --device /dev/nvidiactl --device /dev/nvidia-uvm --device /dev/nvidia0 --device /dev/nvidia1 \
    -v /run/cusim:/run/cusim -v /opt/cusim:/cusim:ro -e LD_LIBRARY_PATH=/cusim localhost/glibc /cusim/cusim-nccl --ranks 2 > /dev/null
pod start job > /dev/null
wait_for ticked 3
check 'without it: said' refused 'dev.cryopod.preload=on' pod container checkpoint --export /tmp/no.tar job
check 'without it: the sums go on' goes_on
end
check 'no operation is left' test -z "$(find /run/cryopod -mindepth 1 -maxdepth 1 -not -name suspended)"
