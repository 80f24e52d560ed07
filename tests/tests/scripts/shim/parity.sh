# parity.sh: what users do with `ctr`, once with containerd's own shim and once with ours; what they see is the same.
low_level runc
containerd_up
images

cat > /tmp/logger <<'S'
#!/bin/sh
# A logging driver as containerd starts it: 3 and 4 are the container's output, 5 is closed when it is ready.
exec 5>&-
cat <&3 > "/tmp/logged.$CONTAINER_ID"
S
chmod 755 /tmp/logger

tell() { printf '%s: %s\n' "$1" "$2"; }
task_update() { # CONTAINER BYTES: a memory limit
    /src/tests/testbed/grpc.sh /run/containerd/containerd.sock \
        containerd.services.tasks.v1.Tasks/Update "$(jq -nc --arg id "$1" --arg r "{\"memory\":{\"limit\":$2}}" \
        '[[1, $id], [2, [[1, "types.containerd.io/opencontainers/runtime-spec/1/LinuxResources"], [2, $r]]]]')"
}
memory_limit() { # of the container's cgroup, whichever version
    cat "/sys/fs/cgroup/memory/default/$1/memory.limit_in_bytes" "/sys/fs/cgroup/default/$1/memory.max" 2> /dev/null
}
kept() { grep -qs "$2" "/tmp/logged.$1"; }
holds() { [ "$(cat "$1")" = "$2" ]; }
# ctr stops reading when a process has ended, and loses what it has not read by then: a process ends when ctr has printed all.
both() { [ -s /tmp/out ] && [ -s /tmp/err ]; }
terminal() { grep -q terminal /tmp/out; }
ends_when() { # CONDITION KILL-ARG...: it gets TERM then
    { wait_for "$1" > /dev/null 2>&1; ctr tasks kill -s SIGTERM "${@:2}"; } &
}
still() { local n && n=$(wc -l < "$1") && sleep 1 && [ "$(wc -l < "$1")" = "$n" ]; } # FILE: the pipe to it is empty, too
all_run() { [ "$(ctr tasks ls | grep -c RUNNING)" = 50 ]; }
over() { case $(status "$1") in '' | STOPPED) ;; *) false ;; esac; } # ctr's attach deletes it, if it comes to that
heard() { ctr namespaces label default heard=$RANDOM > /dev/null && sleep 0.1 && [ -s /tmp/events ]; } # ctr is listening

