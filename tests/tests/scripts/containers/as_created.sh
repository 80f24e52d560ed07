# as_created.sh LOW: a restored container has what its spec gives a new one: credentials, limits, mounts and their flags, cgroup,
# settings of its namespaces. In place, imported and as a copy, with a GPU and without. What is compared is what the kernel says of
# both, so nothing that is added to the spec below can be forgotten.
low=$1
on_failure() { find /var/lib/containers/storage/overlay-containers -name "*.log" -exec grep -h Error {} +; }
mkimage
simulate "$low"
from=/srv/checkpoints
mkdir -p "$from" /srv/data /srv/other
printf '[restore]\nallow = ["%s"]\n' "$from" >> /etc/cryopod/config.toml
limits=(--read-only --tmpfs /scratch:rw,size=1m,noexec,mode=1777 --shm-size 2m --group-add 102 --umask 027
    --cap-drop all --cap-add net_bind_service,kill --security-opt no-new-privileges --ulimit nofile=300:400 --ulimit core=0
    --oom-score-adj 321
    --hostname given --sysctl net.ipv4.ip_unprivileged_port_start=7 --sysctl kernel.shmmax=123456 --sysctl net.core.somaxconn=99
    -v /srv/data:/data:ro,nosuid,nodev,noexec -v /srv/other:/other:rslave --network none --workdir /scratch)
# The bed's cgroup v2 has the controllers only where the machine has no v1.
if [ -d /sys/fs/cgroup/memory ] || grep -q memory /sys/fs/cgroup/cgroup.controllers; then
    limits+=(--memory 800m --memory-reservation 700m --pids-limit 77 --cpu-shares 333 --cpus 0.9 --cpuset-cpus 0)
fi
pid_of() { podman inspect -f '{{.State.Pid}}' "$1"; }
kernel() { # CONTAINER: what the kernel says of it
    local pid dir
    pid=$(pid_of "$1")
    grep -E '^(Uid|Gid|Groups|Umask|Cap|NoNewPrivs|Seccomp:|Cpus_allowed_list|Mems_allowed_list)' "/proc/$pid/status"
    (cd "/proc/$pid" && tail -n +1 limits oom_score_adj uid_map gid_map setgroups personality coredump_filter)
    cat "/proc/$pid/attr/current" 2> /dev/null || true
    echo "scheduling: $(chrt -p "$pid" | sed 's/.*: //' | xargs) $(ionice -p "$pid") $(ps -o ni= -p "$pid")"
    # crun 1.28 gives the cgroup mount nosymfollow, which no spec asks for and CRIU does not know.
    # Where, options, kind of propagation, type, options of the file system but the overlay's directories.
    sed -E 's/^[0-9]+ [0-9]+ [0-9]+:[0-9]+ ([^ ]+) ([^ ]+) ([^ ]+)(( [a-z_]+:[0-9]+)*) - ([^ ]+) [^ ]+ (.*)/\2 \3 \4 \6 \7/; s/(shared|master|propagate_from):[0-9]+/\1/g; s/(lower|upper|work)dir=.*//; s!^(/(proc|sys)/[^ ]+) .* tmpfs .*!\1 masked!; /cgroup2/s/,nosymfollow//' \
        "/proc/$pid/mountinfo" | sort
    nsenter -t "$pid" -n -i -u sh -c 'hostname; cat /proc/sys/kernel/domainname; grep -rs . /proc/sys/net/core /proc/sys/net/ipv4 /proc/sys/kernel/shm* /proc/sys/kernel/msg* /proc/sys/kernel/sem; ip -o link show lo' |
        grep -v -e /route/flush -e random -e identifier | sort
    while IFS=: read -r _ controllers path; do
        dir=/sys/fs/cgroup/${controllers:+$controllers/}$path
        [ "$controllers" = systemd ] && continue
        (cd "${dir/name=/}" 2> /dev/null && grep -s . *.max *.min *.high *.low *.weight cpuset.cpus cpuset.mems memory.*limit* cpu.shares cpu.cfs_* blkio.weight* pids.max devices.list net_cls.classid memory.swappiness memory.oom.group) || true
    done < "/proc/$pid/cgroup" | sort
}
same() { # NAME BEFORE CONTAINER
    kernel "$3" > /tmp/now
    diff "$2" /tmp/now > /tmp/differs || { echo "$1 differs:" && cat /tmp/differs && return 1; }
}
rounds() { # NAME ARG...
    local name=$1 && shift
    start() { pod run -d --name "$@" > /dev/null; }
    start "$name" "${limits[@]}" "$@"
    wait_for lines "$name" 3
    kernel "$name" > "/tmp/$name"
    check "$name: enough is compared" test "$(wc -l < "/tmp/$name")" -gt 200
    check "$name: checkpoint" pod container checkpoint "$name"
    pod container restore "$name" > /dev/null
    check "$name: restored in place" same "$name" "/tmp/$name" "$name"
    pod container checkpoint --export /tmp/c.tar --keep "$name" > /dev/null
    cp -r "$(podman inspect -f '{{.StaticDir}}' "$name")/checkpoint" "$from/$name"
    podman rm -f -t 0 "$name" > /dev/null
    pod container restore --import /tmp/c.tar > /dev/null
    check "$name: imported" same "$name" "/tmp/$name" "$name"
    podman rm -f -t 0 "$name" > /dev/null
    start "$name" --annotation "dev.cryopod.restore=$from/$name" "${limits[@]}" "$@"
    wait_for lines "$name" 3
    check "$name: a copy" same "$name" "/tmp/$name" "$name"
    podman rm -f -t 0 "$name" > /dev/null
}
lines() { [ "$(printed "$1" | wc -l)" -ge "$2" ]; }
rounds plain localhost/busybox "${counter[@]}"
rounds gpu "${nodes[@]/#/--device=}" "${binds[@]/#/--volume=}" -e LD_LIBRARY_PATH=/cusim localhost/busybox /cusim/cusim-client

