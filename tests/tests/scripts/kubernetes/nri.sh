# nri.sh: our plugin of NRI, started by containerd, whose configuration passes no annotations: a pod's containers get the
# annotations of ours that a pod may have, and nothing else that a pod says.
simulate runc
from=/srv/checkpoints
mkdir -p $from /tmp/logs /opt/nri/plugins
printf '[restore]\nallow = [{ from = "%s", kubernetes = ["ns"] }]\n' $from >> /etc/cryopod/config.toml
registry
cri_configure
sed -n '/^\[plugins.*runtimes.cryopod/,$p' /src/examples/kubernetes/containerd.toml | grep -v _annotations >> /etc/containerd/config.toml
# By default containerd gives a plugin up that does not answer within 2 s.
printf "[plugins.'io.containerd.nri.v1.nri']\n  plugin_registration_timeout = '120s'\n  plugin_request_timeout = '120s'\n" >> /etc/containerd/config.toml
ln -s "$(command -v cryopod)" /opt/nri/plugins/10-cryopod
on_failure() { cat /tmp/said; grep -i nri /tmp/containerd.log | tail; }
containerd_up
wait_for cri_quiet Version '[[1,"v1"]]'
check 'containerd starts the plugin' wait_for pgrep -x 10-cryopod
cri PullImage '[[1,[[1,"localhost:5000/busybox:1"]]]]' > /dev/null
logs() { sed 's/^[^ ]* stdout F //' "/tmp/logs/$1.log"; }
started() { # UID NAMESPACE [KEY VALUE]...: sets pod and job
    local sandbox more= uid=$1 namespace=$2 && shift 2
    while [ $# -gt 1 ]; do more+=",[7,[[1,\"$1\"],[2,\"$2\"]]]" && shift 2; done
    sandbox=$(printf '[[1,[[1,"pod%s"],[2,"uid%s"],[3,"%s"]]],[3,"/tmp/logs"],[8,[[2,[[1,[[1,2],[2,1],[3,1]]]]]]]%s]' "$uid" "$uid" "$namespace" "$more")
    pod=$(cri RunPodSandbox "[[1,$sandbox],[2,\"cryopod\"]]")
    job=$(cri CreateContainer "$(jq -nc --arg pod "$pod" --argjson sandbox "$sandbox" '[[1, $pod], [2, [
        [1, [[1, "job"]]], [2, [[1, "localhost:5000/busybox:1"]]], [3, "/cusim/cusim-client"],
        [6, [[1, "LD_LIBRARY_PATH"], [2, "/cusim"]]], [11, "job.log"]]
        + [$ARGS.positional[] | if contains(":") then split(":") | [7, [[1, .[1]], [2, .[0]]]]
        else [8, [[1, .], [2, .], [3, "rwm"]]] end]], [3, $sandbox]]' --args "${binds[@]}" "${nodes[@]}")")
    cri StartContainer "[[1,\"$job\"]]"
}
ended() { cri StopPodSandbox "[[1,\"$pod\"]]" > /dev/null && cri RemovePodSandbox "[[1,\"$pod\"]]" > /dev/null; }
annotations() { jq -r '.annotations | keys[] | select(startswith("io.kubernetes.cri.") | not)' "/run/containerd/io.containerd.runtime.v2.task/k8s.io/$job/config.json"; }

started 1 ns
wait_for at_tick job 30
check 'a pod without annotations: none' test -z "$(annotations)"
before=$(sum job)
cri CheckpointContainer "[[1,\"$job\"],[2,\"$from/job.tar\"],[3,60]]"
ended
rm /tmp/logs/job.log
containerd_down -KILL
no_plugin() { ! pgrep -x 10-cryopod; }
check 'containerd was killed: the plugin ends' wait_for no_plugin
containerd_up
wait_for cri_quiet Version '[[1,"v1"]]'
started 2 ns dev.cryopod.restore.job $from/job.tar dev.cryopod.rootfs on dev.cryopod.gpu.map 'a=b' dev.cryopod.parent / \
    dev.cryopod.exec.before-checkpoint true org.criu.config /etc/passwd io.kubernetes.cri.sandbox-namespace theirs io.container.manager cri-o
check 'those that a pod may have' diff <(annotations) <(printf 'dev.cryopod.%s\n' restore.job rootfs)
wait_for ticked job 3
check 'it begins at the checkpoint' at_tick job 30
check 'with the same sum' test "$(sum job)" = "$before"
ended
# Whose a pod is stays what the engine says.
if started 3 theirs dev.cryopod.restore $from/job.tar io.kubernetes.cri.sandbox-namespace ns > /tmp/said 2>&1; then exit 1; fi
check "another namespace's pod" says /tmp/said 'that is not allowed'
ended
if started 4 ns dev.cryopod.preload perhaps > /tmp/said 2>&1; then exit 1; fi
check 'the preload library' says /tmp/said 'annotation dev.cryopod.preload: "perhaps" is neither'
ended
