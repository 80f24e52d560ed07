"""campaign.py LOW ENGINES SEED ROUNDS [ONLY]: random operations on random containers, each with a random fault. campaign.sh
sets the bed up.

Round n has the seed SEED + n. It decides the containers, and for each operation by itself what it does and what fails in it,
so that leaving out one changes no other. After each operation a model says what must hold:

- a container that the engine calls running goes on, with right sums; an operation that fails leaves it running;
- a container that the engine does not call running has no process;
- a checkpoint that was made, and any file that `cryopod verify` accepts, is restored in the end;
- at the end nothing is left: processes, mounts, cgroups, files, GPU memory, entries of the store.

The first violation ends the program with exit code 1 and a line `VIOLATION seed N operation K: ...`."""
import glob
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

LOW, ENGINES, SEED, ROUNDS = sys.argv[1], sys.argv[2].split(","), int(sys.argv[3]), int(sys.argv[4])
# For a comparison, what both can do alone: `stock`, the low-level runtime and containerd's own shim in cryopod's place, or `ours`.
STACK = os.environ.get("STACK")
STOCK = STACK == "stock"
RUNTIME = LOW if STOCK else "cryopod-runtime"
ONLY = {int(n) for n in sys.argv[5].split(",")} if len(sys.argv) > 5 and sys.argv[5] else None
OPERATIONS = int(os.environ.get("OPERATIONS") or 6)  # of a round
CP, OUT, LIMIT = "/srv/cp", "/srv/out", 240
CTL = ["/opt/build/cusim-ctl", "--socket", "/run/cusim/server.sock"]
IMAGE = {"podman": "localhost/{}", "docker": "{}", "ctr": "localhost/{}:latest"}
GPU_NODES = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidia1"]
LIBRARIES = ["/usr/lib/x86_64-linux-gnu:/lib/x86_64-linux-gnu", "/usr/lib64:/lib64"]
PYTHON = next(f"/usr/lib/{name}" for name in sorted(os.listdir("/usr/lib")) if name.startswith("python3."))
KINDS = ["counter", "memory", "sockets", "files", "threads", "gpu1", "gpu2", "gpu-threads", "gpu-train", "gpu-nccl"]
if os.environ.get("KINDS"):
    KINDS = os.environ["KINDS"].split(",")
FAULTS = {"none": 10, "kill": 50, "stop": 12, "space": 12, "read-only": 3, "driver": 14, "other": 14}
if os.environ.get("FAULTS"):
    FAULTS = {kind: FAULTS[kind] for kind in os.environ["FAULTS"].split(",")}
if STACK:
    KINDS, ENGINES = ["counter", "memory", "files", "threads"], [engine for engine in ENGINES if engine != "docker"]
os.environ["CONTAINERD_SUPPRESS_DEPRECATION_WARNINGS"] = "1"


def states():
    """Where each process of a container is, and what is frozen."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if container_of(pid) and "conmon" not in read(f"/proc/{pid}/comm"):
            status = dict(line.split(":\t", 1) for line in read(f"/proc/{pid}/status").splitlines() if ":\t" in line)
            call, where = read(f"/proc/{pid}/syscall").strip(), read(f"/proc/{pid}/wchan")
            found.append(f"{pid} {status.get('State')} traced by {status.get('TracerPid')} pending {status.get('SigPnd')} {status.get('ShdPnd')} at {where} {call}")
    for directory, _, files in os.walk("/sys/fs/cgroup"):
        for file in {"cgroup.freeze", "freezer.state"} & set(files):
            if read(f"{directory}/{file}").strip() not in ("0", "THAWED", ""):
                found.append(f"{directory} is frozen")
    return found + [f"{pid} {line[:120]}" for pid, _, line in processes() if "criu" in line or "cryopod" in line]


class Violation(Exception):
    pass


def run(*command, limit=LIMIT, output="/tmp/said"):
    """Exit code and what it said; 124 where it does not end."""
    with open(output, "w+") as said:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True)
        try:
            code = child.wait(limit)
        except subprocess.TimeoutExpired:
            code = 124
            show_processes()
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    with open(output, errors="replace") as said:
        return code, said.read().strip()


def must(*command):
    code, said = run(*command)
    if code:
        raise Violation(f"{' '.join(command)}: {code}: {said[-600:]}")
    return said


def until(condition, limit=60):
    end, pause = time.monotonic() + limit, 0.02
    while not (got := condition()):
        if time.monotonic() > end:
            return got
        time.sleep(pause)
        pause = min(pause * 1.5, 0.4)
    return got


def short(said):
    found = re.findall(r"cryopod: .*|Error: .*", said)
    return re.sub(r"[0-9a-f]{64}", "ID", found[0] if found else said)[:420]


# ---- processes ----
def read(path):
    try:
        with open(path, "rb") as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def processes():
    """(pid, name, command line) of all but kernel threads and zombies."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        stat = read(f"/proc/{pid}/stat")
        if stat and stat.rsplit(")", 1)[1].split()[0] not in "ZX":
            yield int(pid), stat[stat.index("(") + 1:stat.rindex(")")], read(f"/proc/{pid}/cmdline").replace("\0", " ")


def parent_of(pid):
    return (re.search(r"PPid:\s+(\d+)", read(f"/proc/{pid}/status")) or "00")[1]


def name_of(pid):
    return read(f"/proc/{pid}/comm").strip()


def container_of(pid):
    """The container's name by the mount of its log, which is there for restored ones, too."""
    found = re.search(r" /srv/out/(\S+) /out ", read(f"/proc/{pid}/mountinfo"))
    return found and found[1]


def show_processes():
    for pid, name, line in processes():
        wchan, state = read(f"/proc/{pid}/wchan"), re.search(r"State:\s+(\S)", read(f"/proc/{pid}/status"))
        print(f"    {pid} {name} {state and state[1]} {wchan} {container_of(pid) or ''}: {line[:160]}")


def show_shims():
    """Where the threads of all shims are: containerd's own and the daemon write the stacks of their goroutines."""
    for pid, name, line in processes():
        if "-shim-" in line or name == "containerd":
            for thread in os.listdir(f"/proc/{pid}/task"):
                print(f"    {pid} {name} {thread}: {read(f'/proc/{pid}/task/{thread}/wchan')} {read(f'/proc/{pid}/task/{thread}/syscall').strip()}")
            if "cryopod" not in line.split(" ")[0]:
                os.kill(pid, signal.SIGUSR1)
    time.sleep(2)
    print(read("/tmp/containerd.log")[-200_000:])


# ---- engines ----
daemons = {}


def daemon_up(name):
    command = ["containerd"] if name == "containerd" else [
        "dockerd", "--containerd", "/run/containerd/containerd.sock", "--experimental", "--iptables=false", "--ip6tables=false",
        "--bridge=none", "--live-restore", "--add-runtime", "cryopod=/usr/local/bin/cryopod-runtime"]
    with open(f"/tmp/{name}.log", "a") as log:
        daemons[name] = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"PATH": "/place:" + os.environ["PATH"]})
    probe = ["ctr", "version"] if name == "containerd" else ["docker", "version"]
    if not until(lambda: run(*probe, limit=20)[0] == 0, 120):
        raise Violation(f"{name} does not come up")
    # dockerd looks for a new containerd twice a second, and refuses what it is asked meanwhile.
    parts = ["docker", "version", "--format", "{{range .Server.Components}}{{.Name}} {{end}}"]
    docker = daemons.get("dockerd")
    if docker and docker.poll() is None and not until(lambda: "containerd" in run(*parts, limit=20)[1], 120):
        raise Violation("dockerd does not find containerd")


