# crio.sh: CRI-O of the directory that CRYOPOD_CRIO names, set up by `cryopod setup kubernetes`: a checkpoint by the CRI, a copy by
# annotation, whose a pod is, and a stop that is a checkpoint.
simulate crun
from=/srv/checkpoints
mkdir -p $from /srv/stops /tmp/logs /etc/crio/crio.conf.d
printf '[restore]\nallow = [{ from = "/srv", kubernetes = ["ns"] }]\n[checkpoint]\nallow = [{ from = "/srv", kubernetes = ["ns"] }]\n' >> /etc/cryopod/config.toml
registry
cri_configure
cri_network
printf '{"default": [{"type": "insecureAcceptAnything"}]}' > /etc/containers/policy.json
printf '[[registry]]\nlocation = "localhost:5000"\ninsecure = true\n' > /etc/containers/registries.conf
cat > /etc/crio/crio.conf.d/10-crio.conf << 'T'
[crio.image]
pause_image = "localhost:5000/busybox:1"
pause_command = "/bin/sleep 100000"
signature_policy = "/etc/containers/policy.json"
[crio.network]
plugin_dirs = ["/opt/cni/bin"]
[crio.runtime]
cgroup_manager = "cgroupfs"
conmon_cgroup = "pod"
default_runtime = "crun"
pids_limit = 0
enable_criu_support = true
pinns_path = "/opt/crio/pinns"
[crio.runtime.runtimes.crun]
runtime_path = "/usr/bin/crun"
monitor_path = "/usr/bin/conmon"
monitor_cgroup = "pod"
T
on_failure() { tail -n 2 /tmp/said /var/log/cryopod-on-stop.log /tmp/logs/*.log; tail -n 12 /tmp/crio.log; }
cri_socket=/run/crio/crio.sock
crio_up() {
    LD_LIBRARY_PATH=/opt/crio /opt/crio/crio >> /tmp/crio.log 2>&1 &
    crio_pid=$!
    wait_for cri_quiet Version '[[1,"v1"]]'
}
crio_again() { # SIGNAL
    kill "$1" $crio_pid
    wait $crio_pid 2> /dev/null || true
    crio_up
}
crio_up
cri PullImage '[[1,[[1,"localhost:5000/busybox:1"]]]]' > /dev/null
logs() { sed 's/^[^ ]* stdout F //' "/tmp/logs/$1.log"; }
n=0
started() { # NAMESPACE [KEY VALUE]...: sets pod and job
    local sandbox more= namespace=$1 image='[[1, "localhost:5000/busybox:1"], [18, "localhost:5000/busybox:1"]]' && shift
    while [ $# -gt 1 ]; do more+=",[7,[[1,\"$1\"],[2,\"$2\"]]]" && shift 2; done
    n=$((n + 1))
    rm -f /tmp/logs/job.log
    sandbox=$(printf '[[1,[[1,"pod"],[2,"uid%s"],[3,"%s"]]],[3,"/tmp/logs"],[6,[[1,"io.kubernetes.pod.namespace"],[2,"%s"]]],[8,[[1,"/pod%s"],[2,[[1,[[2,1]]]]]]]%s]' $n "$namespace" "$namespace" $n "$more")
    pod=$(cri RunPodSandbox "[[1,$sandbox],[2,\"cryopod\"]]")
    # The labels that the kubelet sets.
    job=$(cri CreateContainer "$(jq -nc --arg pod "$pod" --argjson sandbox "$sandbox" --arg namespace "$namespace" --argjson image "$image" '[[1, $pod], [2, [
        [1, [[1, "job"]]], [2, $image], [3, "/cusim/cusim-client"], [6, [[1, "LD_LIBRARY_PATH"], [2, "/cusim"]]],
        [9, [[1, "io.kubernetes.container.name"], [2, "job"]]], [9, [[1, "io.kubernetes.pod.name"], [2, "pod"]]],
        [9, [[1, "io.kubernetes.pod.namespace"], [2, $namespace]]], [11, "job.log"], [15, [[2, [[3, [[2, 1]]]]]]]]
        + [$ARGS.positional[] | if contains(":") then split(":") | [7, [[1, .[1]], [2, .[0]]]]
        else [8, [[1, .], [2, .], [3, "rwm"]]] end]], [3, $sandbox]]' --args "${binds[@]}" "${nodes[@]}")") || return
    cri StartContainer "[[1,\"$job\"]]" > /dev/null
}
ended() { cri StopPodSandbox "[[1,\"$pod\"]]" > /dev/null && cri RemovePodSandbox "[[1,\"$pod\"]]" > /dev/null; }

printf '#!/bin/sh\n' > /usr/local/bin/systemctl
printf '#!/bin/sh\nexec env LD_LIBRARY_PATH=/opt/crio /opt/crio/crio "$@"\n' > /usr/local/bin/crio
chmod +x /usr/local/bin/{systemctl,crio}
check 'set up' cryopod setup kubernetes --yes
crio_again -TERM
started ns
wait_for at_tick job 30
before=$(sum job)
cri CheckpointContainer "[[1,\"$job\"],[2,\"$from/job.tar\"],[3,60]]" > /dev/null
check 'a checkpoint by the CRI: the job goes on' goes_on job
check 'a checkpoint by the CRI: whole' cryopod verify -q $from/job.tar
ended
started ns dev.cryopod.restore.job $from/job.tar
wait_for ticked job 3
check 'a copy: not from its beginning' at_tick job 30
check 'a copy: the same sum' test "$(sum job)" = "$before"
crio_again -KILL
check 'CRI-O was killed and started again: the job goes on' goes_on job
ended

for forged in io.kubernetes.pod.namespace=ns io.container.manager=libpod io.kubernetes.cri-o.ContainerType=sandbox io.kubernetes.cri.sandbox-namespace=ns; do
    if started theirs dev.cryopod.restore $from/job.tar "${forged%=*}" "${forged#*=}" > /tmp/said 2>&1; then echo "FAILED: $forged" && exit 1; fi
    check "another namespace's pod that says $forged" says /tmp/said 'that is not allowed'
    ended
done

stops=(dev.cryopod.on-stop checkpoint dev.cryopod.checkpoint.to /srv/stops dev.cryopod.grace_s 30)
started ns "${stops[@]}"
wait_for at_tick job 20
before=$(sum job)
cri StopContainer "[[1,\"$job\"],[2,30]]" > /dev/null
check 'a stop: a checkpoint' test -e /srv/stops/ns.pod.job/000001/cryopod.json
check 'a stop: not ended by KILL' says /var/log/cryopod-on-stop.log 'stopped after'
ended
started ns "${stops[@]}" dev.cryopod.restore latest:/srv/stops
wait_for ticked job 3
check 'a stop: it goes on' at_tick job 20
check 'a stop: the same sum' test "$(sum job)" = "$before"
ended
check 'taken back' cryopod setup kubernetes --yes --undo
check 'taken back: the file' test ! -e /etc/crio/crio.conf.d/90-cryopod.conf
