# cri.sh: containerd's CRI with our shim as a runtime class, without a kubelet: two containers in a pod, a checkpoint,
# a restore into a new pod, copies by `create`, with containerd's shim too. CRI checkpoints exist from containerd 2.1 on.
simulate runc
printf '[restore]\nallow = [{ from = "/srv/checkpoints", kubernetes = ["ns"], variable = true }]\n' >> /etc/cryopod/config.toml
registry
cri_configure
# As a user would write it, in the directory of examples.
sed -n '/^\[plugins.*runtimes.cryopod/,$p' /src/examples/kubernetes/containerd.toml >> /etc/containerd/config.toml
cat >> /etc/containerd/config.toml << 'T'
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.stock]
  runtime_type = 'io.containerd.runc.v2'
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.stock.options]
    BinaryName = '/usr/local/bin/cryopod-runtime'
T
containerd_up
wait_for cri_quiet Version '[[1,"v1"]]'
cri PullImage '[[1,[[1,"localhost:5000/busybox:1"]]]]' > /dev/null
mkdir -p /tmp/logs
sandbox() { # UID
    printf '[[1,[[1,"pod%s"],[2,"uid%s"],[3,"ns"]]],[3,"/tmp/logs"],[8,[[2,[[1,[[1,2],[2,1],[3,1]]]]]]]%s]' "$1" "$1" "${annotations:-}"
}
container() { # POD UID NAME IMAGE COMMAND...: a request; `from`: the checkpoint that its environment names
    local pod=$1 uid=$2 name=$3 image=$4 && shift 4
    jq -nc --arg from "${from:-}" --arg pod "$pod" --arg name "$name" --arg image "$image" --argjson sandbox "$(sandbox "$uid")" \
        --argjson command "$(printf '%s\n' "$@" | jq -Rnc '[inputs | [3, .]]')" '[[1, $pod], [2, [
        [1, [[1, $name]]], [2, [[1, $image]]]] + $command + [[6, [[1, "LD_LIBRARY_PATH"], [2, "/cusim"]]], [6, [[1, "CRYOPOD_RESTORE"], [2, $from]]], [11, ($name + ".log")]]
        + [$ARGS.positional[] | if contains(":") then split(":") | [7, [[1, .[1]], [2, .[0]]]]
        else [8, [[1, .], [2, .], [3, "rwm"]]] end]], [3, $sandbox]]' --args "${binds[@]}" "${nodes[@]}"
}
logs() { sed 's/^[^ ]* stdout F //' "/tmp/logs/$1.log"; }
lines() { wc -l < "/tmp/logs/$1.log"; }
more() { [ "$(lines "$1")" -gt "$2" ]; }
# What the kubelet makes of a pod's runtimeClassName.
handler=$(awk '/^handler:/ {print $2}' /src/examples/kubernetes/runtimeclass.yaml)
if cri RunPodSandbox "[[1,$(sandbox 0)],[2,\"no-$handler\"]]" > /tmp/said 2>&1; then exit 1; fi
check 'a runtime class that containerd has not' says /tmp/said "no runtime for \"no-$handler\""
pod=$(cri RunPodSandbox "[[1,$(sandbox 1)],[2,\"$handler\"]]")
check 'a pod: of our shim' test "$(shims | grep -c shim-cryopod)" = 1
job=$(cri CreateContainer "$(container "$pod" 1 job localhost:5000/busybox:1 /cusim/cusim-client --mib 100)")
cri StartContainer "[[1,\"$job\"]]"
side=$(cri CreateContainer "$(container "$pod" 1 side localhost:5000/busybox:1 sh -c 'while :; do echo side; sleep 0.1; done')")
cri StartContainer "[[1,\"$side\"]]"
wait_for at_tick job 30
check 'two containers in a pod: one shim of each kind' test "$(shims | wc -l)" = 2
check 'two containers in a pod: one of ours' test "$(shims | grep -c shim-cryopod)" = 1
recorded() { # the containers and the pod itself. `delete` needs it; containerd 2 calls `start` for the pod alone
    local records=(/run/containerd/io.containerd.runtime.v2.task/k8s.io/*/cryopod-shim.json)
    [ ${#records[@]} = 3 ] && [ "$(jq -r .address "${records[@]}" | sort -u | wc -l)" = 1 ]
}
check 'two containers in a pod: a record in each bundle' recorded
before=$(sum job)
cri ExecSync "[[1,\"$job\"],[2,\"sh\"],[2,\"-c\"],[2,\"echo mine > /made\"]]" > /dev/null
cri UpdateContainerResources "[[1,\"$job\"],[2,[[4,1073741824]]]]"
check 'an update' sh -c 'cat /sys/fs/cgroup/memory/k8s.io/*/memory.limit_in_bytes | grep -qx 1073741824'
cri CheckpointContainer "[[1,\"$job\"],[2,\"/tmp/cri.tar\"],[3,60]]"
check 'checkpoint: the sum goes on' goes_on job
check 'checkpoint: the other container goes on' wait_for more side "$(lines side)"
check 'checkpoint: whole' cryopod verify -q /tmp/cri.tar
containerd_again() { # SIGNAL
    containerd_down "$1"
    containerd_up
    wait_for cri_quiet Version '[[1,"v1"]]'
}
containerd_again -KILL
check 'containerd killed and started again: the sum goes on' goes_on job
check 'containerd killed and started again: the other container goes on' wait_for more side "$(lines side)"
cri CheckpointContainer "[[1,\"$job\"],[2,\"/tmp/second.tar\"],[3,60]]"
check 'a second checkpoint: whole' cryopod verify -q /tmp/second.tar
check 'a second checkpoint: the sum goes on' goes_on job
containerd_again -TERM
check 'containerd restarted: the sum goes on' goes_on job
# It writes all the while: containerd packs its files after CRIU's dump.
# shellcheck disable=SC2016
writes='exec 3> /grows; (while :; do echo line; done) >&3 & exec /cusim/cusim-client --mib 8'
writer=$(cri CreateContainer "$(container "$pod" 1 writer localhost:5000/busybox:1 sh -c "$writes")")
cri StartContainer "[[1,\"$writer\"]]"
wait_for ticked writer 3
cri CheckpointContainer "[[1,\"$writer\"],[2,\"/tmp/writer.tar\"],[3,60]]"
check 'a process that writes: the sum goes on' goes_on writer
check 'a process that writes: whole' cryopod verify -q /tmp/writer.tar
cri StopContainer "[[1,\"$writer\"],[2,0]]"
cri StopContainer "[[1,\"$job\"],[2,0]]"
check 'a container ends: the other goes on' wait_for more side "$(lines side)"
cri RemoveContainer "[[1,\"$job\"]]"
cri StopPodSandbox "[[1,\"$pod\"]]"
cri RemovePodSandbox "[[1,\"$pod\"]]"
check 'the pod ends: no shim is left' wait_for no_shims
check 'the pod ends: no socket is left' wait_for no_sockets
rm -f /tmp/logs/job.log

if cri_restores; then
    pod=$(cri RunPodSandbox "[[1,$(sandbox 2)],[2,\"$handler\"]]")
    job=$(cri CreateContainer "$(container "$pod" 2 job /tmp/cri.tar /cusim/cusim-client --mib 100)")
    cri StartContainer "[[1,\"$job\"]]"
    wait_for ticked job 3
    check 'a new pod, from the archive: the sum goes on' goes_on job
    check 'a new pod, from the archive: not from its beginning' at_tick job 30
    check 'a new pod, from the archive: the same sum' test "$(sum job)" = "$before"
    cri ExecSync "[[1,\"$job\"],[2,\"sh\"],[2,\"-c\"],[2,\"grep mine /made\"]]" > /tmp/said
    check 'a new pod, from the archive: the file is there' says /tmp/said mine
    cri StopPodSandbox "[[1,\"$pod\"]]"
    cri RemovePodSandbox "[[1,\"$pod\"]]"
    check 'no shim is left' wait_for no_shims
fi

mkdir -p /srv/checkpoints
mv /tmp/cri.tar /tmp/writer.tar /srv/checkpoints
for class in stock "$handler"; do
    rm -f /tmp/logs/*.log
    pod=$(cri RunPodSandbox "[[1,$(sandbox 3)],[2,\"$class\"]]")
    job=$(from=/srv/checkpoints/cri.tar && cri CreateContainer "$(container "$pod" 3 job localhost:5000/busybox:1 true)")
    sleep 0.3
    check "$class: a copy: it waits" test ! -s /tmp/logs/job.log
    cri StartContainer "[[1,\"$job\"]]"
    wait_for ticked job 3
    check "$class: a copy: the sum goes on" goes_on job
    check "$class: a copy: not from its beginning" at_tick job 30
    check "$class: a copy: the same sum" test "$(sum job)" = "$before"
    cri ExecSync "[[1,\"$job\"],[2,\"sh\"],[2,\"-c\"],[2,\"grep mine /made; hostname\"]]" > /tmp/said
    check "$class: a copy: its file is there" says /tmp/said mine
    rm -f /tmp/logs/writer.log
    writer=$(from=/srv/checkpoints/writer.tar && cri CreateContainer "$(container "$pod" 3 writer localhost:5000/busybox:1 true)")
    cri StartContainer "[[1,\"$writer\"]]"
    wait_for ticked writer 3
    check "$class: a copy of one that writes" goes_on writer
    cri StopPodSandbox "[[1,\"$pod\"]]"
    cri RemovePodSandbox "[[1,\"$pod\"]]"
    check "$class: nothing is left" wait_for no_shims
done

# What a pod's owner sees of a refusal is the beginning of an event.
printf -v annotations ',[7,[[1,"dev.cryopod.restore"],[2,"docker://registry.example/team/a-long-name-of-a-server@sha256:%064d"]]]' 0
pod=$(cri RunPodSandbox "[[1,$(sandbox 5)],[2,\"$handler\"]]")
one=$(cri CreateContainer "$(container "$pod" 5 job localhost:5000/busybox:1 true)")
if cri StartContainer "[[1,\"$one\"]]" > /tmp/refused 2>&1; then exit 1; fi
grep -o 'failed to create containerd task.*' /tmp/refused | head -n 1 | cut -c 1-200 > /tmp/said
check 'a refusal: the reason comes first' says /tmp/said 'dev.cryopod.restore: that is not allowed'
cri StopPodSandbox "[[1,\"$pod\"]]"
cri RemovePodSandbox "[[1,\"$pod\"]]"
