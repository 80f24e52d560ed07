# lib.sh: containerd in the bed, and its runtimes side by side.
# shellcheck shell=bash
STOCK=io.containerd.runc.v2
OURS=io.containerd.cryopod.v2
image=localhost/busybox:latest
export CONTAINERD_SUPPRESS_DEPRECATION_WARNINGS=1 # of cgroup v1, on every call of ctr

containerd_up() { # [PATH-OF-LOG]
    containerd >> "${1:-/tmp/containerd.log}" 2>&1 &
    containerd_pid=$!
    wait_for ctr version > /dev/null 2>&1
}
containerd_down() { # [SIGNAL]
    kill "${1:--TERM}" "$containerd_pid"
    wait "$containerd_pid" 2> /dev/null || true
}
images() { # busybox for ctr
    mkimage
    podman save -q --format oci-archive -o /tmp/busybox.oci localhost/busybox
    ctr images import /tmp/busybox.oci > /dev/null
}
on_failure() { tail -n 15 /tmp/containerd.log; }
status() { # CONTAINER: RUNNING, STOPPED, ...; nothing if it has no task
    ctr tasks ls | awk -v id="$1" '$1 == id {print $3}'
}
is() { [ "$(status "$1")" = "$2" ]; }
pid_of() { ctr tasks ls | awk -v id="$1" '$1 == id {print $2}'; }
# printed_in CONTAINER COMMAND: what a shell prints in it. Asked again where the end is missing: ctr stops reading when the
# process has ended, and loses what it printed if it has not opened the pipe by then (a busy machine).
printed_in() {
    local said
    for _ in {1..5}; do
        said=$(ctr tasks exec --exec-id "e$RANDOM" "$1" sh -c "$2 && echo end") || return
        if [ "${said##*$'\n'}" = end ]; then echo "${said%end}" && return; fi
    done
    echo "nothing printed by: $2" >&2 && return 1
}
gone() { ! kill -0 "$1" 2> /dev/null; }
# stock_shim ID, our_shim ID: the processes' pids
stock_shim() { shims | awk -v id="$1" '/shim-runc-v2 / && $0 ~ "-id " id "( |$)" {print $1}'; }
our_shim() { shims | awk -v id="$1" '/shim-cryopod-v2 / && $0 ~ "-id " id " .*serve" {print $1}'; }
shims() { pgrep -ax containerd-shim || true; } # as the kernel cuts their names
no_shims() { [ -z "$(shims)" ]; }
no_sockets() { [ -z "$(ls -A /run/containerd/s 2> /dev/null)" ]; }

# pausing COMMAND...: tries once more where runc or CRIU failed: on cgroup v1 the kernel does not always manage to pause a
# container. What they say is printed. A container with GPUs has errors of ours, after which nothing is tried again.
pausing() {
    local log
    "$@" 2> /tmp/pausing.said && return
    log=$(sed -n 's/.*path= *\([^ ]*\.log\).*/\1/p' /tmp/pausing.said | head -n 1)
    { cat /tmp/pausing.said && [ -z "$log" ] || grep -h Error "$log"; } >&2 || true
    grep -q -e 'unable to freeze' -e 'criu failed: type DUMP' -e 'Timeout reached. Try to interrupt' /tmp/pausing.said && "$@"
}
