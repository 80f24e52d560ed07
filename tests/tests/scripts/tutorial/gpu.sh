# gpu.sh: the tutorial's parts for PyTorch and a model server. PyTorch is Debian's and computes on the CPU, in a container with
# GPUs of the simulated driver. In the place of vLLM there is a server that holds memory of these GPUs.
simulate crun
check 'once' tutorial Once
mount --bind /opt/torch /opt/torch && mount -o remount,bind,ro /opt/torch
mkdir -p /usr/share/doc/cryopod
ln -s /src/examples /usr/share/doc/cryopod/examples
# What the images bring, in all containers. Their /usr is the bed's, below another name, as `cryopod setup` mounts its own, and
# without the mounts below it.
mapfile -t environment < /opt/torch/environment
mkdir -p /etc/containers/containers.conf.d
jq -nr '"[containers]\nseccomp_profile = \"unconfined\"\nvolumes = \(["/usr:/bed/usr:ro,bind", "/opt/torch:/opt/torch:ro", "/opt/cusim:/cusim", "/run/cusim:/run/cusim"] | tojson)\nenv = \($ARGS.positional | tojson)"' \
    --args "${environment[@]}" > /etc/containers/containers.conf.d/images.conf
cat > /usr/local/share/server.py << 'PY'
import http.server, os, subprocess, sys
# Its model: memory of a GPU, whose sum it prints again and again.
environment = dict(os.environ, LD_LIBRARY_PATH="/cusim")
model = subprocess.Popen(["/cusim/cusim-client", "--mib", "64"], stdout=open("/sums", "w"), env=environment)
class Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        lines = open("/sums").read().splitlines()
        answer = f"sums {len(lines)} {'CORRUPT' if any('CORRUPT' in line for line in lines) else 'ok'} {os.getpid()}\n".encode()
        self.send_response(200 if len(lines) > 10 else 503)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", 8000), Server).serve_forever()
PY
mkdir -p /tmp/tree/{dev,etc,proc,root,run,sys,tmp,bed/usr,opt/torch,cusim,run/cusim}
ln -s bed/usr bed/usr/{bin,lib,lib64,sbin} /tmp/tree
tar -C /tmp/tree -cf /tmp/tree.tar .
image() { podman import -q ${2:+--change "$2"} /tmp/tree.tar "$1" > /dev/null; } # NAME [CHANGE]
image docker.io/pytorch/pytorch
image docker.io/vllm/vllm-openai 'ENTRYPOINT ["/usr/bin/python3", "/usr/local/share/server.py"]'
cp /etc/containers/containers.conf /tmp/before

whole=$(blocks 'PyTorch on a GPU' | grep '^podman .* --name train ')
eval "${whole/--detach --name train/--rm}" > /tmp/whole
check 'PyTorch: without a checkpoint' test "$(wc -l < /tmp/whole)" = 200
check 'PyTorch: all commands' tutorial 'PyTorch on a GPU'
# The last step before the checkpoint, and the last one of all: its loss depends on all before it.
mapfile -t losses < <(grep -E '^[0-9]+ -?0x' /tmp/tutorial.said)
check 'PyTorch: checkpointed in the middle' test "${losses[1]%% *}" -lt 199
check 'PyTorch: the loss at the checkpoint' grep -qxF "${losses[1]}" /tmp/whole
check 'PyTorch: the last loss' test "${losses[2]}" = "$(tail -n 1 /tmp/whole)"
check 'PyTorch: undone' cmp /etc/containers/containers.conf /tmp/before

if criu_from 4.2; then # older ones cannot dump a server's socket on Linux 6.16
    check 'server: all commands' tutorial 'A model server'
    # Its answers: the number of sums that the memory of its GPU has given, and its process.
    mapfile -t answers < <(grep '^sums ' /tmp/tutorial.said)
    check 'server: it answers before and after' test "${#answers[@]}" = 2
    read -r _ before said process <<< "${answers[0]}"
    check 'server: right before' test "$said" = ok
    check 'server: the next one goes on' test "$(cut -d ' ' -f 2 <<< "${answers[1]}")" -gt "$before"
    check 'server: with the same memory' test "$(cut -d ' ' -f 3- <<< "${answers[1]}")" = "ok $process"
    check 'server: undone' cmp /etc/containers/containers.conf /tmp/before
fi
