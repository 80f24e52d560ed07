# faults.sh WHICH: something is killed in the middle of a checkpoint or a restore. Afterwards the container runs on as before, or
# is gone as containerd reports it; nothing is left of it. WHICH: `all` moments, or `some`, every fifth of them.
which=$1
moments() { if [ "$which" = all ]; then echo "$@"; else echo "$@" | tr ' ' '\n' | awk 'NR % 5 == 3'; fi; }
simulate runc
containerd_up
images
mkdir -p /out
logs() { cat "/out/$1" 2> /dev/null; }
start_job() {
    local mounts=() node pair
    for pair in "${binds[@]}" /out:/out; do
        mounts+=(--mount "type=bind,src=${pair%%:*},dst=${pair#*:},options=rbind:rw")
    done
    for node in "${nodes[@]}"; do mounts+=(--device "$node"); done
    rm -f "/out/$1"
    made=$((${made:-0} + 1)) # containerd 1.7 makes no second checkpoint of the same spec
    ctr run -d --null-io --runtime $OURS "${mounts[@]}" --env LD_LIBRARY_PATH=/cusim --env "MADE=$made" $image "$1" \
        sh -c "exec /cusim/cusim-client --mib 40 >> /out/$1 2>&1"
    wait_for ticked "$1" 3
}
victim() { # WHO: its pids
    case $1 in
        ours) our_shim job ;;
        stock) stock_shim job ;;
        criu | late) pgrep -x criu ;;
        alone) pgrep -o -x criu ;; # what it has forked for the container waits for it
        containerd | restored) echo "$containerd_pid" ;;
    esac
}
criu_forked() { [ "$(pgrep -c -x criu)" -gt 1 ]; }
kill_it() { # WHO AFTER: that many milliseconds after it began; criu after it came, or "late", when the job is there again;
    # "restored": containerd, then
    local begun=true
    case $1 in
        criu) begun='pgrep -x criu' ;;
        alone) begun=criu_forked ;;
        late | restored) begun='pgrep -x cusim-client' ;;
    esac
    for _ in $(seq 300); do if $begun > /dev/null; then break; fi; sleep 0.01; done
    sleep "$(awk -v ms="$2" 'BEGIN {print ms / 1000}')"
    for pid in $(victim "$1"); do kill -KILL "$pid" 2> /dev/null || true; done
}
settled() { # nothing works on a container any more
    ! pgrep -x criu > /dev/null && ! pgrep -x cryopod-runtime > /dev/null && ! pgrep cryopod-cuda > /dev/null
}
no_job() { ! pgrep -x cusim-client > /dev/null; }
killed() { # the job. A pause that comes late keeps it, on cgroup v1
    no_job || { ctr tasks resume job > /dev/null 2>&1 && false; }
}
clean() { # everything away, whatever there is; then nothing is left
    local pid
    ctr tasks resume job > /dev/null 2>&1 || true
    ctr tasks kill -s SIGKILL job > /dev/null 2>&1 || true
    wait_for killed
    ctr tasks delete -f job > /dev/null 2>&1 || true
    ctr containers rm job > /dev/null 2>&1 || true
    ctr snapshots rm job > /dev/null 2>&1 || true # of a container that ctr had not made yet
    wait_for nothing
}
nothing() { # is left
    no_shims && ! grep -q runtime.v2.task /proc/mounts &&
        [ -z "$(ls /run/containerd/io.containerd.runtime.v2.task/default 2> /dev/null)" ] && [ -z "$(ls /run/containerd/runc/default 2> /dev/null)" ]
}
moved() { # TICKS: at least so many. Whoever was to resume a paused container was killed; the pause itself may come late
    if is job PAUSED; then ctr tasks resume job > /dev/null || true; fi
    ticked job "$1"
}
alive_or_gone() { wait_for as_reported $(($(ticks job) + 3)) && ! logs job | grep CORRUPT; }
as_reported() { # TICKS: by containerd, which learns of an end later: it is asked again
    case $(status job) in
        RUNNING | PAUSED) moved "$1" ;;
        *) no_job ;;
    esac
}
unreached() { # SINCE-LINE: containerd could not reach our shim after its start, and forgot it. No `delete` follows: that
    # comes with this message
    ! tail -n "+$1" /tmp/containerd.log | grep 'shim disconnected' > /dev/null # -q: tail may die of SIGPIPE
}
one() { # WHO WHAT AFTER
    local who=$1 what=$2 after=$3 line
    line=$(wc -l < /tmp/containerd.log)
    if [ "$what" = checkpoint ]; then
        start_job job || return 1
        (timeout 60 ctr tasks checkpoint job > /tmp/said 2>&1 || true) &
    else
        (timeout 60 ctr containers restore --rw --live job localhost/checkpoint:1 > /tmp/said 2>&1 || true) &
    fi
    local doing=$!
    kill_it "$who" "$after"
    if [ "$who" = containerd ] || [ "$who" = restored ]; then wait "$containerd_pid" 2> /dev/null || true; containerd_up; fi
    wait $doing
    wait_for settled || { ps ax | grep -v bash && return 1; }
    alive_or_gone || { echo "$(status job), but" && ps ax | grep -v bash | grep -E 'cusim-client|shim' && return 1; }
    clean && return
    if [ "$who $what" = 'ours restore' ] && unreached "$line"; then
        for pid in $(stock_shim job); do kill -KILL "$pid"; done
        wait_for nothing && return
    fi
    ls -lR /run/containerd/runc/default /run/containerd/io.containerd.runtime.v2.task/default
    tail -n "+$line" /tmp/containerd.log | grep -v -e 'loading plugin' -e 'cri plugin with config'
    cat /tmp/said
    grep runtime.v2.task /proc/mounts
    shims
    return 1
}
start_job job
pausing ctr containers checkpoint --task --image --rw job localhost/checkpoint:1
check 'before: all is well' goes_on job
check 'before: clean' clean
for who in ours stock containerd; do
    for what in checkpoint restore; do
        for after in $(moments 20 60 100 140 180 240 300 400 500 700); do
            check "$who killed at $after ms of a $what" one $who $what $after
        done
    done
done
for after in $(moments 0 10 20 40 60 80 100 120 150 200); do
    check "criu killed after $after ms, in a checkpoint" one criu checkpoint $after
done
for after in $(moments 0 10 20 40 60 80 120); do
    check "criu killed after $after ms, in a restore" one criu restore $after
done
for after in $(moments 0 2 5 10 20 40); do
    check "criu alone killed $after ms after it has forked, in a restore" one alone restore $after
done
for after in $(moments 0 15 30); do
    check "criu killed $after ms after the processes are there, in a restore" one late restore $after
done
for after in $(moments 0 5 10 15 20 30); do
    check "containerd killed $after ms after the processes are there, in a restore" one restored restore $after
done
start_job job
check 'after: a checkpoint works' ctr tasks checkpoint job
check 'after: the sum goes on' goes_on job
check 'after: clean' clean
