# programs.sh LOW: real programs in containers with GPU nodes are checkpointed under load, removed, restored, and their results
# are what they would have been.
low=$1
mkimage
low_level "$low"
fake_gpu_nodes
mkdir -p /srv/app
python=(-v /usr:/usr:ro -v /usr/lib64:/lib64:ro -v /usr/lib/x86_64-linux-gnu:/lib/x86_64-linux-gnu:ro -v /srv/app:/app:ro -e PYTHONDONTWRITEBYTECODE=1)
start() { # NAME COMMAND...
    name=$1 && shift
    rm -f /srv/app/finish
    pod run -d --name "$name" --network "${network:-none}" --security-opt seccomp=unconfined --device /dev/nvidia0 --shm-size 512m "${options[@]}" "${python[@]}" localhost/busybox "$@" > /dev/null
}
options=()
lines() { printed "$name" | grep -c -E "$1" || true; }
more() { [ "$(lines "$1")" -ge "$2" ]; }
begun() { wait_for more "$1" "$2" || { printed "$name" | tail -n 20; exit 1; }; }
cycle() {
    if ! pod container checkpoint --export /tmp/p.tar "$name" > /tmp/said 2>&1; then
        cat /tmp/said; grep -h Error "$(podman inspect -f '{{.StaticDir}}' "$name")/dump.log"; exit 1
    fi
    pod rm -f -t 0 "$name" > /dev/null
    if ! pod container restore --import /tmp/p.tar --keep > /tmp/said 2>&1; then
        cat /tmp/said; find /var/lib/containers -name restore.log -exec grep -h Error {} +; exit 1
    fi
    rm -f /tmp/p.tar
}
ended() { [ "$(podman inspect -f '{{.State.Status}}' "$name")" = exited ]; }
fine() { # NAME: it ends well, which no program does before it may
    [ "$(lines verified)" = 0 ] || { echo 'too early'; exit 1; }
    touch /srv/app/finish
    wait_for ended || { printed "$name" | tail; exit 1; }
    [ "$(podman inspect -f '{{.State.ExitCode}}' "$name")" = 0 ] || { printed "$name" | tail -n 20; exit 1; }
    pod rm -f "$name" > /dev/null
    echo "ok: $1"
}

# Python's multiprocessing: workers, semaphores, a queue, shared memory.
cat > /srv/app/workers.py <<'PY'
import multiprocessing as mp, os, sys, time
from multiprocessing import shared_memory

def work(name, lock, ready, queue, results):
    memory = shared_memory.SharedMemory(name=name)
    ready.release()
    while (n := queue.get()) is not None:
        with lock:
            memory.buf[n] = (memory.buf[n] + n) % 256
        results.put(n * n)
        time.sleep(0.01)
        while n > 2000 and not os.path.exists("/app/finish"):
            time.sleep(0.05)