def revive():
    for name, child in list(daemons.items()):
        if child.poll() is not None:
            daemon_up(name)


def ended_unseen(c):
    """dockerd does not learn of a container that ends while containerd is down and whose event comes to nobody: it calls it
    running until it is itself started again."""
    task = run("docker", "inspect", "-f", "{{.Id}}", c.name)[1].strip()
    alive = any(line.startswith(task) and ("RUNNING" in line or "PAUSED" in line)
                for line in run("ctr", "-n", "moby", "tasks", "ls")[1].splitlines())
    if not alive and not until(lambda: c.status() == "gone", 40):
        print(f"    dockerd does not know that {c.name} has ended")
        daemons["dockerd"].terminate()
        daemons["dockerd"].wait(60)
        revive()


def forgotten():
    """podman, whose client was killed, forgets a container that the low-level runtime has made or has not deleted."""
    for name in os.listdir(f"/run/{LOW}") if os.path.isdir(f"/run/{LOW}") else []:
        code, status = run("podman", "inspect", "--type", "container", "-f", "{{.State.Status}}", name) if len(name) == 64 else (124, "")
        if code != 124 and status not in ("running", "paused"):  # 124: the machine is too busy for an answer
            print(f"    podman has forgotten {name[:12]}: {status[-200:]}")
            run(RUNTIME, "delete", "--force", name)


class Container:
    def __init__(self, name, engine, kind, shim):
        self.name, self.engine, self.kind, self.shim = name, engine, kind, shim
        self.state = "absent"  # running, suspended, saved: as it should be
        self.inside = None  # a checkpoint that the engine keeps with the container
        self.archives, self.made, self.imaged, self.unclean, self.was_stopped = [], 0, -1, False, False
        # Without the library NCCL's communicators are a refusal.
        self.preload = kind == "gpu-nccl" or self.gpu() and random.Random(f"{name}/preload").random() < 0.6
        os.makedirs(f"{OUT}/{name}", exist_ok=True)

    def gpu(self):
        return self.kind.startswith("gpu")

    def plain(self):
        """Without a GPU's nodes cryopod leaves it to the low-level runtime, most of whose faults are not the subject."""
        return self.kind == "counter"

    def program(self):
        client = "exec /cusim/cusim-client --mib {} >> /out/log 2>&1"
        own = {
            "counter": "i=0; while :; do echo $i $((i * i)) ok >> /out/log; i=$((i + 1)); sleep 0.1; done",
            "gpu1": client.format("30"), "gpu2": client.format("20 --gpus 0,1 --procs 2"),
            "gpu-threads": client.format("20 --threads 3 --churn"), "gpu-train": client.format("40 --gpus all --train-mib 2"),
            # Half of them slow: what dies, dies between two ranks' steps.
            "gpu-nccl": random.Random(f"{self.name}/slow").choice(["", "touch /dev/shm/nccl-slow; "]) + "exec /cusim/cusim-nccl --ranks 2 --mib 8 --interval-ms 100 >> /out/log 2>&1",
        }
        return ["sh", "-c", own.get(self.kind, f"exec /python3 /job.py {self.kind} /out/log")]

    def binds(self):
        binds = [f"{OUT}/{self.name}:/out"]
        if self.gpu():
            binds += ["/run/cusim:/run/cusim", "/opt/cusim:/cusim", *LIBRARIES]
        elif self.kind != "counter":
            # The file itself: CRIU alone does not restore the mount of a link.
            binds += [os.path.realpath("/usr/bin/python3") + ":/python3", f"{PYTHON}:{PYTHON}", *LIBRARIES,
                      "/src/tests/tests/scripts/campaign/job.py:/job.py"]
        return binds

    def create(self, source=None):
        """The engine's command for `run`, or for a container that is created from a checkpoint."""
        self.made += 1  # containerd 1.7 makes no second checkpoint of the same spec
        nodes = [] if self.plain() else GPU_NODES
        image = IMAGE[self.engine].format("glibc" if self.preload else "busybox")
        preload = ["--annotation", "dev.cryopod.preload=on"] if self.preload else []
        if self.engine == "ctr":
            with_shim = ["--runtime", "io.containerd.cryopod.v2"] if self.shim == "ours" else [
                "--runtime", "io.containerd.runc.v2", *([] if STOCK else ["--runc-binary", "/usr/local/bin/cryopod-runtime"])]
            mounts = [word for bind in self.binds() for word in (
                "--mount", "type=bind,src={},dst={},options=rbind:rw".format(*bind.split(":")))]
            return ["ctr", "run", "-d", "--null-io", *with_shim, *mounts, *(w for n in nodes for w in ("--device", n)),
                    "--env", "LD_LIBRARY_PATH=/cusim", "--env", f"MADE={self.made}",
                    *preload, *(["--annotation", f"dev.cryopod.restore={source}"] if source else []),
                    image, self.name, *self.program()]
        given = ["-d", "--name", self.name, "--network", "none", "-e", "LD_LIBRARY_PATH=/cusim", "-e", f"MADE={self.made}",
                 *(f"--device={n}" for n in nodes), *(f"--volume={b}" for b in self.binds())]
        if self.engine == "docker":
            return ["docker", "run", "--runtime", "cryopod", "--security-opt", "seccomp=unconfined", *given,
                    *preload, *(["-e", f"CRYOPOD_RESTORE={source}"] if source else []), image, *self.program()]
        return ["podman", "--runtime", RUNTIME, "run", *given, *preload,
                *(["--annotation", f"dev.cryopod.restore={source}"] if source else []), image, *self.program()]

    def status(self):
        """running, paused, gone; what is neither is told as the engine calls it."""
        if self.engine == "ctr":
            said = run("ctr", "tasks", "ls")[1]
            found = re.search(rf"^{self.name}\s+\d+\s+(\w+)", said, re.M)
            word = found[1].lower() if found else "gone"
        else:
            code, word = run(self.engine, "inspect", "--type", "container", "-f", "{{.State.Status}}", self.name)
            word = word.split("\n")[-1] if code == 0 else "gone"
        return {"exited": "gone", "stopped": "gone"}.get(word, word)

    def remove(self):
        def away():
            if self.engine == "ctr":
                run("ctr", "tasks", "resume", self.name)
                run("ctr", "tasks", "kill", "-a", "-s", "SIGKILL", self.name)
                until(lambda: self.status() in ("gone",), 10)
                run("ctr", "tasks", "delete", "-f", self.name)
                run("ctr", "containers", "rm", self.name)
                run("ctr", "snapshots", "rm", self.name)
                return self.name not in run("ctr", "containers", "ls", "-q")[1].split()
            run("podman", "rm", "-f", "-t", "0", self.name) if self.engine == "podman" else run("docker", "rm", "-f", self.name)
            return run(self.engine, "inspect", "--type", "container", self.name)[0] != 0
        if not until(away, 60):
            show_shims()
            raise Violation(f"{self.name} cannot be removed: {self.status()}: {read('/tmp/said')[-300:]}")
        if self.engine == "podman":
            forgotten()
        self.state, self.inside = "absent", None

    def resume_stopped(self):
        """A checkpoint of a process that SIGSTOP had stopped brings it back as it was."""
        for pid in filter(str.isdigit, os.listdir("/proc")):
            if container_of(pid) == self.name and "State:\tT (stopped)" in read(f"/proc/{pid}/status"):
                os.kill(int(pid), signal.SIGCONT)

    # what it has printed
    def lines(self):
        return read(f"{OUT}/{self.name}/log").split("\n")[:-1]

    def at(self):
        for line in reversed(self.lines()):
            if line.split(" ")[0].isdigit():
                return int(line.split(" ")[0])
        return -1

    def goes_on(self, after=None, limit=90):
        """More lines come. `after`: (first, last) between which the checkpoint was, so the next line is one of these."""
        start = self.mark if after else len(self.lines())
        more = lambda: len(self.lines()) >= start + 4
        if self.was_stopped and not until(more, 3):
            self.resume_stopped()
        if not until(more, limit):
            raise Violation(f"{self.name} is {self.status()} and stands still: {states()}")
        new = [line for line in self.lines()[start:] if line.split(" ")[0].isdigit()]
        if corrupt := [line for line in self.lines() if "CORRUPT" in line]:
            raise Violation(f"{self.name} has wrong sums: {corrupt[0]}")
        if after and self.kind not in ("gpu2", "gpu-nccl") and not after[0] <= int(new[0].split(" ")[0]) <= after[1] + 1:  # whose two count apart
            raise Violation(f"{self.name} goes on at {new[0]}, and the checkpoint was made between {after[0]} and {after[1]}")


