# podman.sh LOW: CUDA containers under podman with cryopod-runtime, on the simulated driver: run, checkpoint,
# remove, restore from the archive; the sums go on.
low=$1
mkimage
simulate "$low"

run() { # cusim-client ARG...
    pod run -d --name job --network none --device /dev/nvidiactl --device /dev/nvidia-uvm \
        --device /dev/nvidia0 --device /dev/nvidia1 \
        -v /run/cusim:/run/cusim -v /opt/cusim:/cusim:ro -e LD_LIBRARY_PATH=/cusim \
        -v /usr/lib/x86_64-linux-gnu:/lib/x86_64-linux-gnu:ro -v /usr/lib64:/lib64:ro \
        localhost/busybox /cusim/cusim-client "$@" > /dev/null
    wait_for ticked 3
}
ticks() { printed job | grep -c ok || true; }
ticked() { [ "$(ticks)" -ge "$1" ]; }
on_failure() { printed job | tail -n 5; }
goes_on() {
    local now && now=$(ticks)
    wait_for ticked $((now + 3)) && ! printed job | grep CORRUPT
}
cycle() { # NAME cusim-client ARG...
    local name=$1 && shift
    run "$@"
    local last times
    last=$(printed job | tail -n 1 | cut -d' ' -f2)
    pod container checkpoint --leave-running --export /tmp/job.tar job > /dev/null
    check "$name: left running" goes_on
    for times in once twice; do
        pod container checkpoint --export /tmp/job.tar job > /dev/null
        pod rm -f -t 0 job > /dev/null
        tar -xOf /tmp/job.tar checkpoint/cryopod-nvidia.img > /tmp/image
        check "$name: the times of each step are in the archive" \
            jq -e '.processes | length > 0 and all(.steps | length >= 3)' /tmp/image
        pod container restore --import /tmp/job.tar > /dev/null
        check "$name: restored $times" goes_on
        check "$name: the same sum" test "$(printed job | tail -n 1 | cut -d' ' -f2)" = "$last"
    done
    pod rm -f -t 0 job > /dev/null
}
cycle 'one process' --mib 32
cycle 'four processes on two GPUs' --mib 16 --procs 4 --gpus 0,1
cycle 'a forked child without CUDA, a leaked device file' --mib 16 --fork-idle 1 --leak-fd

run --mib 16
rm -f /tmp/job.tar
says() { # SWITCH: what the message must hold
    case $1 in
        fail-init) echo 'the NVIDIA driver cannot be used for a checkpoint' ;;
        *) echo 'cusim-client.*the driver refused' ;;
    esac
}
for switch in {fail-checkpoint,fail-lock}=CUDA_ERROR_NOT_SUPPORTED fail-lock fail-init; do
    /opt/build/cusim-ctl --socket "$sim" set "$switch" > /dev/null
    if pod container checkpoint --export /tmp/job.tar job > /tmp/said 2>&1; then
        echo "checkpointed in spite of $switch" && exit 1
    fi
    check "$switch: the message names process and cause" grep -Eq "$(says $switch)" /tmp/said
    check "$switch: no archive" test ! -s /tmp/job.tar
    check "$switch: the sum goes on" goes_on
    /opt/build/cusim-ctl --socket "$sim" clear > /dev/null
done
# The container was to go on running, and its GPU cannot be brought back at the first try: the agent tries again.
/opt/build/cusim-ctl --socket "$sim" set fail-restore:1 > /dev/null
pod container checkpoint --leave-running --export /tmp/left.tar job > /dev/null
check 'leave-running, the driver fails once: brought back all the same' goes_on
# It cannot be brought back at all: no success is reported, and the process is named.
/opt/build/cusim-ctl --socket "$sim" set fail-restore > /dev/null
id=$(pod inspect -f '{{.Id}}' job)
if cryopod-runtime checkpoint --leave-running --image-path /tmp/left --work-path /tmp "$id" > /tmp/said 2>&1; then
    echo 'a success in spite of a lost GPU' && exit 1
fi
check 'leave-running, the driver fails for good: told, with the process' grep -Eq 'cusim-client.*is left checkpointed' /tmp/said
check 'leave-running, the driver fails for good: the checkpoint is whole' test -s /tmp/left/cryopod.json
/opt/build/cusim-ctl --socket "$sim" clear > /dev/null
pod rm -f -t 0 job > /dev/null
run --mib 16
rm -f /tmp/job.tar
pod container checkpoint --export /tmp/job.tar job > /dev/null
pod rm -f -t 0 job > /dev/null
/opt/build/cusim-ctl --socket "$sim" set fail-restore > /dev/null
if pod container restore --import /tmp/job.tar > /tmp/said 2>&1; then
    echo 'restored in spite of fail-restore' && exit 1
fi
check "fail-restore: CRIU's log names process and cause" \
    grep -Eqr --include restore.log 'cryopod: Error: .*cusim-client.*the driver refused' /var/lib/containers /run/containers
check 'fail-restore: nothing is left' wait_for sh -c '! pgrep -x cusim-client'
/opt/build/cusim-ctl --socket "$sim" clear > /dev/null
pod rm -f -t 0 job > /dev/null 2>&1 || true
pod container restore --import /tmp/job.tar > /dev/null
check 'fail-restore: a later restore works' goes_on
pod rm -f -t 0 job > /dev/null
check 'no agent is left' wait_for sh -c '! pgrep cryopod-cuda'
check 'no operation is left' test -z "$(ls -A /run/cryopod)"
