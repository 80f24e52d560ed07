#!/bin/bash
# top.sh: makes docs/top.svg: what `cryopod top` shows in the middle of a checkpoint and of a transfer. Simulated driver.
# `make screenshots` runs it in the test bed and draws what it prints.
set -euo pipefail
# shellcheck source=tests/testbed/lib.sh
. /src/tests/testbed/lib.sh
# shellcheck source=tests/tests/scripts/archive/lib.sh
. /src/tests/tests/scripts/archive/lib.sh
{
    mkimage
    simulate crun
    run_job --mib 400 --procs 2 --gpus 0,1
    # Half a GiB of random data, which is read slowly enough to be seen.
    mkdir -p /tmp/old/checkpoint
    pod container checkpoint --leave-running --export /tmp/job.tar job
    tar -C /tmp/old -xf /tmp/job.tar
    /opt/build/cusim-ctl --socket "$sim" set slow-checkpoint=20000:1
    cryopod pack /tmp/old -o /tmp/evening.tar.zst --threads 1 --level 15 -q &
    pod container checkpoint --export /tmp/slow.tar job &
    both() { cryopod top --once --interval 1 > /tmp/top && grep -q pack /tmp/top && grep -Eq 'freeze, GPU memory|GPU memory, dump' /tmp/top; }
    within 60 both
} > /dev/null 2>&1
echo '$ cryopod top'
cat /tmp/top
