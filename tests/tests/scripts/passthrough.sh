# passthrough.sh LOW: runs a table of calls with LOW itself and with cryopod-runtime in front of it, and compares
# standard output, standard error and exit code, byte for byte, but for what differs between any two calls: process ids,
# times and measured numbers. Prints each call that differs; exit code 1 if any does.
set +e -u
low=$1
low_level "$low"
bundle=/tmp/bundle
mkdir -p $bundle/rootfs/bin /tmp/empty
tar -C $bundle/rootfs -xf /usr/local/share/testbed/busybox.tar
cd $bundle
"$low" spec
jq '.process.terminal = false | .process.args = ["sleep", "1000"] | .root.readonly = false' config.json > c && mv c config.json
mkdir -p /tmp/echo && jq '.process.args = ["sh", "-c", "cat <&3; echo LISTEN_FDS=$LISTEN_FDS; env | sort; exit 5"]' config.json > /tmp/echo/config.json
cp -r rootfs /tmp/echo/
echo "from descriptor 3" > /tmp/three

call() { # INPUT ARG...: one line of the table
    local input=$1 file verb_of=${2:-}
    shift
    n=$((n + 1))
    file=$out/$(printf %02d $n)
    echo "$*" > "$file.call"
    "$r" "$@" < "$input" > "$file.stdout" 2> "$file.stderr" 3< /tmp/three
    echo $? > "$file.code"
    # pids, times, and the numbers of statistics
    sed -i -E 's/"pid": ?[0-9]+/"pid": PID/; s/[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]+Z?/TIME/g' "$file.stdout" "$file.stderr"
    # runc's, where the kernel has not ended the processes yet.
    sed -i '/Failed to remove cgroup (will retry)/d' "$file.stderr"
    # crun's words for a container that is not there, and what containerd's shim understands
    if [ "$verb_of" = delete ]; then sed -i -E 's/^(time=.*)?(cryopod: the container [^ ]* does not exist|.*cannot open directory .*No such file or directory)$/NO SUCH CONTAINER/' "$file.stderr"; fi
    case "$*" in
        ps* | list* | "--root /tmp/root list"*) sed -i -E 's/[0-9]+/N/g; s/ +/ /g' "$file.stdout" ;;
        # On a busy machine the pressure is no whole number, and what was read from a disk is in a list.
        events*) sed -i -E 's/[0-9]+(\.[0-9]+)?/N/g; s/,?"[a-z_]+":N//g; s/,?"io[A-Za-z]+":\[[^]]*\]//g; s/\{,/{/g' "$file.stdout" ;;
    esac
}

in_its_program() { grep -q sleep "/proc/$("$low" state c1 | jq .pid)/comm"; }
table() {
    n=0
    call /dev/null --version
    call /dev/null --help
    call /dev/null
    call /dev/null features
    call /dev/null no-such-verb
    call /dev/null --no-such-flag state c1
    call /dev/null state --no-such-flag c1
    call /dev/null checkpoint --help
    call /dev/null restore --help
    call /dev/null restore --lsm-mount-context
    call /dev/null checkpoint
    for verb in state start kill delete pause resume ps exec update checkpoint events; do
        call /dev/null $verb unknown
    done
    call /dev/null restore --bundle /tmp/empty --image-path /tmp/empty unknown
    call /dev/null create --bundle /tmp/empty c1
    (rm -rf /tmp/spec && mkdir /tmp/spec && cd /tmp/spec && call /dev/null spec && cp config.json "$out/spec.json")
    n=40
    call /dev/null create c1
    call /dev/null state c1
    call /dev/null create c1
    call /dev/null start c1
    call /dev/null state c1
    call /dev/null start c1
    wait_for in_its_program # `start` returns before runc's init has become the container's program
    call /dev/null ps c1
    call /dev/null ps --format json c1
    call /dev/null list -q
    call /dev/null exec c1 sh -c 'echo out; echo err >&2; exit 7'
    call /tmp/three exec c1 cat
    call /dev/null exec --cwd /bin --env A=B c1 sh -c 'pwd; echo $A'
    call /dev/null exec --preserve-fds 1 c1 sh -c 'cat <&3'
    call /dev/null exec c1 no-such-program
    call /dev/null exec c1 sh -c 'kill -9 $$'
    call /dev/null pause c1
    call /dev/null state c1
    call /dev/null resume c1
    call /dev/null update --cpu-share 512 c1
    call /dev/null events --stats c1
    call /dev/null kill c1 NOSUCHSIGNAL
    call /dev/null delete c1
    call /dev/null kill c1 KILL
    wait_for sh -c "$r state c1 | grep -q stopped"
    call /dev/null state c1
    call /dev/null delete c1
    call /dev/null delete c1
    call /dev/null delete --force c1
    n=70
    cd /tmp/echo
    call /dev/null run --preserve-fds 1 c2
    LISTEN_FDS=1 call /dev/null run c2
    call /dev/null --root /tmp/root run --preserve-fds 1 c2
    call /dev/null --root /tmp/root list
    rm -f /tmp/log.json
    call /dev/null --log /tmp/log.json --log-format json state unknown
    sed -E 's/[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]+Z?/TIME/g' /tmp/log.json > "$out/log.json"
    call /dev/null delete checkpoint
    call /dev/null kill restore
    cd $bundle
    # Where a login session has its state directories: a stopped container is deleted without --force, as buildah does it.
    export XDG_RUNTIME_DIR=/tmp/session
    rm -rf $XDG_RUNTIME_DIR && mkdir -m 700 $XDG_RUNTIME_DIR
    n=90
    call /dev/null create c4
    call /dev/null kill c4 KILL
    wait_for sh -c "$r state c4 | grep -q stopped"
    call /dev/null delete c4
    (cd $XDG_RUNTIME_DIR && find . -mindepth 2) > "$out/session"
    unset XDG_RUNTIME_DIR
}

for side in bare wrapped; do
    out=/tmp/$side
    mkdir -p $out
    rm -rf "/run/$low/unknown" # crun's failed restore leaves it
    case $side in bare) r=$low ;; wrapped) r=cryopod-runtime ;; esac
    table 3< /dev/null
done

# The same table must have run on both sides, and have done something.
calls=$(ls /tmp/bare/*.code | wc -l)
[ "$calls" -ge 50 ] || { echo "only $calls calls were made"; exit 1; }
[ "$(cat /tmp/bare/50.code)" = 7 ] || { echo "the exec in the table did not run: $(cat /tmp/bare/50.*)"; exit 1; }
if diff -r /tmp/bare /tmp/wrapped; then
    echo "$calls calls alike"
else
    for file in $(diff -rq /tmp/bare /tmp/wrapped | grep -oE '/tmp/bare/[0-9]+' | sort -u); do echo "differs: $(cat "$file.call")"; done
    exit 1
fi

# In the foreground the process is the low-level runtime itself: exec, not a child.
cd /tmp/echo
jq '.process.args = ["sleep", "1000"]' config.json > c && mv c config.json
cryopod-runtime run c3 < /dev/null &
wait_for sh -c "$low state c3 2> /dev/null | grep -q running"
# (crun runs from a sealed copy of itself, so that its /proc/PID/exe says nothing.)
[ "$(tr '\0' ' ' < /proc/$!/cmdline)" = "$low run c3 " ] || { echo "not an exec: $(tr '\0' ' ' < /proc/$!/cmdline)"; exit 1; }
"$low" kill c3 KILL
wait $! || true
