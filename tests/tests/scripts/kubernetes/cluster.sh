# cluster.sh: the chart and `kubectl cryopod`, with kubectl, containerd and a registry. kubelet.py stands in for the API server and
# the kubelet; the bed is the node, and this script runs the commands of the chart's pods.
rm -f /etc/cryopod/config.toml
systemd_outside
registry
cri_configure
podman tag localhost/busybox docker.io/library/busybox
podman save -q --format oci-archive -o /tmp/busybox.oci docker.io/library/busybox
containerd_up
wait_for cri_quiet Version '[[1,"v1"]]'
ctr --namespace k8s.io images import /tmp/busybox.oci > /dev/null
python3 /src/tests/tests/scripts/kubernetes/kubelet.py 8001 > /tmp/kubelet.log 2>&1 &
listens() { (: < "/dev/tcp/127.0.0.1/$1") 2> /dev/null; }
wait_for listens 8001
kubectl config set-cluster here --server http://127.0.0.1:8001 > /dev/null
kubectl config set-context here --cluster here > /dev/null
kubectl config use-context here > /dev/null
ln -s cryopod /usr/local/bin/kubectl-cryopod
on_failure() { tail -n 20 /tmp/said /tmp/kubelet.log /tmp/containerd.log; }

mkdir -p /host /settings
mount --rbind / /host
# As `cosign generate-key-pair k8s://cryopod/cosign`
mkdir -p /tmp/secrets/cosign && echo -n secret > /tmp/secrets/cosign/cosign.password
(cd /tmp/secrets/cosign && COSIGN_PASSWORD=secret timeout 60 cosign generate-key-pair) 2> /dev/null
cat > /settings/config.toml << T
[restore]
allow = [{ from = "docker://localhost:5000/team", kubernetes = ["default"] }]
keys = ["""
$(cat /tmp/secrets/cosign/cosign.pub)
"""]
[cache]
insecure_registries = ["localhost:5000"]
T
chart() { python3 /src/tests/tests/scripts/kubernetes/render.py /src/packages/kubernetes/chart 'image="localhost:5000/cryopod:1"' "settings=$(jq -Rs . /settings/config.toml)" 'signingSecret="cosign"' "$@" > /tmp/chart.yaml; }
command_of() { # INIT-CONTAINER: of the chart, run on this node with the program of the image
    local words
    kubectl create --dry-run=client -f /tmp/chart.yaml -o json > /tmp/chart.json
    mapfile -t words < <(jq -r --arg name "$1" 'if .items then .items[] else . end | select(.kind == "DaemonSet") |
        .spec.template.spec.initContainers[] | select(.name == $name) | .command[] | gsub("\\$\\(NODE\\)"; "node1")' /tmp/chart.json)
    [ "${words[0]}" = /opt/cryopod/bin/cryopod ] && cryopod "${words[@]:1}" > /tmp/said 2>&1
}
# A tenant's, which comes first by its namespace.
jq -n '{apiVersion: "apps/v1", kind: "DaemonSet", metadata: {name: "cryopod", namespace: "a-team", labels: {"app.kubernetes.io/name": "cryopod"}},
    spec: {selector: {matchLabels: {a: "b"}}, template: {metadata: {labels: {a: "b"}}, spec: {containers: [{name: "push", image: "localhost:5000/a-team/own:1"}]}}}}' > /tmp/tenant.json
check 'a tenant has a DaemonSet of our label and name' kubectl create -f /tmp/tenant.json
if kubectl cryopod checkpoint job --to docker://localhost:5000/team/job:1 > /tmp/said 2>&1; then exit 1; fi
check 'no chart: says so' says /tmp/said 'no installer of cryopod, or an older one: helm install'
chart
check 'kubectl takes the chart' kubectl create -f /tmp/chart.yaml
check 'the chart sets the node up' command_of install
check 'with its settings' cmp /etc/cryopod/config.toml /settings/config.toml
check 'and a test' says /tmp/said '^Tested: a container'

