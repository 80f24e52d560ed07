# exec.sh LOW: processes that exec started. No checkpoint has them, so none succeeds while they are there; those that the
# container's init process has adopted come back.
low=$1
mkimage
simulate "$low"
gpu=(--network none "${nodes[@]/#/--device=}" "${binds[@]/#/--volume=}" -e LD_LIBRARY_PATH=/cusim)
on_failure() { cat /tmp/said; }
start() { # ARG...
    pod run -d --name c1 "${gpu[@]}" "$@" localhost/busybox "${counter[@]}" > /dev/null
    wait_for counted c1 3
}
checkpoint() { pod container checkpoint --export /tmp/c1.tar "$@" c1 > /tmp/said 2>&1; }
refused() { # NAME PATTERN: and the container goes on
    local last
    if checkpoint; then echo "FAILED: $1: a checkpoint" && exit 1; fi
    check "$1" says /tmp/said "$2"
    last=$(count c1)
    check 'it goes on' wait_for counted c1 $((last + 3))
    check 'nothing is left' test -z "$(ls -A /run/cryopod)"
}
ended() { podman rm -f -t 0 c1 > /dev/null; }
has() { pgrep -fx "$1" > /dev/null; }

start
podman exec -d c1 sleep 1000
wait_for has 'sleep 1000' # the counter's are others
refused 'a process of exec' 'process [0-9]+ \(sleep\): was started in the container by exec'
check 'it goes on, too' has 'sleep 1000'
podman exec c1 killall sleep
podman exec -d c1 sh -c '/cusim/cusim-client --mib 16 > /tmp/ticks'
wait_for podman exec c1 grep -q ok /tmp/ticks
refused 'a GPU job of exec' '\(cusim-client\): was started in the container by exec'
podman exec c1 killall cusim-client
wait_for sh -c '! pgrep -x cusim-client > /dev/null'
check 'a short one is waited for' podman exec -d c1 sleep 1
check 'a checkpoint' checkpoint
ended

# Not BusyBox's sleep, which ends at a restore: CRIU lets its call return EINTR.
# shellcheck disable=SC2016 # for the container's shell
adopt='tail -f /dev/null < /dev/null > /dev/null 2>&1 &'
start
podman exec c1 sh -c "$adopt"
check 'adopted by the init process' wait_for has 'tail -f /dev/null'
check 'a checkpoint' checkpoint
ended
check 'a restore' pod container restore --import /tmp/c1.tar > /dev/null
check 'it is back' wait_for has 'tail -f /dev/null' # CRIU gives it its command line last
ended

# In a restored container runc before 1.3 runs an exec in the host's time namespace. CRIU dumps what it leaves, and cannot
# restore it.
for kind in GPU plain; do
    options=("${gpu[@]}")
    if [ $kind = plain ]; then options=(--network none); fi
    pod run -d --name c1 "${options[@]}" localhost/busybox "${counter[@]}" > /dev/null
    wait_for counted c1 3
    check "$kind: a checkpoint" checkpoint
    ended
    check "$kind: a restore" pod container restore --import /tmp/c1.tar > /dev/null
    check "$kind: an exec has the seccomp profile" podman exec c1 grep -q '^Seccomp:.*2$' /proc/self/status
    podman exec c1 sh -c "$adopt"
    if checkpoint; then
        ended
        check "$kind: a second restore" pod container restore --import /tmp/c1.tar > /dev/null
    else
        check "$kind: refused before" says /tmp/said 'time namespace of its own'
    fi
    last=$(count c1)
    check "$kind: it goes on" wait_for counted c1 $((last + 3))
    ended
done

start --annotation dev.cryopod.check.exec=off
podman exec -d c1 sleep 1000
check 'a checkpoint without it, if asked for' checkpoint
ended

# Nothing keeps an engine from starting one when the plan has looked.
printf '#!/bin/bash\ncase " $* " in *" checkpoint "*) /usr/bin/%s exec -d "${@: -1}" sleep 1000 < /dev/null > /dev/null 2>&1 ;; esac\nexec /usr/bin/%s "$@"\n' "$(basename "$(type -P "$low")")" "$low" > "/srv/$low"
sed -i "s|/usr/bin/$low|$(type -P "$low")|g" "/srv/$low"
chmod 755 "/srv/$low"
sed -i "s|^low_level.*|low_level = \"/srv/$low\"|" /etc/cryopod/config.toml
start
# The runtime's own child may be seen before it has become sleep.
refused 'one that came later' '\((sleep|runc:\[2:INIT\]|crun)\): was started in the container by exec'
ended
