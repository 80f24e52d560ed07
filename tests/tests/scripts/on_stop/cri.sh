# cri.sh: StopContainer with the kubelet's timeout is a checkpoint, and a pod of the same name goes on under another
# containerd, as after a drain. Without a kubelet; a job with a simulated GPU.
simulate runc
place=/srv/place
mkdir -p "$place" /tmp/logs
printf '[checkpoint]\nallow = [{ from = "%s", kubernetes = ["ns"] }]\n[restore]\nallow = [{ from = "%s", kubernetes = ["ns"] }]\n' \
    "$place" "$place" >> /etc/cryopod/config.toml
registry
cri_configure
sed -n '/^\[plugins.*runtimes.cryopod/,$p' /src/examples/kubernetes/containerd.toml >> /etc/containerd/config.toml
on_failure() { cat /tmp/said /var/log/cryopod-on-stop.log && tail -q -n 2 /tmp/containerd.log /tmp/other.log; }
containerd_up
mkdir /var/lib/other
mount -t tmpfs other /var/lib/other # for overlays upon it
containerd --root /var/lib/other --state /run/other --address /run/other/containerd.sock > /tmp/other.log 2>&1 &
other() { cri_socket=/run/other/containerd.sock "$@"; } # COMMAND...: there
ready() { wait_for cri_quiet Version '[[1,"v1"]]' && cri PullImage '[[1,[[1,"localhost:5000/busybox:1"]]]]' > /dev/null; }
ready
other ready
sandbox() { # UID: the pod web-0, of a StatefulSet
    printf '[[1,[[1,"web-0"],[2,"%s"],[3,"ns"]]],[3,"/tmp/logs"],[7,[[1,"dev.cryopod.on-stop"],[2,"checkpoint"]]],' "$1"
    printf '[7,[[1,"dev.cryopod.%s"],[2,"%s"]]],' checkpoint.to $place grace_s 30 restore latest:$place restore.otherwise start
    printf '[8,[[2,[[1,[[1,2],[2,1],[3,1]]]]]]]]'
}
container() { # POD UID: a request
    jq -nc --arg pod "$1" --argjson sandbox "$(sandbox "$2")" '[[1, $pod], [2, [
        [1, [[1, "job"]]], [2, [[1, "localhost:5000/busybox:1"]]], [3, "/cusim/cusim-client"],
        [6, [[1, "LD_LIBRARY_PATH"], [2, "/cusim"]]], [11, "job.log"]]
        + [$ARGS.positional[] | if contains(":") then split(":") | [7, [[1, .[1]], [2, .[0]]]]
        else [8, [[1, .], [2, .], [3, "rwm"]]] end]], [3, $sandbox]]' --args "${binds[@]}" "${nodes[@]}"
}
starts() { # UID: prints its pod and container
    local pod job
    pod=$(cri RunPodSandbox "[[1,$(sandbox "$1")],[2,\"cryopod\"]]")
    job=$(cri CreateContainer "$(container "$pod" "$1")")
    cri StartContainer "[[1,\"$job\"]]" > /dev/null
    echo "$pod $job"
}
logs() { sed 's/^[^ ]* stdout F //' "/tmp/logs/$1.log"; }
read -r pod job <<< "$(starts first)"
wait_for ticked job 3
check 'StopContainer' cri StopContainer "[[1,\"$job\"],[2,30]]"
check 'is a checkpoint, by the name of pod and container' test -e $place/ns.web-0.job/000001/cryopod.json
check 'the pod ends' cri StopPodSandbox "[[1,\"$pod\"]]"
check 'and is no checkpoint' test "$(ls $place)" = ns.web-0.job
check 'no container is left' cri RemovePodSandbox "[[1,\"$pod\"]]"
now=$(ticks job)
read -r pod job <<< "$(other starts second)"
check 'the other goes on' wait_for ticked job $((now + 3))
once() { logs job | awk 'NR > 1 && $1 != last + 1 { exit 1 } { last = $1 }' && ! logs job | grep CORRUPT; }
check 'each step was made once' once
check 'it stops as well' other cri StopContainer "[[1,\"$job\"],[2,30]]"
check 'by a checkpoint' test -e $place/ns.web-0.job/000002/cryopod.json
other cri StopPodSandbox "[[1,\"$pod\"]]"
other cri RemovePodSandbox "[[1,\"$pod\"]]"
check 'nothing is left' wait_for no_shims