cases() { # RUNTIME TAG; its errors are looked at, so the shell does not end at one by itself
    local runtime=$1 t=$2 code=0 pid n

    : > /tmp/out > /tmp/err
    ends_when both "run$t"
    ctr run --rm --runtime "$runtime" $image "run$t" sh -c 'trap "exit 7" TERM; echo out; echo err >&2; while :; do sleep 0.1; done' \
        > /tmp/out 2> /tmp/err < /dev/null || code=$?
    tell run "$code $(cat /tmp/out) $(cat /tmp/err)"
    code=0
    ctr run --rm --runtime "$runtime" $image "bad$t" /no/such/program > /tmp/out 2>&1 < /dev/null || code=$?
    tell 'run of what is not there' "$code $(grep -o 'no such file or directory' /tmp/out | head -n 1)"
    tell 'after it' "$(ctr containers ls -q | grep -c "bad$t" || true)"
    : > /tmp/out
    ends_when terminal "tty$t"
    script -qec "ctr run -t --rm --runtime $runtime $image tty$t sh -c 'trap \"exit 4\" TERM; test -t 0 && test -t 1 && echo terminal; while :; do sleep 0.1; done'" \
        /dev/null > /tmp/out < /dev/null || tell 'run -t' "$? $(grep -o terminal /tmp/out)"

    ctr run -d --runtime "$runtime" --log-uri "binary:///tmp/logger" $image "c$t" \
        sh -c 'trap "echo term; exit 9" TERM; i=0; while :; do echo tick $i; i=$((i + 1)); sleep 0.1; done'
    wait_for kept "c$t" 'tick 3' || return
    tell 'logs by a driver' "$(sed -n 2p "/tmp/logged.c$t")"
    code=0
    : > /tmp/out > /tmp/err
    { echo hello && wait_for both; } | ctr tasks exec --exec-id e1 "c$t" sh -c 'echo err >&2; cat; exit 5' > /tmp/out 2> /tmp/err || code=$?
    tell exec "$code $(cat /tmp/out) $(cat /tmp/err)"
    code=0
    ctr tasks exec --exec-id e2 "c$t" /no/such > /tmp/out 2>&1 || code=$?
    tell 'exec of what is not there' "$code $(grep -o 'no such file or directory' /tmp/out | head -n 1)"
    code=0
    : > /tmp/out
    ends_when terminal --exec-id e3 "c$t"
    script -qec "ctr tasks exec -t --exec-id e3 c$t sh -c 'trap \"exit 3\" TERM; test -t 0 && echo terminal; while :; do sleep 0.1; done'" /dev/null \
        > /tmp/out < /dev/null || code=$?
    tell 'exec -t' "$code $(grep -o terminal /tmp/out)"
    ctr tasks exec -d --exec-id e4 "c$t" sleep 1000
    tell 'ps' "$(ctr tasks ps "c$t" | tail -n +2 | wc -l | awk '{print ($1 >= 2)}')"
    ctr tasks kill --exec-id e4 -s SIGKILL "c$t"

    ctr tasks pause "c$t"
    wait_for still "/tmp/logged.c$t" || return
    tell pause "$(status "c$t") still"
    code=0
    ctr tasks exec --exec-id e5 "c$t" true > /tmp/out 2>&1 || code=$?
    tell 'exec while it is paused' "$code $(grep -o 'paused.*' /tmp/out | head -n 1)"
    ctr tasks resume "c$t"
    n=$(wc -l < "/tmp/logged.c$t")
    wait_for kept "c$t" "tick $((n + 2))" || return
    tell resume "$(status "c$t")"
    code=0
    ctr tasks resume "c$t" > /tmp/out 2>&1 || code=$?
    n=$(wc -l < "/tmp/logged.c$t")
    wait_for kept "c$t" "tick $((n + 2))" || return
    tell 'resume of what runs' "$code $(grep -o 'cannot resume.*process' /tmp/out) $(status "c$t")"
    task_update "c$t" 134217728 > /dev/null
    tell update "$(memory_limit "c$t")"
    tell metrics "$(ctr tasks metrics "c$t" | awk 'NR > 2 {print $1}' | grep -v '^c' | sort | md5sum)"
    ctr tasks kill -s SIGTERM "c$t"
    wait_for is "c$t" STOPPED || return
    wait_for kept "c$t" term || return
    tell 'kill and delete' "$(ctr tasks delete "c$t" 2>&1 | grep -o 'code [0-9]*') $(tail -n 1 "/tmp/logged.c$t")"
    code=0
    ctr tasks delete "c$t" > /tmp/out 2>&1 || code=$?
    tell 'delete again' "$code $(grep -o 'not found' /tmp/out | head -n 1)"
    ctr containers rm "c$t"

    # attach: the one that started it is gone
    sleep 1000 | ctr run --fifo-dir "/tmp/fifo$t" --runtime "$runtime" $image "a$t" \
        sh -c 'while read -r line; do echo "got $line"; done' > /dev/null 2>&1 &
    wait_for is "a$t" RUNNING || return
    pkill -KILL -f "^ctr run --fifo-dir /tmp/fifo$t"
    : > /tmp/out
    (echo hello && sleep 1000) | timeout -s KILL 1000 ctr tasks attach "a$t" > /tmp/out 2>&1 &
    local attached=$!
    wait_for holds /tmp/out 'got hello' || return
    tell attach "$(cat /tmp/out)"
    ctr tasks kill -s SIGKILL "a$t"
    within 60 gone $attached || kill $attached # which may delete the task
    wait_for over "a$t" || return
    ctr tasks delete "a$t" > /dev/null 2>&1 || true
    ctr containers rm "a$t"

    ctr events > /tmp/events &
    local events=$!
    wait_for heard || return
    # More than once: the stock shim says nothing of it where the cgroup is gone before it looks. Events of
    # OOM count once: on cgroup v1 the end of the cgroup looks like a second one.
    for n in $(seq 20); do
        code=0
        ctr run --rm --memory-limit 16777216 --runtime "$runtime" $image "oom$n$t" tail /dev/zero > /dev/null 2>&1 < /dev/null || code=$?
        wait_for grep -q "/tasks/exit.*oom$n$t" /tmp/events || return
        if within 3 grep -q "/tasks/oom.*oom$n$t" /tmp/events; then break; fi
    done
    kill $events
    tell oom "$code $(grep "oom$n$t" /tmp/events | awk '{for (i = 1; i <= NF; i++) if ($i ~ /^\/tasks\/(create|start|exit)/ || ($i ~ /^\/tasks\/oom/ && !oom++)) print $i}' | sort | uniq -c | tr -s ' \n' ' ')"

    # many at once
    for n in $(seq 50); do
        ctr run -d --null-io --runtime "$runtime" $image "m$n$t" sleep 1000 > "/tmp/m$n" 2>&1 &
        # shellcheck disable=SC2034
        starting[n]=$!
    done
    wait "${starting[@]}" || true
    within 60 all_run || true
    tell 'fifty' "$(ctr tasks ls | grep -c RUNNING)"
    cat /tmp/m[0-9]* >&2 # what those say that did not start

    # containerd restarted under them
    containerd_down -KILL
    containerd_up
    within 60 all_run || true # the state of a shim that answers late is unknown
    tell 'fifty, containerd killed and started again' "$(ctr tasks ls | grep -c RUNNING)"
    code=0
    ctr tasks exec --exec-id after "m7$t" sh -c 'exit 6' || code=$?
    tell 'exec after that' "$code"
    ctr run -d --runtime "$runtime" --log-uri "file:///tmp/trap$t" $image "trap$t" \
        sh -c 'trap "exit 9" TERM; echo ready; while :; do sleep 0.1; done'
    wait_for grep -q ready "/tmp/trap$t" || return
    containerd_down -TERM
    containerd_up
    ctr tasks kill -s SIGTERM "trap$t"
    wait_for is "trap$t" STOPPED || return
    tell 'exit code after a restart' "$(ctr tasks delete "trap$t" 2>&1 | grep -o 'code [0-9]*')"
    ctr containers rm "trap$t"

    # The stock shim killed
    pid=$(pid_of "m1$t")
    kill -KILL "$(stock_shim "m1$t")"
    wait_for gone "$pid" || return
    within 10 is "m1$t" "" || true
    tell 'shim killed' "$(status "m1$t")"
    for n in $(seq 50); do
        ctr tasks delete -f "m$n$t" > /dev/null 2>&1 || true &
        starting[n]=$!
    done
    wait "${starting[@]}" || true
    for n in $(seq 50); do ctr containers rm "m$n$t" > /dev/null 2>&1 || echo "m$n$t cannot be removed"; done
    tell 'after all' "$(ctr tasks ls | wc -l) $(ctr containers ls -q | wc -l) $(ls /run/containerd/io.containerd.runtime.v2.task/default | wc -l)"
    wait_for no_shims && tell 'shims' none
    tell 'sockets' "$(find /run/containerd/s -type s -print -delete | wc -l)" # of the one that was killed
}
starting=()
cases $STOCK s > /tmp/stock 2> /tmp/stock.err || { cat /tmp/stock /tmp/stock.err && echo 'the stock shim' && exit 1; }
cases $OURS o > /tmp/ours 2> /tmp/ours.err || { cat /tmp/ours /tmp/ours.err && tail -n 20 /tmp/containerd.log && exit 1; }
diff /tmp/stock /tmp/ours || { echo 'the shims differ (<: containerd, >: cryopod)' && cat /tmp/ours.err && exit 1; }
sed 's/^/ok: /' /tmp/ours