class Archive:
    def __init__(self, way, place, between, of):
        self.way, self.place, self.between, self.of, self.shown = way, place, between, of, False


# ---- faults ----
LONG_LIVED = ("shim", "stock", "containerd", "dockerd", "job")  # are there before the operation begins


# Another verb on the same container while the operation runs. An engine's own lock its container against each other, so most
# call the runtime. What takes the container away: its user asked for it. What may not make the operation fail: it changes nothing.
ENDING = ("kill", "delete", "engine-stop", "engine-remove")
HARMLESS = ("state", "update", "cache-prune")
OTHERS = (*ENDING, *HARMLESS, "exec", "pause", "checkpoint", "engine-exec", "engine-pause", "suspend", "resume")


def unpause(container):
    return {"podman": ["podman", "unpause"], "docker": ["docker", "unpause"], "ctr": ["ctr", "tasks", "resume"]}[container.engine] + [container.name]


class Fault:
    """What goes wrong in one operation. `who` is what it strikes."""
    def __init__(self, rng, container, verb):
        self.who = self.what = "nothing"
        self.struck, self.ended = 0, False  # `ended`: the container was to end, by another verb
        if verb in ("suspend", "resume"):
            signals = ["client"] * 3 + ["agent", "job"]
        elif verb == "prune":
            signals = ["client"]
        elif verb in ("run", "kill"):  # theirs are the engine's and the low-level runtime's
            signals = ["wrapper"]
        else:
            signals = ["wrapper"] * 3 + ["criu"] * 3 + ["low", "client", "client", "job"] + (["agent", "agent", "worker"] if container.gpu() else [])
        if container.plain():
            signals = ["client"]
        if container.engine != "podman" and verb != "prune":
            signals += ["shim", "stock", "containerd"] + (["dockerd"] if container.engine == "docker" else [])
        kinds = FAULTS | {"driver": FAULTS.get("driver", 0) * container.gpu(),
                          "other": FAULTS.get("other", 0) * (not STACK and not container.plain() and container.state != "suspended" or verb == "resume")}
        kind = rng.choices([*kinds, "none"], [*kinds.values(), 0.001])[0]
        self.delay = rng.random() ** 2 * 0.3
        self.pause, self.all = rng.choice([0.2, 0.7, 2, 5]), rng.random() < 0.4
        self.room = rng.choice([0, 4, 64, 200, 1000, 4000, 20000, 40000]) * 1024
        if kind in ("kill", "stop"):
            self.what, self.who = kind, rng.choice(signals)
            if self.who == "dockerd":  # one that is killed takes what it has just restored for stopped
                self.what = "stop"
            if self.who in LONG_LIVED:
                self.delay = rng.random() * 0.9
        elif kind == "space":
            own = {"podman": "/var/lib/containers", "docker": "/var/lib/docker", "ctr": "/var/lib/containerd"}[container.engine]
            self.what, self.who = kind, rng.choice([own, own, CP, CP, "/run/cryopod", "/tmp"])
        elif kind == "read-only":
            self.what, self.who = kind, CP
        elif kind == "driver":
            if verb in ("resume", "restore", "import", "copy"):
                # After an OOM the driver restores a process no more.
                switch, steps = ["oom-restore:1" if verb != "resume" else "fail-checkpoint=CUDA_ERROR_NOT_SUPPORTED", "hang-restore"], ["restore", "unlock"]
            else:
                switch, steps = ["hang-lock:1", "fail-get-state:1", "cuinit-race", "hang-checkpoint", "fail-checkpoint=CUDA_ERROR_NOT_SUPPORTED"], ["lock", "checkpoint", "unlock"]
            switch += [f"fail-{s}:1" for s in steps] + [f"slow-{s}=1500:2" for s in steps]
            self.what, self.who = kind, rng.choice(switch)
        elif kind == "other":
            self.what, self.who = kind, rng.choice(OTHERS if container.gpu() else OTHERS[:-2])
            self.at = rng.choice(signals[:1] * 2 + [signal for signal in signals if signal in ("client", "criu")])
            self.delay = rng.random() ** 2 * (0.8 if "criu" in signals else 0.3)
        self.skip, self.short = self.who != "client" and rng.random() < 0.25, verb == "kill" or rng.random() < 0.25
        self.over = threading.Event()

    def __str__(self):
        after = f" {self.delay * 1000:.0f} ms" if self.what in ("kill", "stop", "other") else f" {self.room >> 10} KiB" if self.what == "space" else ""
        return "no fault" if self.what == "nothing" else f"{self.what} {self.who}{after}{'' if self.struck else ' (missed)'}"

    def lossy(self):
        """Whoever answers for the container was struck: the engine may take it away, or leave it paused."""
        return self.struck and (self.what == "kill" and self.who in ("shim", "stock", "job") or self.ended)

    def excuses(self):
        return self.struck and (self.what != "other" or self.who not in HARMLESS)

    def victims(self, container):
        who = getattr(self, "at", self.who)
        shim = who in ("shim", "stock") and (run("docker", "inspect", "-f", "{{.Id}}", container.name)[1]
                                                  if container.engine == "docker" else f"-id {container.name}")
        for pid, name, line in processes():
            if shim and shim not in line:
                continue
            works = self.short or re.search(r" (checkpoint|restore|create|run) ", line)
            if {"wrapper": name == RUNTIME and " hold" not in line and works and "init" not in line,
                # CRIU waits for ever for a process that it restores and traces, and that somebody stops.
                "criu": name == "criu" and (self.what != "stop" or name_of(parent_of(pid)) != "criu"),
                "low": name == LOW and "init" not in line and works,
                # Not conmon's clean-up: podman takes a container that ended without it for a running one.
                "client": name in ("podman", "docker", "ctr", "cryopod") and "run/conmon" not in line and " cleanup " not in line,
                "shim": "shim-cryopod-v2" in line and "-id " in line or "shim-runc-v2" in line and read(f"/proc/{pid}/exe") == "",
                "stock": "shim-runc-v2" in line and "-id " in line and "/place/" not in line,
                "agent": name == "cryopod-cuda-ag", "worker": "--vram-worker" in line,
                "containerd": name == "containerd", "dockerd": name == "dockerd"}.get(who, False):
                yield pid
            elif who == "job" and container_of(pid) == container.name and not line.startswith("cryopod"):
                yield pid

    def begin(self, container):
        if self.what in ("kill", "stop"):
            self.thread = threading.Thread(target=self.strike, args=(container,))
            self.thread.start()
        elif self.what == "other":
            self.runtime = ["cryopod-runtime", "--root", {"podman": f"/run/{LOW}", "docker": "/run/docker/runtime-runc/moby",
                                                         "ctr": "/run/containerd/runc/default"}[container.engine]]
            # Later the engine would answer only when the operation has ended.
            found = run(container.engine, "inspect", "--type", "container", "-f", "{{.Id}}", container.name) if container.engine != "ctr" else (0, container.name)
            self.known, self.id = set(self.records()), found[1] if found[0] == 0 else None
            self.thread = threading.Thread(target=self.meddle, args=(container,))
            self.thread.start()
        elif self.what == "space":
            used = shutil.disk_usage(self.who).used
            self.struck += run("mount", "-o", f"remount,size={max(used + self.room, 4096)}", self.who)[0] == 0
        elif self.what == "read-only":
            self.struck += run("mount", "-o", "remount,ro", self.who)[0] == 0
        elif self.what == "driver":
            must(*CTL, "set", self.who)
            self.struck = 1
            if self.who.startswith("hang"):
                self.thread = threading.Thread(target=lambda: (self.over.wait(8), run_quiet(*CTL, "clear")))
                self.thread.start()

    def records(self):
        return os.listdir(self.runtime[2]) if os.path.isdir(self.runtime[2]) else []

    def meddle(self, container):
        """Carries out the other verb; `self.trouble` is what must not be."""
        if not until(lambda: self.over.is_set() or list(self.victims(container)), LIMIT) or self.over.wait(self.delay):
            return
        who, engine, name = self.who, container.engine, container.name
        until(lambda: self.id or self.over.is_set() or (set(self.records()) - self.known), LIMIT)
        ident = self.id or next(iter(set(self.records()) - self.known), name)
        place = f"{CP}/other"
        direct = lambda verb, *words: [*self.runtime, verb, *words]
        command, self.undo = {
            "kill": (direct("kill", ident, "KILL"), None), "delete": (direct("delete", "--force", ident), None),
            "state": (direct("state", ident), None), "update": (direct("update", "--cpu-share", "512", ident), None),
            "exec": (direct("exec", ident, "sleep", "0.4"), None), "pause": (direct("pause", ident), direct("resume", ident)),
            "checkpoint": (direct("checkpoint", "--image-path", place, "--leave-running", ident), None),
            "cache-prune": (["cryopod", "cache", "prune", "--unused-for", "0", "-q"], None),
            "suspend": (["cryopod", "suspend", name, "-q"], ["cryopod", "resume", name, "-q"]), "resume": (["cryopod", "resume", name, "-q"], None),
            "engine-exec": (["ctr", "tasks", "exec", "--exec-id", "other", name, "sleep", "0.4"] if engine == "ctr" else [engine, "exec", name, "sleep", "0.4"], None),
            "engine-pause": (["ctr", "tasks", "pause", name] if engine == "ctr" else [engine, "pause", name], unpause(container)),
            "engine-stop": (["ctr", "tasks", "kill", "-a", "-s", "SIGKILL", name] if engine == "ctr" else [engine, "stop", "-t", "0", name], None),
            "engine-remove": (["ctr", "tasks", "delete", "-f", name] if engine == "ctr" else [engine, "rm", "-f", name], None),
        }[who]
        self.struck = 1
        code, said = run(*command, output="/tmp/said-other")
        self.answer = f"{code} {short(said)!r}"
        self.ended = who in ENDING and (code == 0 or who != "kill")
        if code == 124:
            self.trouble = f"{' '.join(command)} does not end"
        if "panicked" in said:
            self.trouble = said
        if self.undo and code == 0:
            self.over.wait(self.pause)
            run(*self.undo, output="/tmp/said-other")
        if os.path.isdir(place):
            if who == "checkpoint" and code == 0 and run("cryopod", "verify", "-q", place, output="/tmp/said-other")[0]:
                self.trouble = f"{place} does not verify: {read('/tmp/said-other')[-300:]}"
            shutil.rmtree(place)

    def strike(self, container):
        known, seen = (() if self.who in LONG_LIVED else set()), 0
        while not self.over.is_set():
            if victims := [pid for pid in self.victims(container) if pid not in known]:
                seen += 1
                if seen <= self.skip and known != ():
                    known |= set(victims)
                    continue
                if self.over.wait(self.delay):
                    return
                victims = list(self.victims(container)) if self.all else victims[-1:]
                for pid in victims:
                    try:
                        os.kill(pid, signal.SIGKILL if self.what == "kill" else signal.SIGSTOP)
                        self.struck += 1
                    except ProcessLookupError:
                        pass
                container.was_stopped |= self.what == "stop" and self.who == "job"
                if self.what == "stop":
                    time.sleep(self.pause)
                    for pid in victims:
                        try:
                            os.kill(pid, signal.SIGCONT)
                        except ProcessLookupError:
                            pass
                return
            time.sleep(0.002)

    def end(self):
        self.over.set()
        if hasattr(self, "thread"):
            self.thread.join()
        if getattr(self, "undo", None):  # which the operation may have refused
            run(*self.undo, output="/tmp/said-other")
        if hasattr(self, "trouble"):
            raise Violation(self.trouble)
        if self.what == "kill" and self.struck and self.who in daemons:  # which may take its time to end
            daemons[self.who].wait(60)
        if self.what == "space":
            must("mount", "-o", "remount,size=2g", self.who)
        elif self.what == "read-only":
            must("mount", "-o", "remount,rw", self.who)
        elif self.what == "driver":
            must(*CTL, "clear")


