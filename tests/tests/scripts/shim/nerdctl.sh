# nerdctl.sh LOW: what nerdctl's `checkpoint create` and `start --checkpoint` call of containerd, as Debian has no nerdctl: a
# checkpoint with runc's options, which end the container, the task's deletion, a task from the checkpoint. With containerd's
# own shim, then with ours, to which nerdctl sends no options.
low=$1
simulate "$low"
containerd_up
images
mkdir -p /out /srv/checkpoint
logs() { cat "/out/$1"; }
tasks() { # METHOD JSON
    /src/tests/testbed/grpc.sh /run/containerd/containerd.sock "containerd.services.tasks.v1.Tasks/$1" "$2" > /tmp/said 2>&1 ||
        { cat /tmp/said && return 1; }
}
job='exec /cusim/cusim-client --mib 20 >> /out/job 2>&1'
start_job() { # ctr's ARG...
    local mounts=() node pair
    for pair in "${binds[@]}" /out:/out; do
        mounts+=(--mount "type=bind,src=${pair%%:*},dst=${pair#*:},options=rbind:rw")
    done
    for node in "${nodes[@]}"; do mounts+=(--device "$node"); done
    ctr run -d --null-io "${mounts[@]}" --annotation nerdctl/namespace=default "$@" --env LD_LIBRARY_PATH=/cusim $image job \
        sh -c "$job"
    wait_for at_tick job 10
}
ended_and_back() { # NAME OPTIONS: the options of the checkpoint, as nerdctl sends them to this runtime
    local pid digest size rootfs
    pid=$(pid_of job)
    check "$1: a checkpoint" tasks Checkpoint "[[1, \"job\"]$2]"
    digest=$(grep -ao 'sha256:[0-9a-f]\{64\}' /tmp/said)
    # What nerdctl does by exporting and importing it: containerd does not throw it away.
    ctr content label "$digest" containerd.io/gc.root=now > /dev/null
    check "$1: it ends the container" wait_for gone "$pid"
    wait_for is job STOPPED
    check "$1: the task can be deleted" tasks Delete '[[1, "job"]]'
    check "$1: no task is left" test -z "$(status job)"
    size=$(stat -c %s "/var/lib/containerd/io.containerd.content.v1.content/blobs/sha256/${digest#*:}")
    rootfs=$(ctr snapshots mounts /x job | awk '{print $NF}' | jq -Rc 'split(",") | [[1, "overlay"], [2, "overlay"]] + map([4, .])')
    check "$1: a task from the checkpoint" tasks Create "[[1, \"job\"], [3, $rootfs], [8, [[1, \"application/vnd.containerd.container.criu.checkpoint.criu.tar\"], [2, \"$digest\"], [3, $size]]]]"
    check "$1: it starts" tasks Start '[[1, "job"]]'
    check "$1: the sum goes on" goes_on job
    check "$1: not from its beginning" at_tick job 10
    check "$1: the loopback device is up" grep -q UP <<< "$(printed_in job 'ifconfig lo')"
    ctr content label "$digest" containerd.io/gc.root= > /dev/null
    ctr tasks kill -s SIGKILL job
    wait_for is job STOPPED
    check "$1: the task can be deleted again" tasks Delete '[[1, "job"]]'
    check "$1: the container can be removed" ctr containers rm job
    rm /out/job
    check "$1: no shim is left" wait_for no_shims
}
exits=', [3, [[1, "containerd.runc.v1.CheckpointOptions"], [2, [[1, 1]]]]]'
start_job --runtime $STOCK --runc-binary /usr/local/bin/cryopod-runtime
ended_and_back "containerd's own shim" "$exits"
start_job --runtime $OURS --annotation dev.cryopod.checkpoint.exit=on
ended_and_back 'our shim' ''
# Without a GPU, too.
nodes=()
# shellcheck disable=SC2016 # for the container's shell
job='i=0; while :; do echo $i ok; i=$((i + 1)); sleep 0.1; done >> /out/job'
start_job --runtime $STOCK --runc-binary /usr/local/bin/cryopod-runtime
ended_and_back 'no GPU' "$exits"
start_job --runtime $STOCK --runc-binary /usr/local/bin/cryopod-runtime
mkdir -p /etc/criu
echo 'action-script /bin/false' > /etc/criu/default.conf
if tasks Checkpoint "[[1, \"job\"]$exits]" > /dev/null; then echo 'FAILED: a checkpoint' && exit 1; fi
check 'no GPU: why a checkpoint has failed' says /tmp/said 'cryopod: checkpoint of job failed and the container goes on running: .*Error'
check 'no GPU: it goes on' goes_on job