# containerd, started again, talks to ours: it looks where these files say.
ctr run -d --null-io --runtime $OURS $image k0 sleep 1000
leads_back() {
    local bundle=/run/containerd/io.containerd.runtime.v2.task/default/k0
    grep -qF "$(jq -r .address $bundle/cryopod-shim.json)" $bundle/address || grep -qF "$(jq -r .address $bundle/cryopod-shim.json)" $bundle/bootstrap.json
} 2> /dev/null
check 'a bundle leads to our process' leads_back
ctr tasks kill -s SIGKILL k0
wait_for is k0 STOPPED
ctr tasks delete k0 > /dev/null 2>&1 || true
ctr containers rm k0

# Our own process killed: containerd cleans up as it does after its own shim, and nothing is left of either.
ctr run -d --null-io --runtime $OURS $image k1 sleep 1000
pid=$(pid_of k1) stock=$(stock_shim k1)
kill -KILL "$(our_shim k1)"
check 'our process killed: the container is gone' wait_for gone "$pid"
check "our process killed: so is containerd's shim" wait_for gone "$stock"
cleaned() { ctr tasks delete -f k1 > /dev/null 2>&1 || true; is k1 ''; } # containerd itself may be about it
wait_for cleaned
check 'our process killed: the container can be removed' ctr containers rm k1
check 'our process killed: no process is left' wait_for no_shims
check 'our process killed: no socket is left' wait_for no_sockets
check 'our process killed: no mount is left' wait_for sh -c '! grep -q runtime.v2.task /proc/mounts'
