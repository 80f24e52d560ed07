# late_conmon.sh LOW: podman restores in place while the conmon of before has not yet recorded the end, as on a busy machine:
# the record must not end the restored container.
low=$1
mkimage
simulate "$low"
on_failure() { podman ps -a; }
goes_on() { local n && n=$(count job) && wait_for counted job $((n + 3)); }
for device in '' --device=/dev/nvidia0; do
    # shellcheck disable=SC2086 # none, or one
    pod run -d --name job --network none $device localhost/busybox "${counter[@]}" > /dev/null
    wait_for counted job 3
    read -r init conmon <<< "$(podman inspect -f '{{.State.Pid}} {{.State.ConmonPid}}' job)"
    kill -STOP "$conmon"
    (within 300 eval "! grep -q 'State:.[^Z]' /proc/$init/status" && sleep 4 && kill -CONT "$conmon") &
    check "checkpoint ${device:+of a GPU container}" pod container checkpoint job
    check restore pod container restore job
    wait $!
    within 300 eval "! test -e /proc/$conmon" || true
    check 'it goes on' goes_on
    podman rm -f -t 0 job > /dev/null
done