def run_quiet(*command):
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


# ---- one round ----
class Round:
    def __init__(self, seed):
        self.seed, rng = seed, random.Random(seed)
        self.names = 0
        self.containers = []
        for _ in range(rng.choice([1, 1, 2])):
            engine = rng.choice(ENGINES)
            self.containers.append(Container(f"s{seed}c{len(self.containers)}", engine, rng.choice(KINDS), rng.choice(["stock"] if STOCK else ["ours", "stock"])))
        self.unclean = self.shim_killed = False
        self.counts = [0, 0, 0]  # operations, faults that struck, operations that failed

    def fresh(self):
        self.names += 1
        return f"{CP}/s{self.seed}-{self.names}.tar"

    def strays(self):
        """Processes that belong to nothing."""
        tasks = run("ctr", "tasks", "ls")[1] if any(c.engine == "ctr" for c in self.containers) else ""  # a stopped one has its shim
        live = {c.name for c in self.containers if c.status() not in ("gone",) or c.engine == "ctr" and c.name in tasks}
        for pid, name, line in processes():
            if pid in baseline["pids"] or pid == os.getpid() or any(pid == d.pid for d in daemons.values()):
                continue
            owner = container_of(pid)
            if owner:
                if owner in live:
                    continue
            elif name == "conmon" or "containerd-shim" in line:
                if any(c.name in line or c.engine == "docker" for c in self.containers if c.name in live):
                    continue
            yield f"{pid} {name} ({owner or 'no container'}): {line[:150]}"

    def settled(self):
        revive()
        seen = {}

        def none():
            found = list(self.strays())
            seen["last"] = found
            return not found
        fault = getattr(self, "fault", None)
        if isinstance(fault, Fault) and fault.struck and fault.who == "containerd":
            for c in self.containers:
                if c.engine == "docker" and c.status() in ("running", "paused"):
                    ended_unseen(c)
        starts = isinstance(fault, Fault) and fault.struck and fault.what == "kill" and fault.who in ("client", "shim", "stock")
        if starts and not until(none, 30) and all(" containerd-shim (no container)" in one for one in seen["last"]):
            # containerd 1.7 also forgets the stock shim of a `ctr run` that is killed, or whose `start` is.
            for one in seen["last"]:
                print(f"    containerd has forgotten {one}")
                run("kill", "-KILL", one.split()[0])
        if not until(none, float(os.environ.get("SETTLE") or 100)):
            show_processes()
            raise Violation(f"left: {seen['last']}")

    # the operations: each returns the command, or a function that returns one
    def possible(self, c):
        if STACK:
            last = ["stop", "kill"] if c.engine == "podman" else ["kill"] if c.imaged != c.made else []
            return {"running": (["leave"] * 3 if c.engine == "podman" or c.imaged != c.made else []) + (last or ["kill"]),
                    "saved": ["restore"]}.get(c.state, ["import"] if c.archives else ["run"])
        if c.state == "running":
            other = ["kill", "prune"] + (["suspend"] * 3 if c.gpu() else [])
            if c.engine == "ctr":  # containerd 1.7 makes no second image of the same spec
                return (["directory"] * 4 if c.shim == "stock" else ["prune"]) + other + (["leave", "stop", "export"] * 2 if c.imaged != c.made else [])
            return ["leave", "leave", "stop", "stop", "export", "export-stop"] + other
        if c.state == "suspended":
            return ["resume", "resume", "resume", "leave", "kill"]
        if c.state == "saved" and c.inside:
            return ["restore"]
        return ["import", "copy"] if c.archives else ["run"]

    def operation(self, number):
        rng = random.Random(f"{self.seed}/{number}")
        c = rng.choice(self.containers)
        fault, pick = rng.getrandbits(32), rng.random()
        if c.state == "absent" and not c.archives or number == 0:
            verb = "run" if c.state == "absent" else self.possible(c)[0]
        else:
            verbs = self.possible(c)
            verb = verbs[int(pick * len(verbs))]
        fault = Fault(random.Random(fault), c, verb)
        if verb == "run" and (fault.what in ("kill", "stop") or rng.random() < 0.7):  # cryopod has no part in it
            fault.what = fault.who = "nothing"
        began = time.monotonic()
        self.verb, self.fault, self.c, self.code, self.said = verb, fault, c, None, ""
        c.mark = len(c.lines())
        low = c.at()
        try:
            getattr(self, "do_" + verb.replace("-", "_"))(c, fault, low)
        finally:
            took = time.monotonic() - began
            print(f"  {number}: {c.name} {c.engine} {c.kind}{' preload' * c.preload}{' ' + c.shim if c.engine == 'ctr' else ''}: {verb}, {fault}: "
                  f"{self.code}, {c.state}, {took:.1f} s" + (f": {short(self.said)!r}" if self.code else "") + (f"; the other: {fault.answer}" if hasattr(fault, "answer") else ""), flush=True)
            self.counts[0] += 1
            self.counts[1] += bool(fault.struck)
            self.unclean |= bool(self.code and fault.struck)
            self.shim_killed |= bool(fault.lossy() and fault.who == "stock")
            self.counts[2] += bool(self.code)

    def perform(self, c, fault, *command, then=()):
        fault.begin(c)
        try:
            self.code, self.said = run(*command)
            if self.code == 0 and then:
                self.code, self.said = run(*then)
        finally:
            fault.end()
        if self.code == 124:
            raise Violation(f"{' '.join(command[:4])} does not end: {short(self.said)}")
        if c.engine == "podman" and fault.struck and fault.what == "kill" and fault.who == "client":
            # conmon, whose podman is gone, has the container restored all the same.
            if not until(lambda: not any(name in (RUNTIME, LOW, "criu") for _, name, _ in processes()), 60):
                show_processes()
            forgotten()
        if c.engine == "ctr" and c.shim == "stock" and fault.struck and fault.who == "client":
            # The daemon may carry out what it was asked for. containerd's shim, without ours in front of it, then waits for a reader
            # of the output, with the lock that everything else needs, for ever: `ctr containers restore` was it.
            readers = []
            for _ in range(10):
                readers += [os.open(fifo, os.O_RDONLY | os.O_NONBLOCK) for fifo in glob.glob(f"/run/containerd/fifo/*/{c.name}-std[oe]*")]
                time.sleep(0.2)
            for reader in readers:
                os.close(reader)
        self.settled()
        self.no_excuse(c)
        return self.code == 0

    def no_excuse(self, c):
        if self.code and not self.fault.excuses() and c.state != "suspended" and not c.unclean and "already exists" not in self.said:
            raise Violation(f"{self.verb} fails without a fault: {short(self.said)} ... {short(self.said)}")

    def do_run(self, c, fault, _):
        open(f"{OUT}/{c.name}/log", "w").close()
        c.mark = 0
        if self.perform(c, fault, *c.create()) and (c.status() == "running" or not fault.struck):
            if c.status() != "running" or not fault.lossy():
                c.state = "running"
                self.running(c, fault)
            else:
                c.remove()
        else:
            c.remove()
            self.settled()

    def running(self, c, fault, after=None):
        """It must run, or the fault excuses it."""
        word = c.status()
        if word == "paused" and fault.what in ("kill", "stop", "other"):
            # An engine whose daemon was killed may have to find it again first.
            answers = []

            def resumed():
                answers.append(run(*unpause(c)))
                return answers[-1][0] == 0 or c.status() == "running"
            until(resumed, 20)
            word = c.status()
            if word == "paused":
                word = f"paused ({short(answers[-1][1])})"
                show_processes()
                show_shims()
        if word != "running":
            if fault.lossy():
                c.remove()
                return False
            raise Violation(f"lost: {c.name} is {word} after {self.verb} with {fault}: {short(self.said)} ... {short(self.said)}")
        if fault.what == "kill" and fault.who == "job":
            try:
                c.goes_on(after, limit=5)
            except Violation:  # one of its processes is missing
                c.remove()
                return False
        else:
            try:
                c.goes_on(after)
            except Violation:
                if not fault.lossy() or c.status() == "running":
                    raise
        if fault.lossy() and fault.who != "job":  # the engine may take it away, now or later, or know it no more
            c.remove()
            return False
        return True

    def checkpoint(self, c, place, leave):
        """The command, and the archive that it is to make."""
        if c.engine == "podman":
            return ["podman", "--runtime", RUNTIME, "container", "checkpoint", *(["--leave-running"] if leave else []),
                    *(["--export", place] if place else []), c.name]
        if c.engine == "docker":
            until(lambda: not run("ctr", "-n", "moby", "content", "ls", "-q")[1], 60)
            return ["docker", "checkpoint", "create", *(["--leave-running"] if leave else []), c.name, place]
        c.imaged = c.made
        return ["ctr", "containers", "checkpoint", "--task", "--image", "--rw", c.name, place]

    def do_leave(self, c, fault, low):
        place = {"podman": self.fresh(), "docker": "cp" + self.fresh()[-5:-4], "ctr": f"localhost/{c.name}:{self.names}"}[c.engine]
        if c.engine == "docker":
            place = f"cp{self.names}"
        was = c.state
        ok = self.perform(c, fault, *self.checkpoint(c, place, True))
        if was == "suspended":
            if ok:
                raise Violation("a checkpoint of a suspended container")
            if os.path.exists(place):  # podman's, which is empty
                os.unlink(place)
            return
        alive = self.running(c, fault)
        if c.engine != "docker":  # docker keeps it with the container
            self.archive(c, "file" if c.engine == "podman" else "image", place, ok, low)

    def do_directory(self, c, fault, low):
        place = self.fresh() + ".ctr"
        ok = self.perform(c, fault, "ctr", "tasks", "checkpoint", "--image-path", place, c.name)
        self.running(c, fault)
        self.archive(c, "file", place, ok, low)

    def archive(self, c, way, place, ok, low):
        """Keeps it if it is complete, and says if one that must be complete is not."""
        there = os.path.exists(place) if way == "file" else place in run("ctr", "images", "ls", "-q")[1].split()
        if ok and not there:
            raise Violation(f"{place} is not there")
        good = there
        if there and way == "file":
            good, said = run("cryopod", "verify", "-q", place)
            good = good == 0
            if ok and not good:
                raise Violation(f"{place} does not verify: {said[-300:]}")
            if there and not good:
                discard(place)
        elif there and not ok:  # a client that was killed afterwards
            good = True
        if good and way == "file" and self.fault.lossy() and self.fault.who == "job":  # it may hold a part of the job
            return discard(place)
        if good:
            if way == "file":
                os.chmod(place, 0o700)
            c.archives.append(Archive(way, place, (low, max(c.at(), low)), c))

    def do_stop(self, c, fault, low):
        if c.engine == "ctr":
            place = (self.fresh(), f"localhost/{c.name}:{self.names}")[1]
            ok = self.perform(c, fault, *self.checkpoint(c, place, False))
            self.archive(c, "image", place, ok, low)
            if self.running(c, fault) and ok:
                c.remove()
            return
        export = c.engine == "podman" and random.Random(f"{self.seed}{low}").random() < 0.5
        place = self.fresh() if export else f"cp{self.names}" if c.engine == "docker" else None
        self.names += 1
        ok = self.perform(c, fault, *self.checkpoint(c, place, False))
        high = c.at()
        word = c.status()
        if export and not ok and os.path.exists(place):  # which podman has not completed
            os.unlink(place)
        if word == "gone" and not fault.lossy():
            if ok and export:
                self.archive(c, "file", place, True, low)
                c.remove()
                return
            if c.engine == "docker" and not ok and self.packed_only_copy(c, low):
                c.remove()
                self.settled()
                return self.proves(c, c.archives[-1], f"after {self.verb} with {fault}")
            # dockerd copies it when the container has ended.
            if "failed to read checkpoint reader" in self.said or "failed to retrieve checkpoint data" in self.said:
                c.remove()
                return
            # Its checkpoint is in the engine's hands, also of a client that was killed afterwards.
            c.state, c.inside = "saved", (place if c.engine == "docker" else True, (low, high))
            if not ok:
                self.restore_now(c)
        elif ok and not fault.lossy():
            raise Violation(f"{c.name} is {word} after a checkpoint that ends it")
        else:
            self.running(c, fault)
            if export and os.path.exists(place):  # of a container whose job was killed
                os.unlink(place)

    def restore_now(self, c):
        """Without a fault it must come back."""
        quiet = Fault(random.Random(0), c, "restore")
        quiet.what = quiet.who = "nothing"
        c.mark = len(c.lines())
        ended = "" if c.engine == "ctr" else run(c.engine, "inspect", "-f", "{{.State.ExitCode}}", c.name)[1]
        for _ in range(2):
            code, said = run(*self.restoring(c))
            self.settled()
            if code == 0:
                break
            if "connection refused" in said:  # dockerd has to find a containerd that was killed
                time.sleep(5)
            if c.engine == "docker" and "already exists" in said:  # which it gave to a containerd that was killed: it does not take that
                collect()
            if c.engine == "podman":  # which takes a container whose client was killed for a running one
                run("podman", "container", "cleanup", c.name)
        else:
            raise Violation(f"lost: {c.name} (exit code {ended}) does not come back after {self.verb} with {self.fault}: {said[-500:]}")
        between, c.state, c.inside = c.inside[1], "running", None
        self.running(c, quiet, between)

    def restoring(self, c):
        if c.engine == "docker":
            return ["docker", "start", "--checkpoint", c.inside[0], c.name]
        return ["podman", "--runtime", RUNTIME, "container", "restore", c.name]

    def do_restore(self, c, fault, _):
        ok = self.perform(c, fault, *self.restoring(c))
        if c.status() in ("running", "paused") and (ok or fault.struck):
            between, c.state, c.inside = c.inside[1], "running", None
            self.running(c, fault, between)
        elif ok and not fault.lossy():
            raise Violation(f"{c.name} is {c.status()} after a restore that succeeded")
        elif ok and c.engine == "podman" or fault.lossy() and fault.who == "engine-remove":
            c.remove()  # it was killed after its restore, whose checkpoint podman has removed; or its user removed it
        else:
            self.restore_now(c)

    def do_export(self, c, fault, low, leave=True):
        place = self.fresh()
        source = "oci-archive:" + place
        c.imaged = c.made
        ok = self.perform(c, fault, "cryopod", "export", c.name, "-e", {"ctr": "containerd"}.get(c.engine, c.engine), "-o", source,
                          *(["--leave-running"] if leave else []), "-q")
        word = c.status()
        self.archive(c, "file", place, ok, low)
        if not ok:
            self.kept(c, place, low)
        if leave or word != "gone" or fault.lossy():
            self.running(c, fault)
        elif ok or (c.archives and c.archives[-1].place == place):
            c.remove()
        else:  # podman still has the checkpoint
            c.inside = (place, (low, c.at()))
            self.restore_now(c)

    def kept(self, c, place, low):
        """What an export that failed has kept is complete if it says so, and can be packed; the user then removes it."""
        for name in os.listdir(CP):
            if name.startswith(".cryopod-checkpoint-"):
                for inside in os.listdir(f"{CP}/{name}"):
                    # The first refuses what has nothing in a store.
                    if any(run("cryopod", verb, f"{CP}/{name}/{inside}", "-o", "oci-archive:" + place, "-q")[0] == 0 for verb in ("bundle", "pack")):
                        print(f"    packed what is kept: {name}/{inside}")
                        self.archive(c, "file", place, True, low)
                        break
                else:
                    if "is kept in" in self.said and name in self.said:
                        raise Violation(f"what is kept cannot be packed: {os.listdir(f'{CP}/{name}')}: {read('/tmp/said')[-300:]}")
                shutil.rmtree(f"{CP}/{name}")

    def packed_only_copy(self, c, low):
        """What the shim keeps of a checkpoint that ended its container, and that containerd did not pack."""
        task = run("docker", "inspect", "-f", "{{.Id}}", c.name)[1].strip()
        named = []

        def kept():
            log = read("/var/log/cryopod-on-stop.log")
            named[:] = filter(os.path.exists, re.findall(rf"(/tmp/ctrd-checkpoint\d+): the only checkpoint of {task}", log))
            return named
        if not until(kept, 5):
            return False
        place = self.fresh()
        if not any(run("cryopod", verb, named[-1], "-o", "oci-archive:" + place, "-q")[0] == 0 for verb in ("bundle", "pack")):
            raise Violation(f"the only copy cannot be packed: {os.listdir(named[-1])}: {read('/tmp/said')[-300:]}")
        print(f"    packed the only copy: {named[-1]}")
        shutil.rmtree(named[-1])
        self.archive(c, "file", place, True, low)
        return True

    def do_export_stop(self, c, fault, low):
        self.do_export(c, fault, low, c.engine != "podman")

    def importing(self, c, archive):
        """Commands that make the container of the archive."""
        if archive.way == "image":
            c.imaged = c.made
            return [["ctr", "containers", "restore", "--rw", "--live", c.name, archive.place]]
        if c.engine == "podman":
            if archive.place.endswith(".tar") and read_type(archive.place) == "podman":
                return [["podman", "--runtime", RUNTIME, "container", "restore", "--import", archive.place]]
            return [["cryopod", "import", archive.place, "-e", "podman", "--restore", "-q"]]
        if c.engine == "ctr":  # `ctr containers restore` wants ctr's own
            return [c.create(archive.place)]
        return [["docker", "create", *[w for w in c.create()[2:] if w != "-d"]],
                ["cryopod", "import", archive.place, "-e", "docker", "--container", c.name, "--name", "moved", "-q"],
                ["docker", "start", "--checkpoint", "moved", c.name]]

    def imported(self, c, archive, fault):
        """Exit code of all commands; the fault strikes one of them."""
        fault.begin(c)
        try:
            for command in self.importing(c, archive):
                self.code, self.said = run(*command)
                if self.code:
                    break
        finally:
            fault.end()
        if self.code == 124:
            raise Violation(f"the import of {archive.place} does not end: {short(self.said)}")
        self.settled()
        return self.code == 0

    def do_import(self, c, fault, _):
        archive = c.archives[-1]
        c.mark = len(c.lines())
        ok = self.imported(c, archive, fault)
        self.no_excuse(c)
        self.come_back(c, archive, fault, ok)

    def come_back(self, c, archive, fault, ok):
        if ok or (c.status() in ("running", "paused") and fault.struck and len(c.lines()) > c.mark):
            c.state = "running"
            if self.running(c, fault, archive.between):
                archive.shown = True
            return
        c.remove()
        self.settled()
        self.proves(c, archive, f"after {self.verb} with {fault}: {short(self.said)}")

    def proves(self, c, archive, when):
        """An archive that is complete restores, without a fault; the container stays."""
        code, said, verb = self.code, self.said, self.verb
        quiet = Fault(random.Random(0), c, "restore")
        quiet.what = quiet.who = "nothing"
        for _ in range(2):
            c.mark = len(c.lines())
            if self.imported(c, archive, quiet):
                break
            again = self.said
            if "connection refused" in again:  # dockerd has to find a containerd that was killed
                time.sleep(5)
            c.remove()
            self.settled()
        else:
            raise Violation(f"{archive.place} is complete and is not restored {when}: {again[-500:]}")
        self.code, self.said, self.verb = code, said, verb
        c.state, archive.shown = "running", True
        self.running(c, quiet, archive.between)

    def do_copy(self, c, fault, _):
        archive = c.archives[-1]
        if archive.way != "file":
            return self.do_import(c, fault, _)
        c.mark = len(c.lines())
        ok = self.perform(c, fault, *c.create(archive.place))
        if not ok and not fault.struck:
            raise Violation(f"no copy: {short(self.said)} ... {short(self.said)}")
        self.come_back(c, archive, fault, ok)

    def do_kill(self, c, fault, _):
        command = {"podman": ["podman", "rm", "-f", "-t", "0"], "docker": ["docker", "rm", "-f"], "ctr": ["ctr", "tasks", "delete", "-f"]}
        fault.begin(c)
        self.code, self.said = run(*command[c.engine], c.name)
        fault.end()
        revive()
        c.unclean |= self.code != 0  # podman forgets a container whose low-level runtime still has a record of it
        c.remove()
        self.settled()

    def do_prune(self, c, fault, _):
        self.perform(c, fault, "cryopod", "store", "prune", "--unused", "-q")
        self.running(c, fault)

    def do_suspend(self, c, fault, low):
        to = self.fresh() + ".d" if low % 2 else None
        ok = self.perform(c, fault, "cryopod", "suspend", c.name, "-q", *(["--to", to] if to else []))
        unsure = fault.lossy() or fault.what == "other" and fault.struck
        if ok and not unsure:
            before = len(c.lines())
            time.sleep(0.3)
            if len(c.lines()) > before + 1:
                raise Violation(f"{c.name} is suspended and goes on")
            c.state = "suspended"
        elif unsure:
            if ok:
                run("cryopod", "resume", c.name, "-q")
            self.running(c, fault)
        else:
            try:
                c.goes_on(limit=20)
            except Violation:
                self.resumed(c)

    def resumed(self, c):
        code, said = run("cryopod", "resume", c.name, "-q")
        self.settled()
        try:
            c.goes_on()
        except Violation as violation:
            raise Violation(f"{violation}, after {self.verb} with {self.fault}: {self.said[-200:]}; resume: {code} {said[-400:]}") from None
        c.state = "running"

    def do_resume(self, c, fault, _):
        ok = self.perform(c, fault, "cryopod", "resume", c.name, "-q")
        if fault.lossy() or fault.what == "other" and fault.struck:
            if c.status() == "running":
                code, _ = run("cryopod", "resume", c.name, "-q")
            c.state = "running"
            self.running(c, fault)
        elif ok:
            c.state = "running"
            self.running(c, fault)
        else:  # one of several processes may run already
            self.resumed(c)

    # the end
    def close(self):
        for c in self.containers:
            self.verb, self.fault = "the end", "no fault"
            if c.state == "saved":
                self.restore_now(c)
            c.remove()
            self.settled()
            for archive in c.archives:
                if not archive.shown:
                    self.proves(c, archive, "at the end")
                    c.remove()
                    self.settled()
            for archive in c.archives:
                if archive.way == "file":
                    discard(archive.place)
                else:
                    must("ctr", "images", "rm", "--sync", archive.place)
            shutil.rmtree(f"{OUT}/{c.name}")
        if "ctr" in ENGINES:
            for image in set(run("ctr", "images", "ls", "-q")[1].split()) - baseline["images"]:
                must("ctr", "images", "rm", "--sync", image)
        for name in os.listdir(CP):
            if name.endswith(".d"):  # of a container that was removed while it was suspended into files
                shutil.rmtree(f"{CP}/{name}")
        if self.unclean:
            # Of an export that was killed: its directory is no place in which the store looks.
            for entry in json.loads(run("cryopod", "store", "ls", "--json")[1] or "[]"):
                run("cryopod", "store", "prune", os.path.basename(entry["path"]), "-q")
        sweep()
        must("cryopod", "cache", "prune", "--unused-for", "0", "-q")
        # containerd collects later what its last image has kept.
        def left():  # a killed shim of containerd's own leaves its socket
            run("cryopod", "store", "prune", "--unused", "-q")
            for entry in leftovers() if self.shim_killed else []:  # in the next round, too
                if entry.startswith("file /run/containerd/s/"):
                    os.unlink(entry.removeprefix("file "))
            return leftovers()
        until(lambda: not left(), 40)
        if found := left():
            raise Violation(f"left at the end: {found[:8]}")


