# mutations.sh LOW COUNT SEED: variants of real checkpoints with one or two fields changed get nothing beyond the spec
# (mutations.py).
low=$1 count=$2 seed=$3
simulate "$low"
printf '[restore]\nallow = ["/srv/checkpoints", "/tmp/m"]\n' >> /etc/cryopod/config.toml
mkdir -p /srv/checkpoints /srv/data /tmp/m
settled() { # CONTAINER: its program has begun, and all its processes wait
    local pid && pid=$(cryopod-runtime --root /run/m state "$1" | jq .pid)
    grep -Eqv 'runc|crun' "/proc/$pid/comm" && [ -z "$(ps -o stat= -p "$(pgrep -d, --ns "$pid" --nslist pid .)" | grep -v '^S')" ]
}
container() { # NAME JQ COMMANDS: a checkpoint in /tmp/m/NAME/images, and its bundle
    local name=$1 program=$2 at=/tmp/m/$1
    bundle "$at/bundle" sh /job
    chmod 755 "$at/bundle/rootfs"
    echo "$3" > "$at/bundle/rootfs/job"
    jq "$program" "$at/bundle/config.json" > /tmp/config && cp /tmp/config "$at/bundle/config.json"
    cryopod-runtime --root /run/m run -d --bundle "$at/bundle" "$name" < /dev/null > /dev/null 2>&1
    sleep 1
    wait_for settled "$name"
    cryopod-runtime --root /run/m checkpoint --image-path "$at/images" --work-path /tmp "$name" ||
        { grep Error /tmp/dump.log && return 1; }
    cryopod-runtime --root /run/m delete -f "$name"
}
loop='while :; do sleep 1; done'
bind() { echo "{\"destination\": \"$2\", \"type\": \"bind\", \"source\": \"$1\", \"options\": [\"bind\", \"ro\"]}"; }
python=$(echo /usr/lib/python3.*)
libraries="$(bind /usr/lib/x86_64-linux-gnu /lib/x86_64-linux-gnu), $(bind /usr/lib64 /lib64)"
container plain . "$loop"
container volumes ".mounts += [$(bind /srv/data /data), {\"destination\": \"/scratch\", \"type\": \"tmpfs\", \"source\": \"tmpfs\", \"options\": [\"nosuid\", \"nodev\"]}]
    | .root.readonly = true" "echo x > /scratch/f; $loop"
container files . "mkfifo /tmp/f; exec 3<>/tmp/f; echo data > /tmp/g; exec 4< /tmp/g; rm /tmp/g; ($loop) | $loop"
cat > /srv/data/sockets.py <<'P'
import mmap, os, select, socket, threading, time
a = socket.socket(socket.AF_UNIX); a.bind("/tmp/s"); a.listen()
b = socket.socket(socket.AF_UNIX); b.connect("/tmp/s"); c, _ = a.accept(); b.send(b"hello")
if os.path.exists("/data/inet"):
    t = socket.socket(); t.bind(("127.0.0.1", 5555)); t.listen()
    u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(("127.0.0.1", 5556))
p = select.epoll(); p.register(a, 1); e = os.eventfd(0); m = mmap.mmap(-1, 1 << 16); m[0] = 1
f = os.memfd_create("x"); os.write(f, b"abc"); os.nice(3)
threading.Thread(target=time.sleep, args=(10000,), daemon=True).start()
if os.fork() == 0: time.sleep(10000)
time.sleep(10000)
P
# CRIU 4.1 dumps no internet sockets on newer kernels.
if criu_from 4.2; then touch /srv/data/inet; fi
cat > /srv/data/memory.py <<'P'
import mmap, os, resource, signal, time
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
signal.signal(signal.SIGALRM, lambda *_: None); signal.setitimer(signal.ITIMER_REAL, 5, 5)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]); os.kill(os.getpid(), signal.SIGUSR1)
shared = mmap.mmap(-1, 1 << 20); shared[:5] = b"hello"
file = os.open("/dev/shm/f", os.O_RDWR | os.O_CREAT); os.ftruncate(file, 1 << 16)
of_file = mmap.mmap(file, 1 << 16); private = mmap.mmap(file, 1 << 16, mmap.MAP_PRIVATE)
if os.fork() == 0:
    os.setsid(); os.chdir("/dev/shm"); os.umask(0o77)
while True: time.sleep(1)
P
python=".mounts += [$(bind /srv/data /data), $libraries, $(bind /usr/bin/python3 /python3), $(bind "$python" "$python")]"
container sockets "$python" 'exec /python3 /data/sockets.py'
container memory "$python" 'exec /python3 /data/memory.py'
container limited '.process.user = {uid: 0, gid: 0, additionalGids: [5]} | .process.noNewPrivileges = true | .process.oomScoreAdj = 200
    | .process.capabilities = (.process.capabilities | map_values(["CAP_CHOWN"])) | .process.rlimits = []' "$loop"
container seccomp '.linux.seccomp = {defaultAction: "SCMP_ACT_ALLOW", architectures: ["SCMP_ARCH_X86_64"],
    syscalls: [{names: ["keyctl", "ptrace"], action: "SCMP_ACT_ERRNO"}]}' "($loop) & $loop"
node() { stat -c '{"type":"c","path":"%n","major":%Hr,"minor":%Lr,"fileMode":438}' "/dev/$1"; }
nodes=$(for name in nvidiactl nvidia-uvm nvidia0; do node $name; done | jq -cs .)
container userns ".linux.devices = $nodes | "'.linux.namespaces += [{type: "user"}]
    | .linux.uidMappings = [{containerID: 0, hostID: 100000, size: 65536}] | .linux.gidMappings = .linux.uidMappings' "$loop"
ip netns add mutations
mkdir -p /run/named && touch /run/named/{uts,ipc}
unshare --uts=/run/named/uts --ipc=/run/named/ipc hostname mutations
container named '.hostname = "" | .linux.namespaces |= map(if .type == "network" then .path = "/run/netns/mutations"
    elif .type == "uts" or .type == "ipc" then .path = "/run/named/" + .type else . end)' "$loop"
container gpu ".linux.devices = $nodes | .linux.resources.devices = [{allow: true, access: \"rwm\"}]
    | .mounts += [$libraries, $(bind /opt/cusim /cusim), $(bind /run/cusim /run/cusim | sed 's/, "ro"//')]" \
    'LD_LIBRARY_PATH=/cusim exec /cusim/cusim-client --mib 1 --interval-ms 200'
python3 /src/tests/tests/scripts/security/mutations.py cryopod-runtime "$count" "$seed" \
    /tmp/m/{plain,volumes,files,sockets,memory,limited,seccomp,userns,named,gpu}
