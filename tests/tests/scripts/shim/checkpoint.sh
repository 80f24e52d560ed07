# checkpoint.sh: `ctr containers checkpoint` and `restore --live` with our shim: a GPU container on the simulated driver;
# one without a GPU, which containerd's own shim restores, and the other way round.
simulate runc
containerd_up
images
mkdir -p /out
logs() { cat "/out/$1"; }
start_job() { # NAME RUNTIME
    local mounts=() node pair
    for pair in "${binds[@]}" /out:/out; do
        mounts+=(--mount "type=bind,src=${pair%%:*},dst=${pair#*:},options=rbind:rw")
    done
    for node in "${nodes[@]}"; do mounts+=(--device "$node"); done
    rm -f "/out/$1"
    ctr run -d --null-io --runtime "$2" "${mounts[@]}" --env LD_LIBRARY_PATH=/cusim $image "$1" \
        sh -c "exec /cusim/cusim-client --mib 100 >> /out/$1 2>&1"
    wait_for ticked "$1" 3
}
in_it() { ctr tasks exec --exec-id "e$RANDOM" "$@"; }
away() { # NAME: the container and its snapshot are no more
    ctr tasks kill -s SIGKILL "$1"
    wait_for is "$1" STOPPED
    ctr tasks delete "$1" > /dev/null 2>&1 || true
    ctr containers rm "$1"
}
last=
cycle() { # NAME RUNTIME
    start_job job "$2"
    last=$(sum job)
    in_it job sh -c 'echo mine > /made'
    pausing ctr containers checkpoint --task --image --rw job localhost/checkpoint:1
    check "$1: left running" goes_on job
    check "$1: not paused any more" is job RUNNING
    check "$1: can be paused" ctr tasks pause job
    ctr tasks resume job
    away job
    ctr containers restore --rw --live job localhost/checkpoint:1
    check "$1: restored, the sum goes on" goes_on job
    check "$1: the same sum" test "$(sum job)" = "$last"
    check "$1: the file is there" test "$(printed_in job 'cat /made')" = mine
    ctr images rm --sync localhost/checkpoint:1 > /dev/null # else containerd 1.7 makes no second one
    pausing ctr containers checkpoint --task --image --rw job localhost/checkpoint:2
    check "$1: checkpointed again, left running" goes_on job
    away job
    ctr containers restore --rw --live job localhost/checkpoint:2
    check "$1: restored again, the sum goes on" goes_on job
    check "$1: again the same sum" test "$(sum job)" = "$last"
    check "$1: it began once" test "$(logs job | grep -c '^0 ')" = 1
    away job
    ctr images rm localhost/checkpoint:2 > /dev/null
}
cycle 'a GPU container' $OURS
check 'recorded and gone: no operation is left' test -z "$(ls -A /run/cryopod)"

# A refusal: paused by containerd, thawed by us, and everything as before afterwards.
start_job job $OURS
/opt/build/cusim-ctl --socket "$sim" set fail-lock > /dev/null
if ctr containers checkpoint --task job localhost/never:1 > /tmp/said 2>&1; then exit 1; fi
check 'a refusal: told' says /tmp/said 'the container goes on running.*cusim-client'
check 'a refusal: it runs' is job RUNNING
check 'a refusal: the sum goes on' goes_on job
/opt/build/cusim-ctl --socket "$sim" clear > /dev/null
if ! ctr --version | grep -q ' v\?1\.'; then
    mkdir -m 700 /srv/mine
    pausing ctr tasks checkpoint --image-path /srv/mine job || { cat /tmp/pausing.said && exit 1; }
    check 'checkpoint --image-path: it is there' test -e /srv/mine/inventory.img
    pausing ctr tasks checkpoint --exit job > /tmp/said 2>&1 || { cat /tmp/said && exit 1; }
    check 'checkpoint --exit: it ends' wait_for is job STOPPED
    ctr tasks delete job > /dev/null 2>&1 || true
    ctr containers rm job
    check 'checkpoint --image-path: the shim goes' wait_for no_shims
    check 'checkpoint --image-path: the directory is not taken for an abandoned one' test ! -e /srv/mine/.cryopod-only-copy
    check 'checkpoint --image-path: nothing is logged' test ! -e /var/log/cryopod-on-stop.log
else
    # ctr 1.7 sends that option to runtimes of containerd's own name alone; containerd 1.7 takes it for all.
    /src/tests/testbed/grpc.sh /run/containerd/containerd.sock containerd.services.tasks.v1.Tasks/Checkpoint \
        '[[1, "job"], [3, [[1, "containerd.runc.v1.CheckpointOptions"], [2, [[1, 1]]]]]]' > /tmp/said
    check 'checkpoint --exit: it ends' wait_for is job STOPPED
    ctr tasks delete job > /dev/null 2>&1 || true
    ctr containers rm job
fi

# Without a GPU, from one shim to the other: the same name leads to the other program.
mkdir -p /alt
ln -s /usr/bin/containerd-shim-runc-v2 /alt/containerd-shim-cryopod-v2
printf '#!/bin/sh\nCRYOPOD_STOCK_SHIM=/usr/bin/containerd-shim-runc-v2 exec /usr/local/bin/containerd-shim-cryopod-v2 "$@"\n' \
    > /alt/containerd-shim-runc-v2
chmod 755 /alt/containerd-shim-runc-v2
number() { printed_in plain 'cat /tmp/n'; }
beyond() { [ "$(number)" -gt "$1" ]; }
counts_on() { beyond $((reached - 1)) && wait_for beyond $((reached + 20)); } # not from the beginning
for runtime in $OURS $STOCK; do
    # shellcheck disable=SC2016
    ctr run -d --null-io --runtime "$runtime" $image plain sh -c \
        'i=0; while :; do i=$((i + 1)); echo $i > /tmp/m; mv /tmp/m /tmp/n; sleep 0.1; done'
    wait_for beyond 20
    reached=$(number)
    pausing ctr containers checkpoint --task --image --rw plain localhost/plain:0
    away plain
    ctr containers restore --rw --live plain localhost/plain:0
    check "$runtime, restored: it goes on" counts_on
    reached=$(number)
    ctr images rm --sync localhost/plain:0 > /dev/null
    pausing ctr containers checkpoint --task --image --rw plain localhost/plain:1
    away plain
    containerd_down
    path=$PATH
    PATH=/alt:$PATH containerd_up
    ctr containers restore --rw --live plain localhost/plain:1
    if [ $runtime = $OURS ]; then
        check "ours, restored by containerd's: its shim" test -z "$(our_shim plain)"
    else
        check "containerd's, restored by ours: our shim" test -n "$(our_shim plain)"
    fi
    check "$runtime, restored by the other: it goes on" counts_on
    away plain
    ctr images rm localhost/plain:1 > /dev/null
    containerd_down
    PATH=$path containerd_up
done
check 'no shim is left' wait_for no_shims
check 'no agent is left' wait_for sh -c '! pgrep cryopod-cuda'
