# store_killed.sh ROUNDS: the store under ctr, where what makes a checkpoint is killed at any moment: what an image refers to is
# whole, the rest goes.
rounds=$1
simulate runc
printf '[vram]\ncodec = "none"\n[store]\ngrace_s = 0\n' >> /etc/cryopod/config.toml
store=/var/lib/cryopod/store
containerd_up
images
logs() { cat "/out/$1"; }
mkdir -p /out
mounts=()
for pair in "${binds[@]}" /out:/out; do mounts+=(--mount "type=bind,src=${pair%%:*},dst=${pair#*:},options=rbind:rw"); done
for pair in "${nodes[@]}"; do mounts+=(--device "$pair"); done
ctr run -d --null-io --runtime $OURS "${mounts[@]}" --env LD_LIBRARY_PATH=/cusim $image job \
    sh -c 'exec /cusim/cusim-client --mib 20 >> /out/job 2>&1'
wait_for ticked job 3
entries() { find $store -mindepth 1 -maxdepth 1 | wc -l; }
cleans() { cryopod store prune --unused -q && [ "$(entries)" = "$1" ]; }
collected() { # N: after containerd's own collection
    ctr leases create --id collect > /dev/null && ctr leases rm --sync collect > /dev/null
    cleans "$1"
}
no_directories() { ! compgen -G '/tmp/ctrd-checkpoint*' > /dev/null; }
on_failure() { ls -lR /tmp/ctrd-checkpoint*; cryopod store ls; ctr content ls; ctr images ls -q; tail -n 15 /tmp/containerd.log; }
moves_on() { local now && now=$(ticks job) && wait_for moved $((now + 3)) && ! logs job | grep CORRUPT; }
moved() { # TICKS: at least so many. Whoever was to resume it was killed, and its pause itself may come late
    if is job PAUSED; then ctr tasks resume job > /dev/null 2>&1 || true; fi
    ticked job "$1"
}
checkpoint() { ctr containers checkpoint --task --image --rw job "localhost/cp:$1" > /tmp/said 2>&1; }
pausing ctr containers checkpoint --task --image --rw job localhost/kept:1
sum=$(sum job)
held=$(cryopod store ls --json | jq -r '.[0].path')
cp -a "$held" /tmp/kept
victims=(cryopod-runtime criu containerd ctr)
killed=0
for n in $(seq "$rounds"); do
    victim=${victims[n % 4]}
    checkpoint "$n" &
    pid=$!
    case $((n % 8)) in
        # It dumps, or containerd packs what was dumped.
        2) until compgen -G '/tmp/ctrd-checkpoint*' > /dev/null || gone $pid; do :; done ;;
        # Whoever kills CRIU while it puts its code into a process ends that, with and without cryopod (docs/failures.md).
        1) until compgen -G '/tmp/ctrd-checkpoint*/pages-*' > /dev/null || gone $pid; do :; done ;;
        5) sleep "0.0$((RANDOM % 10))" ;; # the driver works
        6) until compgen -G '/var/lib/containerd/io.containerd.content.v1.content/ingest/*' > /dev/null || gone $pid; do :; done ;;
        *) sleep "0.$(printf %03d $((RANDOM % 450)))" ;;
    esac
    if pkill -9 -x "${victim:0:15}"; then killed=$((killed + 1)); fi
    wait $pid || true
    if [ "$victim" = containerd ]; then
        wait "$containerd_pid" 2> /dev/null || true
        containerd_up
    fi
    check "$n: $victim is killed: the job goes on" moves_on
    check "$n: $victim is killed: no directory of containerd is left" wait_for no_directories
    # Of a client that was killed; containerd would keep its content for a day.
    ctr leases ls -q | xargs -r -n 1 ctr leases rm --sync > /dev/null
    ctr images rm --sync "localhost/cp:$n" > /dev/null 2>&1 || true
    check "$n: $victim is killed: the rest goes" wait_for collected 1
    check "$n: $victim is killed: what an image refers to is whole" diff -r "$held" /tmp/kept
done
check 'some were killed' test "$killed" -ge $((rounds / 4))
ctr tasks kill -s SIGKILL job
wait_for is job STOPPED
ctr tasks delete job > /dev/null 2>&1 || true
ctr containers rm job
ctr containers restore --rw --live job localhost/kept:1
check 'the first checkpoint: restored, the sum goes on' goes_on job
check 'the first checkpoint: the same sum' test "$(sum job)" = "$sum"
ctr images rm --sync localhost/kept:1 > /dev/null
check 'nothing is left' wait_for cleans 0
