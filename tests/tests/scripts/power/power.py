"""power.py SEED CUTS [OPERATION]: cuts the power at random points of an operation, CUTS times, and looks at what is left.

A cut is EXT4_IOC_SHUTDOWN without a flush of the log, as xfstests' godown does it: what is neither written nor committed is gone,
and all that comes later fails. The image of the file system is copied then, mounted, which replays its journal, and

- what the operation has called done before the cut is there;
- whatever has its final name (a directory: its cryopod.json) verifies, and a container is created from it, with right sums;
- what was there before verifies;
- the same operation succeeds now.

Mount options that write metadata before data, and another process that syncs its own file all the time, make the worst of it.
A violation is a line `VIOLATION cut N: ...`, and makes the exit code 1."""
import fcntl
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time

SEED, CUTS, ALONE = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
SHUTDOWN, NO_LOG_FLUSH = 0x8004587D, (2).to_bytes(4, "little")
OPTIONS = ["defaults", "commit=1", "data=writeback,noauto_da_alloc,commit=1", "nodelalloc,data=writeback,noauto_da_alloc,commit=1"]
LIBRARIES = ["/usr/lib/x86_64-linux-gnu:/lib/x86_64-linux-gnu", "/usr/lib64:/lib64"]
GPU_NODES = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidia1"]
PROGRAM = "exec /cusim/cusim-client --mib 40 >> /out/log 2>&1"


class Violation(Exception):
    pass


def run(*command, limit=120):
    with open("/tmp/said", "w+") as said:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True)
        try:
            code = child.wait(limit)
        except subprocess.TimeoutExpired:
            code = 124
            os.killpg(child.pid, 9)
            child.wait()
    with open("/tmp/said", errors="replace") as said:
        return code, said.read().strip()[-700:]


def must(*command):
    code, said = run(*command)
    if code:
        raise Violation(f"{' '.join(command)}: {code}: {said}")
    return said