# The API server that labels nodes speaks TLS.
mkdir -p /var/run/secrets/kubernetes.io/serviceaccount
cd /var/run/secrets/kubernetes.io/serviceaccount
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout /tmp/key -out ca.crt -subj /CN=api -addext subjectAltName=IP:127.0.0.1 -addext basicConstraints=critical,CA:FALSE 2> /dev/null
printf 'a-token\n' > token
cd /
cat > /tmp/api.py << 'P'
import http.server, ssl
class Api(http.server.BaseHTTPRequestHandler):
    def do_PATCH(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        good = self.headers["Authorization"] == "Bearer a-token"
        open("/tmp/patched", "a").write(f"{self.path} {self.headers['Content-Type']} {body}\n")
        self.send_response(200 if good else 403)
        self.end_headers()
server = http.server.HTTPServer(("127.0.0.1", 8443), Api)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("/var/run/secrets/kubernetes.io/serviceaccount/ca.crt", "/tmp/key")
server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
P
python3 /tmp/api.py 2> /dev/null &
wait_for listens 8443
export KUBERNETES_SERVICE_HOST=127.0.0.1 KUBERNETES_SERVICE_PORT=8443
mkdir -p /usr/lib/cryopod/criu && ln -s "$(command -v criu)" /usr/lib/cryopod/criu/criu # as cryopod-criu
check 'the node is labelled' command_of label
rm -r /usr/lib/cryopod/criu
check 'by a merge of its labels' says /tmp/patched '^/api/v1/nodes/node1 application/merge-patch\+json .*"cryopod.dev/ready":"true"'
check 'with versions, and without a driver' says /tmp/patched '"cryopod.dev/criu":"[0-9.]+","cryopod.dev/driver":null'
echo other > /var/run/secrets/kubernetes.io/serviceaccount/token
if command_of label; then exit 1; fi
check 'no right to: says so' says /tmp/said 'refuses to label the node node1: 403'
echo a-token > /var/run/secrets/kubernetes.io/serviceaccount/token

# A pod, its checkpoint in the registry, and three that begin there.
pod() { # NAME ANNOTATIONS COMMAND...
    jq -n --arg name "$1" --argjson annotations "$2" --argjson command "$(printf '%s\n' "${@:3}" | jq -Rnc '[inputs]')" '{apiVersion: "v1", kind: "Pod", metadata: {$name, $annotations}, spec: {runtimeClassName: "cryopod",
        containers: [{name: "counter", image: "docker.io/library/busybox", $command}]}}' | kubectl create -f - > /dev/null
}
pod counter '{}' "${counter[@]}"
printed_more() { [ "$(kubectl logs "$1" --tail=1)" -gt "$2" ] 2> /dev/null; }
wait_for printed_more counter 10
check 'a checkpoint by kubectl' sh -c 'kubectl cryopod checkpoint counter --to docker://localhost:5000/team/counter:1 --tls-verify=false > /tmp/digest 2> /tmp/said'
digest=$(cat /tmp/digest)
check 'it answers with the digest' says /tmp/digest '^docker://localhost:5000/team/counter@sha256:[0-9a-f]{64}$'
check 'the pod goes on' wait_for printed_more counter "$(kubectl logs counter --tail=1)"
check 'cosign: signed by the secret' sh -c "cosign verify --key /tmp/secrets/cosign/cosign.pub --insecure-ignore-tlog --allow-insecure-registry ${digest#docker://} > /tmp/said 2>&1"
check 'no job is left' test "$(kubectl get jobs --all-namespaces -o name)" = ''
last=$(kubectl logs counter --tail=1)
unsigned=$(cryopod pack "$(ls -t /var/lib/kubelet/checkpoints/*.tar | head -n 1)" -o docker://localhost:5000/team/unsigned:1 --tls-verify=false | grep -o 'sha256:[0-9a-f]*' | head -n 1)
chart "warm=[\"docker://localhost:5000/team/unsigned@$unsigned\"]"
if command_of warm-0; then exit 1; fi
check 'not signed: not on the node' says /tmp/said 'a key of restore.keys must have signed it: it has no signature'
chart "warm=[\"$digest\"]"
check 'the node has it before its first pod' command_of warm-0
check 'in its cache' sh -c 'cryopod cache ls | grep -q team/counter'
kubectl create -f - > /dev/null << 'Y'
{"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "server", "namespace": "default"}, "spec": {"replicas": 3, "selector": {"matchLabels": {"app": "server"}},
 "template": {"metadata": {"labels": {"app": "server"}}, "spec": {"containers": [{"name": "counter", "image": "docker.io/library/busybox", "command": ["true"]}]}}}}
