# one_moment.sh: a pod of two containers that share its network, IPC and, in the second round, PID namespaces. Both are paused,
# checkpointed by the CRI, and begin in a new pod, each from its own checkpoint: at the same moment, in that pod's namespaces.
simulate runc
from=/srv/checkpoints
mkdir -p $from /tmp/logs
printf '[restore]\nallow = [{ from = "%s", kubernetes = ["ns"] }]\n' $from >> /etc/cryopod/config.toml
registry
cri_configure
sed -n '/^\[plugins.*runtimes.cryopod/,$p' /src/examples/kubernetes/containerd.toml >> /etc/containerd/config.toml
cri_network
on_failure() { tail -n 5 /tmp/logs/*.log; tail -n 5 /tmp/containerd.log; }
containerd_up
wait_for cri_quiet Version '[[1,"v1"]]'
cri PullImage '[[1,[[1,"localhost:5000/busybox:1"]]]]' > /dev/null
logs() { sed 's/^[^ ]* stdout F //' "/tmp/logs/$1.log"; }
last() { logs "$1" | tail -n 1 | cut -d' ' -f1; }
sandbox() { # UID PID-MODE [KEY VALUE]...
    local uid=$1 mode=$2 more= && shift 2
    while [ $# -gt 1 ]; do more+=",[7,[[1,\"$1\"],[2,\"$2\"]]]" && shift 2; done
    printf '[[1,[[1,"pod%s"],[2,"uid%s"],[3,"ns"]]],[3,"/tmp/logs"],[8,[[2,[[1,[[2,%s]]]]]]]%s]' "$uid" "$uid" "$mode" "$more"
}
# The job writes the number of its next line, and its neighbour repeats what it read last.
# shellcheck disable=SC2016
job='/cusim/cusim-client --mib 32 | while read -r line; do echo "${line%% *}" > /pod/now; echo "$line"; done'
# shellcheck disable=SC2016
neighbour='while :; do read -r n < /pod/now && [ -n "$n" ] && seen=$n; echo "$seen"; sleep 0.05; done'
started() { # SANDBOX NAME COMMAND SOURCE:TARGET|NODE...: prints the container
    local sandbox=$1 name=$2 command=$3 one && shift 3
    one=$(cri CreateContainer "$(jq -nc --arg pod "$pod" --argjson sandbox "$sandbox" --arg name "$name" --arg command "$command" --argjson mode "$mode" '[[1, $pod], [2, [
        [1, [[1, $name]]], [2, [[1, "localhost:5000/busybox:1"]]], [3, "sh"], [3, "-c"], [3, $command],
        [6, [[1, "LD_LIBRARY_PATH"], [2, "/cusim"]]], [11, ($name + ".log")], [15, [[2, [[3, [[2, $mode]]]]]]]]
        + [$ARGS.positional[] | if contains(":") then split(":") | [7, [[1, .[1]], [2, .[0]]]]
        else [8, [[1, .], [2, .], [3, "rwm"]]] end]], [3, $sandbox]]' --args "$@")")
    cri StartContainer "[[1,\"$one\"]]" > /dev/null && echo "$one"
}
namespaces() { # CONTAINER: those that a pod shares
    local kind
    for kind in "${shared[@]}"; do cri ExecSync "[[1,\"$1\"],[2,\"readlink\"],[2,\"/proc/self/ns/$kind\"]]" | grep -o "$kind:[^ ]*]"; done
}
of_pod() { # the same of the process that holds them
    local kind process && process=$(ctr -n k8s.io tasks ls | awk -v id="$pod" '$1 == id {print $2}')
    for kind in "${shared[@]}"; do readlink "/proc/$process/ns/$kind"; done
}
ended() { cri StopPodSandbox "[[1,\"$pod\"]]" > /dev/null && cri RemovePodSandbox "[[1,\"$pod\"]]" > /dev/null && rm -f /tmp/logs/*.log; }
# All that the job has done has arrived: the file that it writes first says the same as the logs, which are late.
follows() { [ "$(last job)" = "$(cat /tmp/pod/now)" ] && [ "$(last neighbour)" = "$(cat /tmp/pod/now)" ]; }
# A pause may meet the job between the file and the line: it goes on then, and is paused once more.
paused() { ctr -n k8s.io tasks pause "$1" && { within 10 follows || { ctr -n k8s.io tasks resume "$1" && false; }; }; }
reads() { [ "$(last neighbour)" -gt "$tick" ]; }

for mode in 1 0; do # a PID namespace for each container, and one for the pod
    shared=(net ipc uts)
    [ $mode = 1 ] || shared+=(pid)
    mkdir -p /tmp/pod
    : > /tmp/pod/now
    it=$(sandbox 1$mode $mode dev.cryopod.checkpoint.at-pause on)
    pod=$(cri RunPodSandbox "[[1,$it],[2,\"cryopod\"]]")
    one=$(started "$it" job "$job" "${binds[@]}" /tmp/pod:/pod "${nodes[@]}")
    other=$(started "$it" neighbour "$neighbour" /tmp/pod:/pod)
    wait_for at_tick job 20
    wait_for paused "$one"
    ctr -n k8s.io tasks pause "$other"
    tick=$(last job) sum=$(sum job)
    for name in job neighbour; do
        id=$one && [ $name = job ] || id=$other
        cri CheckpointContainer "[[1,\"$id\"],[2,\"$from/$name.tar\"],[3,60]]"
    done
    for id in "$one" "$other"; do ctr -n k8s.io tasks resume "$id" 2> /dev/null || true; done
    check "mode $mode: both go on" goes_on job
    wait_for at_tick job $((tick + 10))
    ended

    # Its neighbour has seen nothing in the new pod but what it remembers.
    : > /tmp/pod/now
    it=$(sandbox 2$mode $mode dev.cryopod.restore.job $from/job.tar dev.cryopod.restore.neighbour $from/neighbour.tar)
    pod=$(cri RunPodSandbox "[[1,$it],[2,\"cryopod\"]]")
    other=$(started "$it" neighbour true /tmp/pod:/pod)
    wait_for test -s /tmp/logs/neighbour.log
    check "mode $mode: the neighbour is where it was" test "$(last neighbour)" = "$tick"
    one=$(started "$it" job true "${binds[@]}" /tmp/pod:/pod "${nodes[@]}")
    wait_for ticked job 3
    check "mode $mode: the job is where it was" test "$(logs job | head -n 1 | cut -d " " -f 1-3)" = "$((tick + 1)) $sum ok"
    check "mode $mode: its neighbour reads what it writes" wait_for reads
    started "$it" third 'echo new; exec sleep 1000' > /dev/null
    check "mode $mode: a container that the annotations do not name begins anew" wait_for says /tmp/logs/third.log new
    of_pod > /tmp/namespaces
    check "mode $mode: the pod has namespaces" test "$(wc -l < /tmp/namespaces)" = ${#shared[@]}
    check "mode $mode: the job is in them" diff <(namespaces "$one") /tmp/namespaces
    check "mode $mode: its neighbour, too" diff <(namespaces "$other") /tmp/namespaces
    ended
done
