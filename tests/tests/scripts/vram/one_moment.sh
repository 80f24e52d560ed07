# one_moment.sh LOW MOMENTS SEED: a checkpoint of a process that goes on holds one moment of it. Its threads change GPU memory
# at random and compare it with a model in host memory. After job.sh.
# shellcheck shell=bash disable=SC2154
glibc_image
program=cusim-random
RANDOM=$3
uuid=GPU-c0da0000-5130-4d00-8000-000000000000
reserve() { /opt/build/cusim-ctl --socket "$sim" reserve $uuid $(($1 << 20)) > /dev/null; }
copied() { grep -oE 'of GPU memory are copied( once it goes on)?$' /tmp/dump.log | sort | uniq -c; }
copy_goes_on() { wait_for sh -c "[ \$(podman logs copy 2>&1 | grep -c ok) -ge 3 ]" && ! podman logs copy 2>&1 | grep -e CORRUPT -e another; }
run_rootfs --seed "$3" --gpus 0,1
id=$(pod inspect -f '{{.Id}}' job)
for moment in $(seq "$2"); do
    # Copied once it goes on, where there is room for both; else while it works, and what has changed when it has stopped.
    if [ $((RANDOM % 2)) = 0 ]; then room=0; else room=3950; fi
    reserve $room
    sleep "$((RANDOM % 2)).$((RANDOM % 1000))"
    if [ $((moment % 2)) = 1 ]; then
        check "$moment: checkpoint" does pod container checkpoint --leave-running --export /tmp/job.tar job
        reserve 0
        check "$moment: a copy" does pod container restore --import /tmp/job.tar --name copy
        check "$moment: the copy is right" copy_goes_on
        pod rm -f -t 0 copy > /dev/null
    else
        rm -rf /tmp/images
        check "$moment: checkpoint" does cryopod-runtime checkpoint --leave-running --image-path /tmp/images --work-path /tmp "$id"
        check "$moment: verified" does cryopod verify /tmp/images
    fi
    check "$moment: it goes on" goes_on
done
copied
reserve 0
check 'suspend' does cryopod suspend job
check 'resume' does cryopod resume job
check 'resumed: it goes on' goes_on
check 'migration: checkpoint' does pod container checkpoint --export /tmp/job.tar job
end
check 'migration: restore' does pod container restore --import /tmp/job.tar
check 'migration: it goes on' goes_on