def until(condition, limit=40):
    end = time.monotonic() + limit
    while not (got := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return got


def create(name, source=None):
    os.makedirs(f"/srv/out/{name}", exist_ok=True)
    open(f"/srv/out/{name}/log", "w").close()
    binds = [f"/srv/out/{name}:/out", "/run/cusim:/run/cusim", "/opt/cusim:/cusim", *LIBRARIES]
    return ["podman", "--runtime", "cryopod-runtime", "run", "-d", "--name", name, "--network", "none", "-e", "LD_LIBRARY_PATH=/cusim",
            *(f"--device={n}" for n in GPU_NODES), *(f"--volume={b}" for b in binds),
            *(["--annotation", f"dev.cryopod.restore={source}"] if source else []), "localhost/busybox", "sh", "-c", PROGRAM]


def lines(name):
    with open(f"/srv/out/{name}/log") as log:
        return log.read().split("\n")[:-1]


def goes_on(name):
    start = len(lines(name))
    if not until(lambda: len(lines(name)) >= start + 3):
        raise Violation(f"{name} stands still")
    if wrong := [line for line in lines(name) if " ok" not in line]:
        raise Violation(f"{name} has wrong sums: {wrong[0]}")


def remove(name):
    run("podman", "rm", "-f", "-t", "0", name)


def comes_back(place):
    """A container is created from it and goes on."""
    must(*create("copy", place))
    goes_on("copy")
    remove("copy")


# Each makes /cut/new, or changes what is there.
OPERATIONS = {
    "checkpoint": lambda: ["cryopod-runtime", "checkpoint", "--leave-running", "--image-path", "/cut/new", ID],
    "export": lambda: ["cryopod", "export", "job", "-e", "podman", "-o", "oci-archive:/cut/new", "--leave-running", "-q"],
    "export to a layout": lambda: ["cryopod", "export", "job", "-e", "podman", "-o", "oci:/cut/new", "--leave-running", "-q"],
    "pack": lambda: ["cryopod", "pack", "/cut/whole", "-o", "oci-archive:/cut/new", "-q"],
    "pack to a layout": lambda: ["cryopod", "pack", "/cut/whole", "-o", "oci:/cut/new", "-q"],
    "unpack": lambda: ["cryopod", "unpack", "/cut/archive", "-o", "/cut/new", "-q"],
    "bundle": lambda: ["cryopod", "bundle", "/cut/stored", "-o", "oci-archive:/cut/new", "-q"],
    "bundle in place": lambda: ["cryopod", "bundle", "--in-place", "/cut/stored", "-q"],
    "prune": lambda: ["cryopod", "store", "prune", "--unused", "-q"],
    "cache fill": lambda: create("copy", "/cut/archive"),
    "cache prune": lambda: ["cryopod", "cache", "prune", "--unused-for", "0", "-q"],
}
took = {}
BEFORE = ["/cut/whole", "/cut/stored", "/cut/archive"]


def complete(place):
    return os.path.exists(f"{place}/cryopod.json" if LAST == "checkpoint" else place)


def prepare():
    """What is there before each cut: a checkpoint of files, one with an entry in the store, an archive, an unused entry."""
    global ID
    shutil.copy("/power/empty.img", "/power/base.img")
    must("mount", "-o", "loop", "/power/base.img", "/cut")
    os.mkdir("/cut/store", 0o700)
    must(*create("job"))
    until(lambda: len(lines("job")) > 2)
    ID = must("podman", "inspect", "-f", "{{.Id}}", "job")
    for name, archive in (("stored", None), ("unused", None), ("whole", "archive"), ("second", "cached")):
        must("cryopod-runtime", "checkpoint", "--leave-running", "--image-path", f"/cut/{name}", ID)
        if archive:
            must("cryopod", "bundle", "--in-place", f"/cut/{name}", "-q")
            must("cryopod", "pack", f"/cut/{name}", "-o", f"oci-archive:/cut/{archive}", "-q")
    comes_back("/cut/cached")
    shutil.rmtree("/cut/unused")
    must("umount", "/cut")


def mount(image, options="defaults"):
    must("mount", "-o", f"loop,{options}", image, "/cut")


def cut(number):
    global LAST
    rng = random.Random(f"{SEED}/{number}")
    LAST = rng.choice(ALONE or list(OPERATIONS))
    options, noise, point = rng.choice(OPTIONS), rng.random() < 0.5, rng.choice([rng.random(), 0.7 + 0.4 * rng.random()])
    shutil.copy("/power/base.img", "/power/run.img")
    mount("/power/run.img", options)
    try:
        if LAST not in took:
            began = time.monotonic()
            must(*OPERATIONS[LAST]())
            took[LAST] = time.monotonic() - began
            remove("copy")
            must("umount", "/cut")
            shutil.copy("/power/base.img", "/power/run.img")
            mount("/power/run.img", options)
        over, top = threading.Event(), os.open("/cut", os.O_RDONLY)

        def sync():
            while not over.is_set():
                try:
                    with open("/cut/noise", "a") as file:
                        file.write("x")
                        os.fsync(file.fileno())
                except OSError:
                    return
                time.sleep(0.01)
        if noise:
            threading.Thread(target=sync).start()
        pause = point * took[LAST]
        result = {}

        def strike():
            time.sleep(pause)
            result["done"] = "code" in result and result["code"] == 0
            fcntl.ioctl(top, SHUTDOWN, NO_LOG_FLUSH)
        striker = threading.Thread(target=strike)
        striker.start()
        code, said = run(*OPERATIONS[LAST]())
        result["code"] = code
        striker.join()
        over.set()
        os.close(top)
        print(f"{number}: {LAST}, {options}{', syncs' if noise else ''}, cut at {pause * 1000:.0f} of {took[LAST] * 1000:.0f} ms: {code}", flush=True)
        if code == 124:
            raise Violation(f"{LAST} does not end: {said}")
        remove("copy")
        goes_on("job")
    finally:
        shutil.copy("/power/run.img", "/power/after.img")
        run("umount", "-l", "/cut")
    mount("/power/after.img")
    try:
        after(result["done"], said)
    except Violation as violation:
        raise Violation(f"{violation}\n    there: {sorted(os.listdir('/cut'))} {os.path.isdir('/cut/new') and sorted(os.listdir('/cut/new'))}") from None
    finally:
        remove("copy")
    must("umount", "/cut")


def after(done, said):
    makes = not re.search("prune|cache|in place", LAST)
    if makes and done and not complete("/cut/new"):
        raise Violation("it was called done and is not there")
    if makes and complete("/cut/new"):
        must("cryopod", "verify", "-q", "/cut/new")
        comes_back("/cut/new" if LAST != "unpack" else "/cut/archive")
    if done and LAST == "bundle in place" and os.path.exists("/cut/stored/cryopod-store.json"):
        raise Violation("it was called done and refers to the store")
    for place in BEFORE:
        must("cryopod", "verify", "-q", place)
    comes_back("/cut/archive")
    comes_back("/cut/stored")
    if os.path.isdir("/cut/new"):
        shutil.rmtree("/cut/new")
    elif os.path.exists("/cut/new"):
        os.unlink("/cut/new")
    if LAST != "bundle in place" or os.path.exists("/cut/stored/cryopod-store.json"):  # or it is done
        must(*OPERATIONS[LAST]())
    remove("copy")
    if makes:
        must("cryopod", "verify", "-q", "/cut/new")
    comes_back("/cut/stored")


def main():
    counts, violations = {}, 0
    prepare()
    for number in range(CUTS):
        try:
            cut(number)
        except Violation as violation:
            print(f"VIOLATION cut {number}: {LAST}: {violation}", flush=True)
            violations += 1
            run("umount", "-l", "/cut")
        counts[LAST] = counts.get(LAST, 0) + 1
    print(f"power: {CUTS} cuts ({', '.join(f'{name} {n}' for name, n in sorted(counts.items()))}), {violations} violations", flush=True)
    sys.exit(violations > 0)


main()
