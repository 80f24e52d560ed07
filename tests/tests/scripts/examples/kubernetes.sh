# kubernetes.sh: what can be told of examples/kubernetes without a cluster. kubectl knows every field of the manifests, and
# checkpoint.sh calls the kubelet's interface through an API server, which here only notes the call.
cd /src/examples/kubernetes
for file in deployment runtimeclass; do
    kubectl annotate --local -f $file.yaml -o json checked=yes | jq -s 'map(.items // [.] | .[]) | map(select(.kind != "RuntimeClass"))' > /tmp/written
    # Other than annotate, this reads them as what they are, and drops fields that their kind does not have.
    jq -c '.[]' /tmp/written | while read -r object; do kubectl set env --local -f - -o json CHECKED=yes <<< "$object"; done | jq -s . > /tmp/known
    jq -n --slurpfile a /tmp/written --slurpfile b /tmp/known \
        '[$a[0] | paths(scalars) as $p | select(getpath($p) as $v | ($b[0] | getpath($p) | tostring) != ($v | tostring)) | $p | map(tostring) | join(".")]' > /tmp/unknown
    check "$file.yaml has no field that Kubernetes does not have" test "$(jq -r '.[]' /tmp/unknown)" = ''
    check 'and is not empty' test "$(jq length /tmp/known)" -ge 1
done
check 'a wrong field is found' test "$(sed 's/replicas:/replica:/' deployment.yaml | kubectl set env --local -f - -o json CHECKED=yes | jq .spec.replica)" = null

python3 - << 'T' > /tmp/called &
import http.server
class Server(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        print(self.path, flush=True)
        answer = b'{"items": ["/var/lib/kubelet/checkpoints/checkpoint-server.tar"]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
http.server.HTTPServer(("127.0.0.1", 8001), Server).serve_forever()
T
listens() { (: < /dev/tcp/127.0.0.1/8001) 2> /dev/null; }
wait_for listens
kubectl config set-cluster here --server http://127.0.0.1:8001 > /dev/null
kubectl config set-context here --cluster here > /dev/null
kubectl config use-context here > /dev/null
check 'checkpoint.sh prints the archive' sh -c "bash checkpoint.sh node1 default server server | grep -q checkpoints/checkpoint-server.tar"
check 'it called the kubelet' test "$(cat /tmp/called)" = /api/v1/nodes/node1/proxy/checkpoint/default/server/server