if __name__ == "__main__":
    context = mp.get_context(sys.argv[1])
    total = 3000
    memory = shared_memory.SharedMemory(create=True, size=1 << 20)
    lock, ready = context.Lock(), context.Semaphore(0)
    queue, results = context.Queue(), context.Queue()
    workers = [context.Process(target=work, args=(memory.name, lock, ready, queue, results)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for _ in workers:
        ready.acquire()
    for n in range(total):
        queue.put(n)
    for _ in workers:
        queue.put(None)
    got = []
    while len(got) < total:
        got.append(results.get())
        print("result", len(got), flush=True)
    for worker in workers:
        worker.join()
    assert sorted(got) == [n * n for n in range(total)]
    assert [memory.buf[n] for n in range(total)] == [n % 256 for n in range(total)]
    memory.close()
    memory.unlink()
    print("verified", flush=True)
PY
for method in fork spawn; do
    start workers /usr/bin/python3 /app/workers.py $method
    begun '^result' 20
    cycle
    fine "multiprocessing, $method"
done

# Locks of both kinds, a deleted open file of 300 MiB, and another that is named no more but linked elsewhere.
cat > /srv/app/files.py <<'PY'
import fcntl, hashlib, itertools, os, time
locked = open("/tmp/locked", "w+")
fcntl.lockf(locked, fcntl.LOCK_EX)
flocked = open("/tmp/flocked", "w+")
fcntl.flock(flocked, fcntl.LOCK_EX)
big = open("/tmp/big", "w+b")
chunk = hashlib.sha256(b"seed").digest() * 32768
for _ in range(300):
    big.write(chunk)
big.flush()
os.unlink("/tmp/big")
before = hashlib.sha256(chunk * 300).hexdigest()
kept = open("/tmp/kept", "w+")
os.link("/tmp/kept", "/tmp/other")
os.unlink("/tmp/kept")
kept.write("kept")
kept.flush()

def taken(path, lock):
    pid = os.fork()
    if pid == 0:
        other = open(path, "r+")
        try:
            lock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os._exit(0)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

for n in itertools.count():
    print("tick", n, flush=True)
    time.sleep(0.1)
    if os.path.exists("/app/finish"):
        break
assert taken("/tmp/locked", fcntl.lockf) and taken("/tmp/flocked", fcntl.flock), "a lock is lost"
big.seek(0)
assert hashlib.sha256(big.read()).hexdigest() == before and os.fstat(big.fileno()).st_nlink == 0
assert open("/tmp/other").read() == "kept" and os.fstat(kept.fileno()).st_ino == os.stat("/tmp/other").st_ino
print("verified", flush=True)
PY
start files /usr/bin/python3 /app/files.py
begun '^tick' 3
cycle
fine 'file locks, deleted files'

with_sockets() {
# redis with established connections over loopback, under load.
cat > /srv/app/load.py <<'PY'
import os, socket, subprocess, time
server = subprocess.Popen(["/usr/bin/redis-server", "--port", "6379", "--bind", "127.0.0.1", "--save", "", "--dir", "/tmp"], stdout=subprocess.DEVNULL)
while True:
    try:
        clients = [socket.create_connection(("127.0.0.1", 6379)) for _ in range(4)]
        break
    except OSError:
        time.sleep(0.05)
def command(client, *words):
    client.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words))
    reply = b""
    while not reply.endswith(b"\r\n"):
        reply += client.recv(4096)
    return reply
n = 0
while n < 8000 or not os.path.exists("/app/finish"):
    n += 1
    assert command(clients[n % 4], b"INCR", b"counter") == b":%d\r\n" % n, "a request is lost"
    if n % 100 == 0:
        print("requests", n, flush=True)
    time.sleep(0.001)
print("verified", command(clients[0], b"GET", b"counter"), flush=True)
server.terminate()
server.wait()
PY
# In a network namespace of the engine's, and in one that the runtime makes (`--network none`).
ip netns add web
ip -n web link set lo up
for network in none ns:/run/netns/web; do
    start redis /usr/bin/python3 /app/load.py
    begun '^requests' 3
    cycle
    fine "redis over loopback, network $network"
done
# uvicorn on uvloop: refused with io_uring, and the remedy works.
cat > /srv/app/web.py <<'PY'
import http.client, os, subprocess, sys, threading, time
app_code = "async def app(scope, receive, send):\n    await send({'type': 'http.response.start', 'status': 200, 'headers': []})\n    n = int(scope['path'][1:])\n    await send({'type': 'http.response.body', 'body': str(n * n).encode()})\n"
open("/tmp/web_app.py", "w").write(app_code)
server = subprocess.Popen([sys.executable, "-m", "uvicorn", "--app-dir", "/tmp", "--loop", "uvloop", "--log-level", "error", "--lifespan", "off", "--timeout-keep-alive", "600", "--port", "8000", "web_app:app"])
while True:
    try:
        client = http.client.HTTPConnection("127.0.0.1", 8000)
        client.request("GET", "/0")
        client.getresponse().read()
        break
    except OSError:
        time.sleep(0.05)
n = 0
while n < 2000 or not os.path.exists("/app/finish"):
    n += 1
    client.request("GET", f"/{n}")
    assert int(client.getresponse().read()) == n * n
    if n % 50 == 0:
        print("requests", n, flush=True)
    time.sleep(0.004)
print("verified", flush=True)
server.terminate()
server.wait()
PY
start web /usr/bin/python3 /app/web.py
begun '^requests' 3
pod container checkpoint --export /tmp/p.tar web > /tmp/said 2>&1 && { echo 'uvloop with io_uring: checkpointed'; exit 1; }
grep -q 'has an io_uring; start the container with the annotation dev.cryopod.env.avoid=io_uring' /tmp/said || { cat /tmp/said; exit 1; }
fine 'uvicorn with io_uring is refused, and goes on'
options=(--annotation dev.cryopod.env.avoid=io_uring)
start web /usr/bin/python3 /app/web.py
begun '^requests' 3
cycle
fine 'uvicorn without io_uring'
}

# Sockets: CRIU before 4.2 cannot dump them on newer kernels, and cryopod says so beforehand.
if ! grep -qE 'Version: (4\.[2-9]|[5-9])' <<< "$(criu --version)" && [ "$(printf '%s\n' 6.16 "$(uname -r)" | sort -V | head -n 1)" = 6.16 ]; then
    start sockets /usr/bin/python3 -c 'import os, socket, time
s = socket.create_server(("127.0.0.1", 7000))
while not os.path.exists("/app/finish"): print("tick", flush=True); time.sleep(0.1)'
    begun '^tick' 2
    if pod container checkpoint --export /tmp/p.tar sockets > /tmp/said 2>&1; then echo 'sockets: checkpointed'; exit 1; fi
    grep -q 'process [0-9]* (python3): has a network socket, and CRIU [0-9.]* cannot dump one on Linux [0-9.]*; install CRIU 4.2' /tmp/said || { cat /tmp/said; exit 1; }
    fine 'sockets are refused'
else
    with_sockets
fi
