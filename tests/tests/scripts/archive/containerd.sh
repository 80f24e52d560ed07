# containerd.sh [sealed]: containerd's CRI: a GPU container checkpointed by it, made an image by us, restored by it from that
# image; then `ctr` and docker on the same containerd. The stock shim, with cryopod-runtime as its binary. sealed: all that
# cryopod writes is encrypted for two keys and signed, and all that it reads has to be signed.
sealed=${1:-}
simulate runc
registry
sign=()
sealed() { [ "$sealed" ]; }
if sealed; then
    for key in a b; do ssh-keygen -q -t ed25519 -N '' -f /etc/cryopod/$key; done
    openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out /etc/cryopod/sign.key 2> /dev/null
    openssl pkey -in /etc/cryopod/sign.key -pubout -out /etc/cryopod/sign.pub
    cat >> /etc/cryopod/config.toml << 'T'
[encrypt]
recipients = ["/etc/cryopod/a.pub", "/etc/cryopod/b.pub"]
identities = ["/etc/cryopod/b"]
[cache]
insecure_registries = ["localhost:5000"]
[restore]
allow = ["docker://localhost:5000/sealed"]
require = "signed"
keys = ["/etc/cryopod/sign.pub"]
T
    sign=(--sign-by /etc/cryopod/sign.key)
fi
cri_configure
cat >> /etc/containerd/config.toml << 'T'
  [plugins.'io.containerd.cri.v1.runtime'.containerd]
    default_runtime_name = 'runc'
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
      runtime_type = 'io.containerd.runc.v2'
      [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
        BinaryName = '/usr/local/bin/cryopod-runtime'
T
containerd > /tmp/containerd.log 2>&1 &
wait_for ctr version > /dev/null 2>&1
wait_for cri_quiet Version '[[1,"v1"]]'
sandbox='[[1,[[1,"pod"],[2,"uid1"],[3,"ns"]]],[3,"/tmp/logs"],[8,[[2,[[1,[[1,2],[2,1],[3,1]]]]]]]]'
cri PullImage '[[1,[[1,"localhost:5000/busybox:1"]]]]' > /dev/null
pod=$(cri RunPodSandbox "[[1,$sandbox]]")
container() { # IMAGE: in the pod
    jq -nc --arg pod "$pod" --arg image "$1" --argjson sandbox "$sandbox" '[[1, $pod], [2, [
        [1, [[1, "job"]]], [2, [[1, $image]]], [3, "/cusim/cusim-client"], [4, "--mib"], [4, "40"],
        [6, [[1, "LD_LIBRARY_PATH"], [2, "/cusim"]]], [11, "job.log"]] + [$ARGS.positional[]
        | if contains(":") then split(":") | [7, [[1, .[1]], [2, .[0]]]] else [8, [[1, .], [2, .], [3, "rwm"]]] end]],
        [3, $sandbox]]' --args "${binds[@]}" "${nodes[@]}"
}
mkdir -p /tmp/logs
logs() { sed 's/^[^ ]* stdout F //' /tmp/logs/job.log; }
id=$(cri CreateContainer "$(container localhost:5000/busybox:1)")
cri StartContainer "[[1,\"$id\"]]"
wait_for at_tick job 30
before=$(sum job)
cri CheckpointContainer "[[1,\"$id\"],[2,\"/tmp/cri.tar\"],[3,60]]"
check 'CRI checkpoint: the sum goes on' goes_on job
check 'CRI checkpoint: whole' cryopod verify -q /tmp/cri.tar
cryopod inspect --json /tmp/cri.tar > /tmp/facts
check 'CRI checkpoint: inspect' jq -e '.container.engine == "containerd" and .container.pod == "ns/pod"
    and .gpu.vram_bytes > 40000000 and .container.image == "localhost:5000/busybox:1"' /tmp/facts
checkpointctl show /tmp/cri.tar > /tmp/said 2>&1 || { cat /tmp/said && exit 1; }
check 'CRI checkpoint: checkpointctl' says /tmp/said 'busybox'
cri StopContainer "[[1,\"$id\"],[2,0]]"
cri RemoveContainer "[[1,\"$id\"]]"
rm /tmp/logs/job.log
check 'CRI checkpoint -> our image' cryopod pack -q /tmp/cri.tar -o oci-archive:/tmp/image.tar --name localhost:5000/checkpoint:1 "${sign[@]}"
check 'our image: several layers' jq -e '.image.layers > 1' <(cryopod inspect --json oci-archive:/tmp/image.tar)
cryopod import oci-archive:/tmp/image.tar -e containerd --namespace k8s.io -q
if cri_restores; then
    id=$(cri CreateContainer "$(container localhost:5000/checkpoint:1)")
    cri StartContainer "[[1,\"$id\"]]"
    wait_for ticked job 3
    check 'our image, restored by the CRI: the sum goes on' goes_on job
    check 'our image, restored by the CRI: not from its beginning' at_tick job 30
    check 'our image, restored by the CRI: the same sum' test "$(sum job)" = "$before"
    cri StopContainer "[[1,\"$id\"],[2,0]]"
    cri RemoveContainer "[[1,\"$id\"]]"
fi
cri StopPodSandbox "[[1,\"$pod\"]]"

