# containerd.sh: `ctr c checkpoint` of a GPU container, read, converted, restored; docker's checkpoint.
simulate runc
mkimage
podman save -q --format oci-archive -o /tmp/busybox.tar localhost/busybox
printf 'version = 2\ndisabled_plugins = ["io.containerd.grpc.v1.cri"]\n' > /etc/containerd/config.toml
containerd > /tmp/containerd.log 2>&1 &
wait_for 30 ctr version > /dev/null
ctr images import --all-platforms /tmp/busybox.tar > /dev/null
image=$(ctr images ls -q | grep busybox)
ctr_job() { # OUTPUT
    local mounts=() node
    for pair in "${binds[@]}"; do
        mounts+=(--mount "type=bind,src=${pair%%:*},dst=${pair#*:},options=rbind:rw")
    done
    for node in "${nodes[@]}"; do mounts+=(--device "$node"); done
    ctr run -d --runtime io.containerd.runc.v2 --runc-binary /usr/local/bin/cryopod-runtime "${mounts[@]}" \
        --env LD_LIBRARY_PATH=/cusim --log-uri "file://$1" "$image" job /cusim/cusim-client --mib 16
}
logs() { cat /tmp/job.log; }
ctr_job /tmp/job.log
wait_for 20 ticked job 3
check 'export: containerd' cryopod export job -e containerd --leave-running -o oci:/tmp/layout -q
check 'export: the sum goes on' goes_on job
check 'export: verified' cryopod verify -q oci:/tmp/layout
if cryopod export job -e containerd -o oci:/tmp/never -q > /tmp/said 2>&1; then exit 1; fi
check 'export: what would not stop the container says so' says /tmp/said '--leave-running'

ctr containers checkpoint --rw --task job localhost/checkpoint:1
ctr images export --skip-manifest-json /tmp/ctr.tar localhost/checkpoint:1
for source in /tmp/ctr.tar oci:/tmp/layout; do
    cryopod inspect --json "$source" > /tmp/facts
    check "inspect $source" jq -e '.gpu.vram_bytes > 15000000 and (.criu.processes | map(.comm) | index("cusim-client"))' /tmp/facts
done
cryopod inspect /tmp/ctr.tar
check 'inspect: containerd by its own record' sh -c 'cryopod inspect --json /tmp/ctr.tar |
    jq -e ".container.engine == \"containerd-ctr\" and .container.id == \"job\" and (.container.command | index(\"--mib\"))"'
check 'ctr -> podman file' cryopod convert -q /tmp/ctr.tar -o /tmp/ctr-as.tar.zst
check 'ctr -> podman file: verified' cryopod verify -q /tmp/ctr-as.tar.zst
checkpointctl inspect --ps-tree /tmp/ctr-as.tar.zst > /tmp/said 2>&1 || true
echo "checkpointctl of what came of ctr's: $(tail -n 3 /tmp/said)"
check 'ctr -> archive' cryopod convert -q /tmp/ctr.tar -o oci-archive:/tmp/ctr.oci.tar --name localhost/job:1

ctr tasks kill -s SIGKILL job && wait_for 10 sh -c 'ctr tasks ls | grep -q STOPPED'
ctr tasks rm job > /dev/null && ctr containers rm job
ctr images rm localhost/checkpoint:1 > /dev/null
check 'import: containerd' cryopod import /tmp/ctr.tar -e containerd -q
ctr containers restore --rw --live job localhost/checkpoint:1 > /tmp/said 2>&1 || { cat /tmp/said && tail -n 5 /tmp/containerd.log && exit 1; }
check 'import: ctr restores it' sh -c 'ctr tasks ls | grep job | grep -q RUNNING'
ctr tasks kill -s SIGKILL job > /dev/null 2>&1 || true

# docker: CRIU's images alone, completed with what docker says of the container
dockerd --containerd /run/containerd/containerd.sock --experimental --iptables=false --ip6tables=false --bridge=none \
    --add-runtime cryopod=/usr/local/bin/cryopod-runtime > /tmp/dockerd.log 2>&1 &
wait_for 30 docker version > /dev/null 2>&1
docker import /usr/local/share/testbed/busybox.tar busybox > /dev/null
logs() { docker logs "$1" 2>&1; }
docker run -d --name docked --runtime cryopod --network host --security-opt seccomp=unconfined \
    "${nodes[@]/#/--device=}" "${binds[@]/#/--volume=}" -e LD_LIBRARY_PATH=/cusim busybox /cusim/cusim-client --mib 16 > /dev/null
wait_for 20 ticked docked 3
check 'export: docker' cryopod export docked -e docker --leave-running -o oci-archive:/tmp/docked.tar -q
check 'export: docker: the sum goes on' goes_on docked
check 'inspect: docker' sh -c 'cryopod inspect --json oci-archive:/tmp/docked.tar |
    jq -e ".container.engine == \"docker\" and .container.name == \"docked\" and .gpu.vram_bytes > 15000000"'
check 'import: docker' cryopod import oci-archive:/tmp/docked.tar -e docker --container docked --name moved -q
check 'import: docker lists it' sh -c 'docker checkpoint ls docked | grep -qx "moved *"'
docker rm -f docked > /dev/null