def discard(path):
    shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


def read_type(path):
    return "podman" if "config.dump" in subprocess.run(["tar", "-tf", path], capture_output=True, text=True, check=False).stdout else "oci"


# ---- what the bed looks like ----
baseline = {"pids": set(), "images": set()}
WATCHED = ["/tmp", "/var/tmp", "/run", "/run/cryopod", "/var/lib/cryopod", "/var/lib/cryopod/store", "/var/cache/cryopod", CP, OUT, "/dev/shm",
           "/var/lib/containers/storage", "/var/lib/containers/storage/overlay-containers", "/run/containers/storage/overlay-containers",
           "/run/crun", "/run/runc", "/run/containerd/runc/default", "/run/containerd/s", "/run/docker/runtime-runc/moby",
           "/run/containerd/io.containerd.runtime.v2.task/default", "/run/containerd/io.containerd.runtime.v2.task/moby", "/run/netns",
           "/var/lib/docker/containers", "/run/libpod", "/run/libpod/exits"]


def picture():
    """What must be at the end as at the beginning."""
    seen = {f"mount {line.split(' ', 2)[2].split(' - ')[0].split(' ', 2)[2]}" for line in read("/proc/self/mountinfo").strip().split("\n")}
    for root, directories, _ in os.walk("/sys/fs/cgroup"):
        seen |= {f"cgroup {root}/{name}" for name in directories}
    for place in WATCHED:
        if os.path.isdir(place):
            seen |= {f"file {place}/{name}" for name in os.listdir(place)}
    status = json.loads(subprocess.run([*CTL, "status"], capture_output=True, text=True, check=True).stdout)
    seen |= {f"GPU memory of {pid}" for gpu in status["gpus"] for pid in gpu["pids"]}
    for pid, name, line in processes():
        try:
            seen |= {f"namespace {kind}" for kind in (os.readlink(f"/proc/{pid}/ns/{n}") for n in ("net", "mnt", "ipc", "pid", "uts"))}
        except OSError:
            pass
    return seen


