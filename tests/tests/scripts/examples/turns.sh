# shellcheck shell=bash disable=SC2154
# turns.sh: the example, with the simulated driver. After job.sh.
glibc_image
printf '[suspend]\nkeep = 4\n' >> /etc/cryopod/config.toml
gpus=(0)
mapfile -t options < <(given)
IMAGE=localhost/glibc COMMAND='/cusim/cusim-client --mib 600 --chunk-mib 20 --gpus 0' TURNS=2 \
    bash /src/examples/podman/turns.sh "${options[@]}" | tee /tmp/turns
check 'each had its turns' test "$(grep -c '^turn .* answers' /tmp/turns)" = 4
# The weights do not change.
last() { sed -nE "s/^$1: suspended .*, (.*) moved$/\1/p" /tmp/turns | tail -n 1; }
for name in one two; do check "$name: little was moved at last" grep -qE '^([0-9]|1[0-9])\.?[0-9]* (MiB|KiB|B)$' <<< "$(last $name)"; done
run_rootfs --mib 100 --chunk-mib 20 --small-mib 80 --gpus 0
check 'instead of itself: refused' refused 'is not suspended by cryopod' cryopod resume --instead-of job job
check 'suspended' does cryopod suspend job
check 'instead of itself, suspended: refused' refused 'it is suspended already' cryopod resume --instead-of job job
# The agent dies when one is away and the other not yet back: either comes back.
pod rename job other
run_rootfs --mib 100 --chunk-mib 20 --gpus 0
/opt/build/cusim-ctl --socket "$sim" set fail-checkpoint:1 > /dev/null
check 'it cannot give way: it runs on' refused 'not suspended, and it runs on' env CRYOPOD_LOG=debug cryopod resume --instead-of job other
check 'it cannot give way: the driver has restored the other one' grep -q 'meanwhile: Done' /tmp/said
clear_switches
check 'it cannot give way: it goes on' goes_on
check 'it cannot give way: the other comes back' does cryopod resume other
check 'it cannot give way: and away' does cryopod suspend other
set_switch hang-restore:1
does cryopod resume --instead-of job other & resuming=$!
wait_for hangs_or_ended hang-restore $resuming
pkill -KILL -x cryopod-cuda-ag || true
clear_switches
wait $resuming || true
for name in job other; do does cryopod resume $name || true; done
check 'the agent is killed: one goes on' goes_on
end
pod rename other job
check 'the agent is killed: the other goes on' goes_on
end
check 'nothing is left' test -z "$(pod ps -aq)"
