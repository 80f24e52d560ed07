# refusals.sh: what the owner of a pod sees of a refusal, as events and `kubectl describe` show the CRI's errors: the reason is among
# our first 200 characters, behind containerd's own words. With our shim and containerd's.
simulate runc
from=/srv/checkpoints
mkdir -p "$from" /srv/secret /tmp/logs
printf '[restore]\nallow = [{ from = "%s", kubernetes = ["ns"] }, { from = "docker://localhost:5000", kubernetes = ["ns"] }]\n[cache]\ninsecure_registries = ["localhost:5000"]\n' "$from" >> /etc/cryopod/config.toml
registry
cri_configure
sed -n '/^\[plugins.*runtimes.cryopod/,$p' /src/examples/kubernetes/containerd.toml >> /etc/containerd/config.toml
sed -n '/^\[plugins.*runtimes.cryopod/,$p' /src/examples/kubernetes/containerd.toml |
    sed "s/runtimes.cryopod/runtimes.stock/; s/io.containerd.cryopod.v2/$STOCK/; s|= 'runc'|= '/usr/local/bin/cryopod-runtime'|" >> /etc/containerd/config.toml
on_failure() { cat /tmp/said; }
containerd_up
wait_for cri_quiet Version '[[1,"v1"]]'
cri PullImage '[[1,[[1,"localhost:5000/busybox:1"]]]]' > /dev/null
sandbox() { # UID [KEY VALUE]...
    local uid=$1 more= && shift
    while [ $# -gt 1 ]; do more+=",[7,[[1,\"$1\"],[2,\"$2\"]]]" && shift 2; done
    printf '[[1,[[1,"pod%s"],[2,"uid%s"],[3,"%s"]]],[3,"/tmp/logs"],[8,[[2,[[1,[[1,2],[2,1],[3,1]]]]]]]%s]' "$uid" "$uid" "${namespace:-ns}" "$more"
}
container() { # POD SANDBOX NODE...: a request
    jq -nc --arg pod "$1" --argjson sandbox "$2" '[[1, $pod], [2, [
        [1, [[1, "job"]]], [2, [[1, "localhost:5000/busybox:1"]]], [3, "/cusim/cusim-client"],
        [6, [[1, "LD_LIBRARY_PATH"], [2, "/cusim"]]], [11, "job.log"]]
        + [$ARGS.positional[] | if contains(":") then split(":") | [7, [[1, .[1]], [2, .[0]]]]
        else [8, [[1, .], [2, .], [3, "rwm"]]] end]], [3, $sandbox]]' --args "${binds[@]}" "${@:3}"
}
logs() { sed 's/^[^ ]* stdout F //' "/tmp/logs/$1.log"; }
made=0
started() { # KEY VALUE...: sets pod and job
    made=$((made + 1))
    pod=$(cri RunPodSandbox "[[1,$(sandbox $made "$@")],[2,\"$class\"]]") || return
    job=$(cri CreateContainer "$(container "$pod" "$(sandbox $made "$@")" "${given[@]}")") && cri StartContainer "[[1,\"$job\"]]"
}
ended() { cri StopPodSandbox "[[1,\"$pod\"]]" > /dev/null && cri RemovePodSandbox "[[1,\"$pod\"]]" > /dev/null; }
seen() { grep -o 'cryopod: .*' /tmp/said | head -n 1 | head -c 200 | grep -Eq -- "$1"; } # PATTERN
no_start() { # NAME PATTERN KEY VALUE...
    local name=$1 pattern=$2 && shift 2
    if started "$@" > /tmp/said 2>&1; then echo "FAILED: $class: $name: it started" && exit 1; fi
    check "$class: $name" seen "$pattern"
    [ -z "$pod" ] || ended # its pod started
}
no_checkpoint() { # NAME PATTERN
    if cri CheckpointContainer "[[1,\"$job\"],[2,\"/tmp/c.tar\"],[3,60]]" > /tmp/said 2>&1; then echo "FAILED: $class: $1: a checkpoint" && exit 1; fi
    check "$class: $1" seen "$2"
}
for class in cryopod stock; do
    given=("${nodes[@]}")
    started > /dev/null
    wait_for ticked job 3
    cri CheckpointContainer "[[1,\"$job\"],[2,\"$from/good.tar\"],[3,60]]"
    (ctr -n k8s.io tasks exec --exec-id stays "$job" sleep 1000 || true) &
    wait_for pgrep -xf 'sleep 1000' > /dev/null
    no_checkpoint 'a process of an exec' 'was started in the container by exec'
    ended
    no_start 'an option that is no number' 'ghost-limit: "one two"' dev.cryopod.criu.ghost-limit 'one two'
    no_start 'no such checkpoint' 'No such file' dev.cryopod.restore "$from/none"
    no_start 'a directory that is not allowed' 'that is not allowed' dev.cryopod.restore /srv/secret/x
    no_start 'a registry without it' 'none:1' dev.cryopod.restore docker://localhost:5000/none:1
    namespace=theirs no_start 'another namespace' 'that is not allowed' dev.cryopod.restore "$from/good.tar"
    no_start 'an annotation that says nothing' 'otherwise: "perhaps"' dev.cryopod.restore "latest:$from" dev.cryopod.restore.otherwise perhaps
    head -c 100000 "$from/good.tar" > "$from/short.tar"
    no_start 'an archive that is cut off' 'bytes too early' dev.cryopod.restore "$from/short.tar"
    given=()
    no_start 'no GPU' 'the engine gave this container none' dev.cryopod.restore "$from/good.tar"
    rm "$from"/*
done
