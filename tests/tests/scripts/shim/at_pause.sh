# at_pause.sh: two containers that belong together, as a pod's are checkpointed: pause, pause, checkpoint, checkpoint,
# resume. With dev.cryopod.checkpoint.at-pause the one with a GPU stands still from its pause on.
simulate runc
containerd_up
images
mkdir -p /out
logs() { cat "/out/$1"; }
annotation=dev.cryopod.checkpoint.at-pause
start_job() { # ctr run's further ARGs...
    local mounts=() node pair
    for pair in "${binds[@]}" /out:/out; do
        mounts+=(--mount "type=bind,src=${pair%%:*},dst=${pair#*:},options=rbind:rw")
    done
    for node in "${nodes[@]}"; do mounts+=(--device "$node"); done
    rm -f /out/job
    ctr run -d --null-io --runtime $OURS "${mounts[@]}" "$@" --env LD_LIBRARY_PATH=/cusim $image job \
        sh -c "exec /cusim/cusim-client --mib 100 >> /out/job 2>&1"
    wait_for ticked job 3
}
# The other one counts what the first has written: together they are one job.
start_plain() {
    ctr run -d --null-io --runtime $OURS --mount type=bind,src=/out,dst=/out,options=rbind:rw $image plain \
        sh -c 'while :; do grep -c ok /out/job > /out/plain.new; mv /out/plain.new /out/plain; sleep 0.05; done'
    wait_for test -s /out/plain
}
records() { find /run/cryopod/suspended -name '*.json' 2> /dev/null | wc -l; }
freed() { /opt/build/cusim-ctl --socket "$sim" status | jq -e '[.gpus[].pids[]] == []' > /dev/null; }
away() { # NAME
    ctr tasks kill -s SIGKILL "$1"
    wait_for is "$1" STOPPED
    ctr tasks delete "$1" > /dev/null 2>&1 || true
    ctr containers rm "$1"
}
checkpoint() { # NAME: of a container that is paused, as the call for a pod does it
    /src/tests/testbed/grpc.sh /run/containerd/containerd.sock \
        containerd.services.tasks.v1.Tasks/Checkpoint "[[1, \"$1\"]]" > /tmp/said 2>&1 || { cat /tmp/said && exit 1; }
}
recorded() { # among what containerd has stored
    local blob
    for blob in /var/lib/containerd/io.containerd.content.v1.content/blobs/sha256/*; do
        if tar -tf "$blob" 2> /dev/null | grep cryopod.json > /dev/null; then return; fi
    done
    return 1
}
counts() { echo "$(wc -l < /out/job) $(cat /out/plain)"; }
follows() { [ "$(grep -c ok /out/job)" = "$(cat /out/plain)" ]; }

start_job --annotation $annotation=on
start_plain
last=$(sum job)
ctr tasks pause job
wait_for follows
pausing ctr tasks pause plain
before=$(counts)
check 'paused: one record' test "$(records)" = 1
checkpoint job
check 'recorded' recorded # at once: no image has it, so containerd will throw it away
check 'checkpointed: still paused' is job PAUSED
check 'checkpointed: no count has moved' test "$(counts)" = "$before"
checkpoint plain
sleep 1
check 'both checkpointed: no count has moved' test "$(counts)" = "$before"
ctr tasks resume plain
ctr tasks resume job
check 'resumed: the sum goes on' goes_on job
check 'resumed: the same sum' test "$(sum job)" = "$last"
check 'resumed: no record' test "$(records)" = 0

# Its agent is killed.
/opt/build/cusim-ctl --socket "$sim" set slow-lock=8000:1 > /dev/null
(wait_for pgrep -x cryopod-cuda-ag > /dev/null && sleep 1 && pkill -KILL -x cryopod-cuda-ag) &
if ctr tasks pause job > /tmp/said 2>&1; then echo 'paused without its agent' && exit 1; fi
check 'its agent is killed: said' says /tmp/said 'it goes on running: the driver agent'
check 'its agent is killed: it goes on' goes_on job
check 'its agent is killed: no record' test "$(records)" = 0

# A checkpoint that never comes.
ctr tasks pause job
sleep 0.3
ctr tasks resume job
check 'paused and resumed: the sum goes on' goes_on job
# One that fails.
ctr tasks pause job
/opt/build/cusim-ctl --socket "$sim" set fail-checkpoint:1 > /dev/null
if (checkpoint job) > /dev/null; then echo 'checkpointed' && exit 1; fi
/opt/build/cusim-ctl --socket "$sim" clear > /dev/null
check 'a checkpoint fails: still paused' is job PAUSED
ctr tasks resume job
check 'a checkpoint fails, resumed: the sum goes on' goes_on job
# The lock fails.
/opt/build/cusim-ctl --socket "$sim" set fail-lock:1 > /dev/null
if ctr tasks pause job > /tmp/said 2>&1; then echo 'paused' && exit 1; fi
/opt/build/cusim-ctl --socket "$sim" clear > /dev/null
check 'the lock fails: said' says /tmp/said 'pause of job failed and it goes on running: lock of process'
check 'the lock fails: the sum goes on' goes_on job
# Killed while it is paused.
ctr tasks pause job
away job
check 'killed: nothing is in use' wait_for freed

start_job --annotation $annotation=on
# Resumed while it is checkpointed: the resume waits for the checkpoint.
ctr tasks pause job
/opt/build/cusim-ctl --socket "$sim" set slow-checkpoint=4000:1 > /dev/null
cryopod-runtime --root /run/containerd/runc/default checkpoint --image-path /tmp/during --leave-running job > /tmp/said 2>&1 &
checkpoint=$!
wait_for pgrep -x cryopod-cuda-ag > /dev/null
sleep 1
cryopod-runtime --root /run/containerd/runc/default resume job
wait $checkpoint || { cat /tmp/said && exit 1; }
check 'resumed while it is checkpointed: it was complete' cryopod verify -q /tmp/during
check 'resumed while it is checkpointed: the sum goes on' goes_on job
check 'resumed while it is checkpointed: no record' test "$(records)" = 0
away job

start_job --annotation $annotation=on
# Thawed by somebody else.
ctr tasks pause job
runc --root /run/containerd/runc/default resume job
if cryopod-runtime --root /run/containerd/runc/default checkpoint --image-path /tmp/no job > /tmp/said 2>&1; then exit 1; fi
check 'thawed by another: refused, with the remedy' says /tmp/said 'CUDA calls are locked since .*cryopod resume pid:'
cryopod resume "pid:$(pid_of job)" > /tmp/said
check 'cryopod resume: the sum goes on' goes_on job
away job

# The checkpoint of the pause comes back as a container that runs.
start_job --annotation $annotation=on
pausing ctr containers checkpoint --task --image --rw job localhost/job:1
check 'ctr pauses and resumes: the sum goes on' goes_on job
last=$(sum job)
away job
ctr containers restore --rw --live job localhost/job:1
check 'restored: the sum goes on' goes_on job
check 'restored: the same sum' test "$(sum job)" = "$last"
away job

if ctr run -d --null-io --runtime $OURS --annotation $annotation=maybe $image job sleep 100 > /tmp/said 2>&1; then echo 'started' && exit 1; fi
check 'a wrong value: said' says /tmp/said "$annotation: .*neither"
ctr containers rm job
away plain
wait_for sh -c '! pgrep -x cryopod-cuda-ag' || true
no_operation() { [ -z "$(find /run/cryopod -mindepth 1 -maxdepth 1 -not -name suspended)" ]; }
check 'no operation is left' wait_for no_operation