Y
if kubectl cryopod warm server --from docker://localhost:5000/team/counter:1 > /tmp/said 2>&1; then exit 1; fi
check 'a tag: says why not' says /tmp/said 'by its digest'
check 'a deployment begins there' kubectl cryopod warm server --from "$digest"
template=$(kubectl get deployment server -o json | jq -c .spec.template)
check 'with the runtime class' test "$(jq -r .spec.runtimeClassName <<< "$template")" = cryopod
for i in 1 2 3; do
    pod "copy$i" "$(jq -c .metadata.annotations <<< "$template")" true
    wait_for printed_more "copy$i" 1
    check "replica $i begins at the checkpoint" test "$(kubectl logs "copy$i" | sed -n 1p)" -ge 10 -a "$(kubectl logs "copy$i" | sed -n 1p)" -le "$last"
done
kubectl cryopod warm server --undo > /dev/null
check 'and begins anew' sh -c 'kubectl get deployment server -o json | jq -e ".spec.template | .spec.runtimeClassName == null and .metadata.annotations == {}"'

# examples/kubernetes: checkpoint.sh, what it says to do with the archive, and deployment.yaml with this image, checkpoint and
# command. With a container beside it the annotation names the one.
sed -n 's/^#   \(cryopod pack .*\)/\1/p' /src/examples/kubernetes/checkpoint.sh > /tmp/push.sh
archive=$(bash /src/examples/kubernetes/checkpoint.sh node1 default counter counter | jq -r '.items[0]')
sed -i "s,ARCHIVE,$archive,; s,registry.example/team/server:checkpoint,localhost:5000/team/server:checkpoint --tls-verify=false --sign-by /tmp/secrets/cosign/cosign.key," /tmp/push.sh
check 'what checkpoint.sh says of the archive' env COSIGN_PASSWORD=secret bash -xeuo pipefail /tmp/push.sh > /tmp/pushed
server=$(sed -n 's/^\(sha256:.*\)/\1/p' /tmp/pushed)
kubectl delete deployment server > /dev/null
sed "s,registry.example/team/server@sha256:0*,localhost:5000/team/server@$server,; s,image: .*,image: docker.io/library/busybox," /src/examples/kubernetes/deployment.yaml |
    kubectl create -f - > /dev/null
kubectl get deployment server -o json | jq '.spec.template | .metadata.name = "example" | {apiVersion: "v1", kind: "Pod", metadata, spec}
    | .metadata.annotations |= with_entries(.key += ".server") | del(.spec.containers[0].resources) | .spec.containers[0].command = ["true"]
    | .spec.containers += [{name: "side", image: "docker.io/library/busybox", command: ["sh", "-c", "while :; do hostname; sleep 0.1; done"]}]' | kubectl create -f - > /dev/null
wait_for printed_more example 1
check 'deployment.yaml begins at the checkpoint' test "$(kubectl logs example | sed -n 1p)" -ge 10
beside() { kubectl logs example -c side | sort -u > /tmp/beside && [ -s /tmp/beside ]; }
wait_for beside
check 'the container beside it runs, and has its host name' test "$(cat /tmp/beside)" = "$(hostname)"
kubectl delete pod example > /dev/null

if kubectl cryopod checkpoint nobody --to docker://localhost:5000/team/x:1 > /tmp/said 2>&1; then exit 1; fi
check 'no such pod: says so' says /tmp/said 'nobody'
if kubectl cryopod checkpoint counter --to docker://localhost:5001/team/x:1 > /tmp/said 2>&1; then exit 1; fi
check 'no such registry: says so, and where the archive is' says /tmp/said '/var/lib/kubelet/checkpoints/.*on node1 was not pushed, and stays: job.*localhost:5001'

chart remove=true
if command_of remove; then exit 1; fi
check 'a pod runs: not taken away' says /tmp/said 'remove them first'
kubectl delete pod counter copy1 copy2 copy3 > /dev/null
wait_for no_shims
check 'taken away: the label' command_of unlabel
check 'taken away: the label' says /tmp/patched '"cryopod.dev/driver":null,"cryopod.dev/ready":null'
check 'taken away: the rest' command_of remove
check 'nothing is left' sh -c '! ls -d /opt/cryopod /etc/cryopod/config.toml /var/lib/cryopod/setup 2> /dev/null'