# ---- what threads have set for themselves: CRIU's own would be the engine's ----
settings() { # CONTAINER: how many of its threads have what
    local tid
    for tid in "/proc/$(pid_of "$1")/task"/*; do
        echo "$(sed -n 's/^Cpus_allowed_list:\t//p' "$tid/status"), $(ionice -p "${tid##*/}"), $(cat "/proc/${tid##*/}/timerslack_ns" "/proc/${tid##*/}/coredump_filter" | xargs)"
    done | sort | uniq -c
}
set_as() { [ "$(settings "$1")" = "$expected" ] || { settings "$1" && return 1; }; }
# On the host's network CRIU does not stop before the dump for what cryopod asks there.
network=$([ "$low" = crun ] && echo host || echo none)
gpu=(--network "$network" "${nodes[@]/#/--device=}" "${binds[@]/#/--volume=}" -e LD_LIBRARY_PATH=/cusim localhost/busybox /cusim/cusim-client)
if [ "$(nproc)" -gt 1 ]; then
    pod run -d --name set "${gpu[@]}" > /dev/null
    wait_for lines set 3
    usual=$(settings set)
    tids=("/proc/$(pid_of set)/task"/*)
    taskset -p -c 1 "${tids[-1]##*/}" > /dev/null
    ionice -c 2 -n 6 -p "${tids[-1]##*/}"
    echo 123456 > "/proc/${tids[-1]##*/}/timerslack_ns"
    echo 0x3 > "/proc/$(pid_of set)/coredump_filter"
    expected=$(settings set)
    check "a thread has settings" test "$expected" != "$usual"
    pod container checkpoint set > /dev/null
    ionice -c 3 taskset -c 0 podman --runtime cryopod-runtime container restore set > /dev/null
    check "threads keep their settings, and none has the engine's" set_as set
    pod container checkpoint --export /tmp/c.tar --keep set > /dev/null
    cp -r "$(podman inspect -f '{{.StaticDir}}' set)/checkpoint" "$from/set"
    podman rm -f -t 0 set > /dev/null
    pod run -d --name set --annotation "dev.cryopod.restore=$from/set" "${gpu[@]}" > /dev/null
    wait_for lines set 3
    check "also those of a copy" set_as set
    podman rm -f -t 0 set > /dev/null
    # CPUs that this host does not have, and a priority that needs a privilege.
    jq '.container.threads |= map(if .cpus then .cpus = "99" | .io_priority = 8193 | del(.timer_slack_ns) else . end | del(.core_dump_filter))' \
        "$from/set/cryopod.json" > /tmp/json
    cp /tmp/json "$from/set/cryopod.json"
    expected=$usual
    pod run -d --name set --annotation "dev.cryopod.restore=$from/set" "${gpu[@]}" > /dev/null
    wait_for lines set 3
    check "an archive gets no more than it may set itself" set_as set
    podman rm -f -t 0 set > /dev/null
fi
