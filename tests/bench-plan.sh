#!/bin/bash
# bench-plan.sh: how long the plan of a checkpoint takes, from the start of the wrapper until the low-level runtime is started,
# for a container of 200 processes with 10 descriptors each. The container runs meanwhile; beside it the dump, for most of which
# it is frozen. Then how long the check of CRIU's images takes at a restore. Runs in the test bed; `make bench` starts it.
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
wait_for all
descriptors=$(for pid in $(crun ps bench-plan | grep '[0-9]'); do ls "/proc/$pid/fd"; done | wc -l)
median() { sort -n | sed -n 5p; }
ms() { printf '%d.%01d ms' $(($1 / 1000)) $(($1 % 1000 / 100)); }
micros() { # COMMAND...: how long it takes, the median of 9
    local from _
    for _ in {1..9}; do
        from=${EPOCHREALTIME/./}
        "$@" > /dev/null 2>&1
        echo $((${EPOCHREALTIME/./} - from))
    done | median
}
plans=() dumps=()
for _ in {1..9}; do
    rm -rf /tmp/images
    cryopod-runtime checkpoint --leave-running --image-path /tmp/images bench-plan > /tmp/said 2>&1 || { cat /tmp/said; exit 1; }
    plans+=("$(jq .timings.plan_us /tmp/images/cryopod.json)")
    dumps+=("$(jq .timings.dump_us /tmp/images/cryopod.json)")
done
state=$(micros crun state bench-plan)
version=$(micros criu --version)
checks=()
for _ in {1..9}; do
    cryopod-runtime delete --force bench-plan
    rm -f /tmp/log
    (cd /tmp/plan && cryopod-runtime --debug --log /tmp/log restore --detach --image-path /tmp/images bench-plan < /dev/null > /tmp/said 2>&1) || { cat /tmp/said; exit 1; }
    checks+=("$(sed -n 's/.* were checked within \([0-9]*\) us.*/\1/p' /tmp/log)")
done
cryopod-runtime delete --force bench-plan
check=$(printf '%s\n' "${checks[@]}" | median)
plan=$(printf '%s\n' "${plans[@]}" | median)
dump=$(printf '%s\n' "${dumps[@]}" | median)
printf '\na checkpoint of 200 processes with %s descriptors, medians of 9: plan %s, while the container runs; then the dump %s\n' \
    "$descriptors" "$(ms "$plan")" "$(ms "$dump")"
printf 'at a restore the check of their images: %s\n' "$(ms "$check")"
printf 'of the plan are questions to other programs: crun state %s, then criu --version %s beside the rest\n' \
    "$(ms "$state")" "$(ms "$version")"