# The engines' own: a daemon that was killed leaves its directories, podman its lock files.
ENGINES_OWN = re.compile(r"^file /tmp/(ctrd-checkpoint|checkpoint\d|containerd-mount|said|libpod|storage-run|podman)|^file /var/tmp/(checkpoint\d|libpod|container_images|buildah|storage|checkpoint\d)"
                         r"|^file /run/(crun|runc|containerd|docker|libpod|containers|user|lock)$|^file /run/(criu.kdat|cryopod-transfers)$|^file /run/libpod/exits/|^file /dev/shm/libpod|^file /var/lib/containers/storage/secrets$|^file /var/lib/cryopod/(store|metrics.json|metrics.lock)$|^namespace ")


def leftovers():
    now = picture()
    return sorted(entry for entry in now - baseline["picture"] if not ENGINES_OWN.match(entry)) + sorted(
        f"missing: {entry}" for entry in baseline["picture"] - now if entry.startswith("mount"))


def collect():
    """Has containerd collect what nothing refers to."""
    run("ctr", "leases", "create", "--id", "collect")
    run("ctr", "leases", "rm", "--sync", "collect")


def sweep():
    """What a killed operation left, the next one removes."""
    if "ctr" in ENGINES:
        for space in ("default", "moby"):
            for lease in run("ctr", "-n", space, "leases", "ls", "-q")[1].split():
                run("ctr", "-n", space, "leases", "rm", "--sync", lease)
        collect()
    if STOCK:
        return
    c = Container("sweep", "podman", "gpu1", "")
    must(*c.create())
    if not until(lambda: c.at() > 1):
        raise Violation("the last container does not run")
    must("cryopod", "export", "sweep", "-e", "podman", "-o", f"oci-archive:{CP}/sweep.tar", "--leave-running", "-q")
    os.unlink(f"{CP}/sweep.tar")
    must("podman", "--runtime", RUNTIME, "container", "checkpoint", "--export", f"{CP}/sweep.tar", "sweep")
    c.remove()
    must("cryopod", "import", f"{CP}/sweep.tar", "-e", "podman", "--restore", "-q")
    must("cryopod", "suspend", "sweep", "-q")
    must("cryopod", "resume", "sweep", "-q")
    c.remove()
    os.unlink(f"{CP}/sweep.tar")
    shutil.rmtree(f"{OUT}/sweep")


