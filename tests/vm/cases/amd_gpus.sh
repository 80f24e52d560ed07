# amd_gpus.sh LOW: containers with 2, 4 and 8 GPUs of several models, one process and more, are checkpointed, removed and
# restored on the same GPUs: their sums go on, and nodes and rules inside are those from before.
# long
# runtimes: crun runc
# needs: amd
. /src/tests/amd/lib.sh
start "$1" vega-2

cycle() { # MACHINE MINORS PROCESSES
    local name=$1 minors=$2 processes=$3
    machine "$name"
    gpu_run c1 "$minors" -- -p "$processes"
    wait_for rounds c1 3
    gpus_of c1 $minors > /tmp/before
    saved c1 /tmp/c1.tar.zst
    predicts /tmp/c1.tar.zst 0
    back c1 /tmp/c1.tar.zst
    gpus_of c1 $minors > /tmp/after
    cmp /tmp/before /tmp/after
    pod rm -f -t 0 c1 > /dev/null
    rm /tmp/c1.tar.zst
    echo "$name: $(wc -w <<< "$minors") GPUs, $processes process(es): on from $before"
}
cycle vega-2 '128 129' 1
cycle vega-2 '128 129' 3
cycle mi210-4 '128 129 130 131' 1
cycle mi250x-8 '128 129 130 131 132 133 134 135' 2
cycle mi300x-8 '128 129 130 131 132 133 134 135' 1
