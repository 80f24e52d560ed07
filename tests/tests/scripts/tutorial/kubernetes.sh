# kubernetes.sh: the tutorial's part for Kubernetes, with containerd's CRI and kubectl. kubelet.py stands in for the API server
# and the kubelet.
once runc
registry
cri_configure
podman tag localhost/busybox docker.io/library/busybox
podman save -q --format oci-archive -o /tmp/busybox.oci docker.io/library/busybox
cp /etc/containerd/config.toml /tmp/before
containerd_up
wait_for cri_quiet Version '[[1,"v1"]]'
ctr --namespace k8s.io images import /tmp/busybox.oci > /dev/null
python3 /src/tests/tests/scripts/tutorial/kubelet.py 8001 > /tmp/kubelet.log 2>&1 &
listens() { (: < /dev/tcp/127.0.0.1/8001) 2> /dev/null; }
wait_for listens
kubectl config set-cluster here --server http://127.0.0.1:8001 > /dev/null
kubectl config set-context here --cluster here > /dev/null
kubectl config use-context here > /dev/null
check 'all commands' tutorial Kubernetes
check 'the setup was tested' says /tmp/tutorial.said '^Tested: a container'
# The last number that the pod had printed after its checkpoint, and the first ones of the copy.
mapfile -t n < <(numbers)
check 'the copy begins after the checkpoint' test "${n[1]}" -gt 0 -a "${n[1]}" -le $((n[0] + 1))
check 'and counts on' test "${n[2]}" = $((n[1] + 1))
check 'undone' cmp /etc/containerd/config.toml /tmp/before
check 'no shim is left' wait_for no_shims
