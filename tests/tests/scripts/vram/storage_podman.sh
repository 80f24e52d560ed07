# storage_podman.sh: the driver's custom storage under podman: checkpoints, copies elsewhere, suspend, an older driver. After
# job.sh.
# shellcheck shell=bash disable=SC2154
printf '[vram]\ncustom_storage = true\n' >> /etc/cryopod/config.toml

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
# The agent has the only copy when it dies: the process gets it.
printf 'codec = "zstd"\nlevel = 19\n' >> /etc/cryopod/config.toml # slow enough to be met at work
killer() { wait_for writes && pkill -KILL -x cryopod-cuda-ag; }
writes() { [ -n "$(ls /tmp/slow/vram-*.img 2> /dev/null)" ]; }
killer & at_work=$!
check 'the agent is killed while it writes: said' refused 'driver agent' cryopod suspend --to /tmp/slow job
wait $at_work
sed -i '/^codec\|^level/d' /etc/cryopod/config.toml
check 'the agent is killed while it writes: resume' does cryopod resume job
check 'the agent is killed while it writes: it goes on' goes_on
check 'the agent is killed while it writes: the same sum' test "$(sum)" = "$last"
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