# `ctr c checkpoint`
ctr images pull --plain-http localhost:5000/busybox:1 > /dev/null
image=localhost:5000/busybox:1
ctr_job() { # OUTPUT OPTION...
    local mounts=() node
    for pair in "${binds[@]}"; do
        mounts+=(--mount "type=bind,src=${pair%%:*},dst=${pair#*:},options=rbind:rw")
    done
    for node in "${nodes[@]}"; do mounts+=(--device "$node"); done
    ctr run -d --runtime io.containerd.runc.v2 --runc-binary /usr/local/bin/cryopod-runtime "${mounts[@]}" \
        --env LD_LIBRARY_PATH=/cusim --log-uri "file://$1" "${@:2}" "$image" job /cusim/cusim-client --mib 16
}
logs() { cat /tmp/job.log; }
ctr_job /tmp/job.log
wait_for ticked job 3
check 'export: containerd' cryopod export job -e containerd --leave-running -o oci:/tmp/layout -q "${sign[@]}"
check 'export: the sum goes on' goes_on job
check 'export: verified' cryopod verify -q oci:/tmp/layout
if cryopod export job -e containerd -o oci:/tmp/never -q > /tmp/said 2>&1; then exit 1; fi
check 'export: what would not stop the container says so' says /tmp/said 'say --leave-running'

ctr containers checkpoint --rw --task job localhost/checkpoint:1
ctr images export --local --skip-manifest-json /tmp/ctr.tar localhost/checkpoint:1
for source in /tmp/ctr.tar oci:/tmp/layout; do
    cryopod inspect --json "$source" > /tmp/facts
    check "inspect $source" jq -e '.gpu.vram_bytes > 15000000 and (.criu.processes | map(.comm) | index("cusim-client"))' /tmp/facts
done
cryopod inspect /tmp/ctr.tar
check 'inspect: containerd by its own record' sh -c 'cryopod inspect --json /tmp/ctr.tar |
    jq -e ".container.engine == \"containerd-ctr\" and .container.id == \"job\" and (.container.command | index(\"--mib\"))"'
if ! sealed; then
    check 'ctr -> podman file' cryopod pack -q /tmp/ctr.tar -o /tmp/ctr-as.tar.zst
    check 'ctr -> podman file: verified' cryopod verify -q /tmp/ctr-as.tar.zst
    checkpointctl inspect --ps-tree /tmp/ctr-as.tar.zst > /tmp/said 2>&1 || true
    echo "checkpointctl of what came of ctr's: $(tail -n 3 /tmp/said)"
fi
check 'ctr -> archive' cryopod pack -q /tmp/ctr.tar -o oci-archive:/tmp/ctr.oci.tar --name localhost/checkpoint:1 "${sign[@]}"

if cryopod import oci-archive:/tmp/ctr.oci.tar -e containerd -q > /tmp/said 2>&1; then echo 'another image is replaced' && exit 1; fi
check 'import: an archive takes no name that an image has' says /tmp/said 'has an image localhost/checkpoint:1 already'
sum=$(sum job)
ctr tasks kill -s SIGKILL job && wait_for sh -c 'ctr tasks ls | grep -q STOPPED'
ctr tasks rm job > /dev/null && ctr containers rm job
ctr images rm localhost/checkpoint:1 > /dev/null
if sealed; then
    if cryopod import /tmp/ctr.tar -e containerd -q > /tmp/said 2>&1; then echo 'imported unsigned' && exit 1; fi
    check "sealed: ctr's own file is refused" says /tmp/said 'signed'
    check 'sealed: to a registry' cryopod pack -q --tls-verify=false oci-archive:/tmp/ctr.oci.tar -o docker://localhost:5000/sealed:1 "${sign[@]}"
    rm /tmp/job.log
    ctr_job /tmp/job.log --annotation dev.cryopod.restore=docker://localhost:5000/sealed:1
    check 'sealed: a container of ctr begins there' goes_on job
    check 'sealed: with the same sum' test "$(sum job)" = "$sum"
else
    check 'import: containerd' cryopod import /tmp/ctr.tar -e containerd -q
    ctr containers restore --rw --live job localhost/checkpoint:1 > /tmp/said 2>&1 || { cat /tmp/said && tail -n 5 /tmp/containerd.log && exit 1; }
    check 'import: ctr restores it' sh -c 'ctr tasks ls | grep job | grep -q RUNNING'
fi
ctr tasks kill -s SIGKILL job > /dev/null 2>&1 || true

# docker: CRIU's images alone, completed with what docker says of the container
dockerd --containerd /run/containerd/containerd.sock --experimental --iptables=false --ip6tables=false --bridge=none \
    --add-runtime cryopod=/usr/local/bin/cryopod-runtime > /tmp/dockerd.log 2>&1 &
wait_for docker version > /dev/null 2>&1
docker import /usr/local/share/testbed/busybox.tar busybox > /dev/null
logs() { docker logs "$1" 2>&1; }
docker run -d --name docked --runtime cryopod --network host --security-opt seccomp=unconfined \
    "${nodes[@]/#/--device=}" "${binds[@]/#/--volume=}" -e LD_LIBRARY_PATH=/cusim busybox /cusim/cusim-client --mib 16 > /dev/null
wait_for ticked docked 3
check 'export: docker' cryopod export docked -e docker --leave-running -o oci-archive:/tmp/docked.tar -q "${sign[@]}"
check 'export: docker: the sum goes on' goes_on docked
check 'inspect: docker' sh -c 'cryopod inspect --json oci-archive:/tmp/docked.tar |
    jq -e ".container.engine == \"docker\" and .container.name == \"docked\" and .gpu.vram_bytes > 15000000"'
check 'import: docker' cryopod import oci-archive:/tmp/docked.tar -e docker --container docked --name moved -q
if sealed; then
    docker stop -t 0 docked > /dev/null
    # docker 26 fails as long as containerd has what it kept of the export.
    wait_for sh -c '[ -z "$(ctr -n moby content ls -q)" ]'
    docker start --checkpoint moved docked
    check 'sealed: docker restores it' goes_on docked
fi
check 'import: docker lists it' sh -c 'docker checkpoint ls docked | grep -qx "moved *"'
docker rm -f docked > /dev/null
