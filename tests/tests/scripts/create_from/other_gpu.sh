# other_gpu.sh LOW: a chain of copies, each on the other GPU. A copy keeps the checkpoint's node as another name of its own GPU;
# its next checkpoint must not count that as a second GPU.
low=$1
mkimage
simulate "$low" --proc-root /run/simulated
mount --bind /run/simulated/driver /proc/driver
from=/srv/checkpoints
mkdir -p $from
printf '[restore]\nallow = ["%s"]\n' $from >> /etc/cryopod/config.toml
on_failure() { cat /tmp/said; }
quiet() { "$@" > /tmp/said 2>&1; }
on() { # GPU [OPTION...]: a container with this GPU alone
    local gpu=$1 && shift
    pod run -d --name job --network none --device /dev/nvidiactl --device /dev/nvidia-uvm --device "/dev/nvidia$gpu" \
        "${binds[@]/#/--volume=}" -e LD_LIBRARY_PATH=/cusim "$@" localhost/busybox /cusim/cusim-client --mib 8
}
used() { # the minors of the GPUs that hold memory; of a process that has ended the server learns soon
    [ "$(/opt/build/cusim-ctl --socket "$sim" status | jq -r '[.gpus[] | select(.pids != {}) | .minor] | join(" ")')" = "$1" ]
}
on 0 > /dev/null
wait_for ticked job 3
for gpu in 1 0 1; do
    check 'a checkpoint' quiet pod container checkpoint --export $from/job.tar job
    check 'of one GPU' test "$(tar -xOf $from/job.tar checkpoint/cryopod.json | jq '.gpu.gpus | length')" = 1
    podman rm -f -t 0 job > /dev/null
    chmod go-w $from/job.tar
    check "a copy on GPU $gpu" quiet on $gpu --annotation dev.cryopod.restore=$from/job.tar
    check 'it goes on' goes_on job
    check 'there' wait_for used $gpu
done
check 'a checkpoint in place' quiet pod container checkpoint job
check 'a restore' quiet pod container restore job
check 'it goes on' goes_on job
check 'there' wait_for used 1
