# storage_podman.sh LOW: the driver's custom storage under podman: checkpoints, copies elsewhere, suspend, an older driver.
# shellcheck shell=bash disable=SC2154
low=$1
mkimage
simulate "$low" --proc-root /run/simulated --driver 615.10
mount --bind /run/simulated/driver /proc/driver
printf '[vram]\ncustom_storage = true\n' >> /etc/cryopod/config.toml

run() { # cusim-client ARG...
    pod run -d --name job --network none --device /dev/nvidiactl \
        --device /dev/nvidia-uvm --device /dev/nvidia0 --device /dev/nvidia1 \
        -v /run/cusim:/run/cusim -v /opt/cusim:/cusim:ro -e LD_LIBRARY_PATH=/cusim \
        -v /usr/lib/x86_64-linux-gnu:/lib/x86_64-linux-gnu:ro -v /usr/lib64:/lib64:ro \
        localhost/busybox /cusim/cusim-client "$@" > /dev/null
    wait_for ticked 3
}
end() { pod rm -f -t 0 job > /dev/null; }
ticks() { printed job | grep -c ok || true; }
ticked() { [ "$(ticks)" -ge "$1" ]; }
on_failure() { printed job | tail -n 5; cat /tmp/said; }
goes_on() {
    local now && now=$(ticks)
    wait_for ticked $((now + 3)) && ! printed job | grep CORRUPT
}
sum() { printed job | tail -n 1 | cut -d' ' -f2; }
does() { "$@" > /tmp/said 2>&1; }
refused() { # PATTERN COMMAND...
    local pattern=$1 && shift
    ! "$@" > /tmp/said 2>&1 && grep -Eq -- "$pattern" /tmp/said
}
recorded() { tar -xOf /tmp/job.tar checkpoint/cryopod.json | jq -e "$1" > /dev/null; }
in_use() { /opt/build/cusim-ctl --socket "$sim" status | jq -c '[.gpus[] | [.pids[]] | add // 0]'; }
used() { local now && now=$(in_use) && jq -e "$1" > /dev/null <<< "$now" || { echo "$now"; false; }; }
: > /tmp/said

run --mib 100 --chunk-mib 20 --gpus 0,1
last=$(sum)
check 'left running' does pod container checkpoint --leave-running --export /tmp/job.tar job
check 'left running: it goes on' goes_on
for times in once twice; do
    check "$times: checkpoint" does pod container checkpoint --export /tmp/job.tar job
    end
    check "$times: by custom storage" recorded '[.gpu.plugin_report.processes[].vram[]] | length == 1 and all(.custom_storage)'
    check "$times: inspect tells the way" sh -c 'cryopod inspect /tmp/job.tar | grep -q "MiB through custom storage$"'
    check "$times: verified" does cryopod verify /tmp/job.tar
    check "$times: restore" does pod container restore --import /tmp/job.tar
    check "$times: it goes on" goes_on
    check "$times: the same sum" test "$(sum)" = "$last"
done

check 'suspend' does cryopod suspend job
check 'suspended: nothing is in use' used 'all(. == 0)'
check 'resume' does cryopod resume job
check 'resumed: it goes on' goes_on
check 'resumed: nothing is left of it' sh -c '! grep -q deleted "/proc/$(pgrep -x cusim-client)/maps"'
check 'suspend into files' does cryopod suspend --to /tmp/files job
check 'into files: nothing is in use' used 'all(. == 0)'
check 'into files: not in host memory either' sh -c '! grep -q deleted "/proc/$(pgrep -x cusim-client)/maps"'
check 'resume from files' does cryopod resume job
check 'from files: it goes on' goes_on
check 'the same sum' test "$(sum)" = "$last"
for at in lock restore; do
    /opt/build/cusim-ctl --socket "$sim" set fail-$at:1 > /dev/null
    if [ $at = lock ]; then
        check "$at fails: said" refused 'not suspended, and it runs on' cryopod suspend job
    else
        check "$at fails: suspended" does cryopod suspend job
        check "$at fails: said" refused 'stays suspended, with its GPU memory in host memory' cryopod resume job
        check "$at fails: and once more" does cryopod resume job
    fi
    check "$at fails: it goes on" goes_on
done
check 'its memory was allocated ahead: checkpoint' does pod container checkpoint --export /tmp/job.tar job
end

# A driver without custom storage: nothing is started.
pkill -x cusim-server && wait_for sh -c '! pgrep -x cusim-server'
rm -f "$sim"
/opt/build/cusim-server --socket "$sim" --dev-root /dev --gpus 2 --memory-mib 4096 --proc-root /run/simulated > /tmp/server.log 2>&1 &
wait_for test -S "$sim"
check 'an older driver: refused' refused 'taken with custom storage, which this host.s driver does not have' pod container restore --import /tmp/job.tar
check 'an older driver: nothing was started' sh -c '! pgrep -x cusim-client'
end
run --mib 100
check 'an older driver: checkpoint as ever' does pod container checkpoint --export /tmp/job.tar job
end
check 'an older driver: not by custom storage' recorded '[.gpu.plugin_report.processes[].vram[] | select(.custom_storage)] == []'
check 'an older driver: restore' does pod container restore --import /tmp/job.tar
check 'an older driver: it goes on' goes_on
end