def prepare():
    if "ctr" in ENGINES:
        daemon_up("containerd")
        for image in ("busybox", "glibc"):
            must("ctr", "images", "import", f"/tmp/{image}.oci")
        baseline["images"] = set(must("ctr", "images", "ls", "-q").split())
        daemon_up("dockerd")
        must("docker", "import", "/usr/local/share/testbed/busybox.tar", "busybox")
        must("docker", "import", "/tmp/glibc.tar", "glibc")
    open("/tmp/said", "w").close()
    for engine in ENGINES:  # the engines make their directories and cgroups
        c = Container("warm", engine, "counter", "ours")
        must(*c.create())
        c.remove()
    baseline["pids"] = {pid for pid, name, _ in processes() if pid not in {d.pid for d in daemons.values()}}
    baseline["picture"] = set()
    sweep()
    time.sleep(0.5)
    shutil.rmtree(f"{OUT}/warm")
    baseline["picture"] = picture()


def main():
    prepare()
    total = [0, 0, 0]
    for seed in range(SEED, SEED + ROUNDS):
        one, number = Round(seed), 0
        print(f"seed {seed}: " + ", ".join(f"{c.name} {c.engine} {c.kind}" for c in one.containers), flush=True)
        try:
            for number in range(OPERATIONS):
                if ONLY is None or number in ONLY:
                    one.operation(number)
            number = OPERATIONS
            one.close()
        except Violation as violation:
            print(f"campaign: {total[0] + one.counts[0]} operations, {total[1] + one.counts[1]} faults, {total[2] + one.counts[2]} failed, 1 violations")
            if "left" in str(violation):
                for command in (["cryopod", "store", "ls"], ["ctr", "images", "ls"], ["ctr", "content", "ls"], ["ctr", "leases", "ls"]):
                    print(f"    {' '.join(command)}: {run(*command)[1]}")
            print(f"VIOLATION seed {seed} operation {number}: {violation}", flush=True)
            sys.stdout.flush()
            os._exit(1)
        total = [a + b for a, b in zip(total, one.counts)]
    print(f"campaign: {total[0]} operations, {total[1]} faults, {total[2]} failed, 0 violations", flush=True)
    for name in ("dockerd", "containerd"):
        if name in daemons:
            daemons[name].terminate()
            daemons[name].wait()


if __name__ == "__main__":
    main()
