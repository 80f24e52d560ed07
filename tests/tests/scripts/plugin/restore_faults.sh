# restore_faults.sh: when the driver fails at a restore nothing is left behind, and the images are as good as before.
simulate
for switch in fail-restore oom-restore break-restore hang-restore fail-unlock; do
    start --mib 16
    dump
    ctl set "$switch"
    if [ "$switch" = hang-restore ]; then
        rm -f /run/op/restore/plugin-report.json
        (wait_for test -s /run/op/restore/plugin-report.json && ctl clear) &
        clearer=$!
    fi
    restore_fails '{"step_timeout_ms": 1500}'
    check "$switch: nothing is left" wait_for gone
    check "$switch: said" says /run/op/restore/plugin-report.json '.outcome == "failed" and .error.comm == "cusim-client"'
    check "$switch: CRIU says so too" grep -q 'Restoring FAILED' /img/restore.log
    if [ "$switch" = hang-restore ]; then wait "$clearer"; fi
    ctl clear
    restore
    check "$switch: a later restore works" goes_on
    stop
done

start --mib 16
dump
mkdir -p /run/empty
! criu restore -d -D /img -o restore.log -v4 -L /run/empty
check 'without the plugin' grep -q 'Missing required plugin: cryopod_nvidia' /img/restore.log
cp /img/cryopod-nvidia.img /tmp/image
damaged() { # NAME MESSAGE
    restore_fails
    check "$1" says /run/op/restore/plugin-report.json ".error.cause | test(\"$2\")"
    check "$1: nothing is left" wait_for gone
    cp /tmp/image /img/cryopod-nvidia.img
}
rm /img/cryopod-nvidia.img && damaged 'an image is missing' 'is missing'
truncate -s 100 /img/cryopod-nvidia.img && damaged 'a cut image' 'damaged'
sed -i 's/"version": 1/"version": 7/' /img/cryopod-nvidia.img && damaged 'an image of another version' 'version 7'
jq '.processes[0].ns_pids = [9999]' /tmp/image > /img/cryopod-nvidia.img && damaged 'an image of other processes' 'not among'
truncate -s 20M /img/cryopod-nvidia.img && damaged 'an endless image' 'larger'
restore
check 'the good image still works' goes_on
stop
