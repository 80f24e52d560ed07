#!/bin/bash
# bench-plan.sh: how long the plan of a checkpoint takes, from the start of the wrapper until the low-level runtime is started,
# for a container of 200 processes with 10 descriptors each. The container runs meanwhile. Runs in the test bed; `make bench`
# starts it.
set -euo pipefail
. /src/tests/testbed/lib.sh
low_level crun
fake_gpu_nodes
bundle /tmp/plan /bin/sh /job
cat > /tmp/plan/rootfs/job <<'SH'
i=0
while [ $i -lt 100 ]; do
    (while :; do sleep 1000; done) 3< /job 4< /job 5< /job 6< /job 7< /job 8< /job 9< /job > /dev/null 2>&1 < /dev/null &
    i=$((i + 1))
done
while :; do wait; done
SH
jq '.linux.devices = [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}] | .process.rlimits = []' \
    /tmp/plan/config.json > /tmp/plan/new && mv /tmp/plan/new /tmp/plan/config.json
(cd /tmp/plan && cryopod-runtime run -d bench-plan < /dev/null > /dev/null 2>&1)
pids() { crun ps bench-plan 2> /dev/null | grep -c '[0-9]' || true; }
all() { [ "$(pids)" -ge 200 ]; }
wait_for 30 all
descriptors=$(for pid in $(crun ps bench-plan | grep '[0-9]'); do ls "/proc/$pid/fd"; done | wc -l)
times=()
for _ in 1 2 3 4 5; do
    rm -rf /tmp/images
    cryopod-runtime checkpoint --leave-running --image-path /tmp/images bench-plan > /tmp/said 2>&1 || { cat /tmp/said; exit 1; }
    times+=("$(jq .timings.plan_us /tmp/images/cryopod.json)")
done
cryopod-runtime delete --force bench-plan
median=$(printf '%s\n' "${times[@]}" | sort -n | sed -n 3p)
printf '\nplan of a checkpoint, 200 processes, %s descriptors: %s.%03d ms (median of 5; before the freeze)\n' \
    "$descriptors" $((median / 1000)) $((median % 1000))
