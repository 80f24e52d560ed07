"""cycles.py LOW ENGINES CYCLES: checkpoints a container with GPU memory and restores it, again and again, by cryopod-runtime alone,
and measures the container and the host.

Prints a line of numbers every hundredth cycle, and at the end how much each grows, as soak.py does. Fails if something grows, or a
sum is wrong."""
import json
import os
import subprocess
import sys

from campaign import GPU_NODES, Container, must, processes, read, until
from growth import files_in, kib_of, memory, report

LOW, CYCLES = sys.argv[1], int(sys.argv[3])
BUNDLE, IMAGES = "/srv/cp/bundle", "/srv/cp/images"
PLACES = ["/run/cryopod", "/var/lib/cryopod", "/var/cache/cryopod", f"/run/{LOW}", "/srv/cp"]


def bundle(container):
    os.makedirs(f"{BUNDLE}/rootfs")
    must("tar", "-C", f"{BUNDLE}/rootfs", "-xf", "/usr/local/share/testbed/busybox.tar")
    must(LOW, "spec", "--bundle", BUNDLE)
    spec = json.loads(read(f"{BUNDLE}/config.json"))
    spec["root"]["readonly"] = False
    spec["process"] |= {"terminal": False, "args": container.program(), "env": spec["process"]["env"] + ["LD_LIBRARY_PATH=/cusim"]}
    for bind in container.binds():
        source, target = bind.split(":")
        spec["mounts"].append({"source": source, "destination": target, "type": "bind", "options": ["rbind", "rw"]})
    spec["linux"]["devices"] = [
        {"path": node, "type": "c", "major": os.major(os.stat(node).st_rdev), "minor": os.minor(os.stat(node).st_rdev), "fileMode": 0o666}
        for node in GPU_NODES]
    spec["linux"]["resources"] = {"devices": [{"allow": True, "access": "rwm"}]}
    with open(f"{BUNDLE}/config.json", "w", encoding="utf-8") as file:
        json.dump(spec, file)


def cryopod(*words):
    """Its output goes to a file: a restored process keeps it."""
    with open("/tmp/cryopod.said", "w", encoding="utf-8") as said:
        done = subprocess.run(["cryopod-runtime", *words], stdin=subprocess.DEVNULL, stdout=said, stderr=said, timeout=240, check=False)
    if done.returncode:
        sys.exit(f"cryopod-runtime {words}: {done.returncode}: {read('/tmp/cryopod.said')[-2000:]}")


def measured():
    cryopod("state", "cycles")
    pid = json.loads(read("/tmp/cryopod.said"))["pid"]
    seen = {"container KiB": memory(pid), "container descriptors": len(os.listdir(f"/proc/{pid}/fd")),
            "container mounts": read(f"/proc/{pid}/mountinfo").count("\n"), "host mounts": read("/proc/self/mountinfo").count("\n"),
            "processes": len(list(processes())), "cgroups": files_in("/sys/fs/cgroup", directories=True)}
    for place in PLACES:
        seen |= {f"{place} files": files_in(place), f"{place} KiB": kib_of(place)}
    return seen


def main():
    container = Container("cycles", "podman", "gpu1", "ours")
    bundle(container)
    cryopod("run", "--detach", "--bundle", BUNDLE, "cycles")
    until(lambda: container.at() > 1)
    table = []
    for cycle in range(1, CYCLES + 1):
        cryopod("checkpoint", "--image-path", IMAGES, "--work-path", "/srv/cp", "cycles")
        cryopod("delete", "--force", "cycles")
        cryopod("restore", "--detach", "--bundle", BUNDLE, "--image-path", IMAGES, "--work-path", "/srv/cp", "cycles")
        must("rm", "-r", IMAGES)
        if cycle % 100 == 0:
            container.goes_on()
            table.append((cycle, measured()))
            if cycle == 100:
                print("cycle", *(name.replace(" ", "_") for name in table[0][1]), sep="\t")
            print(cycle, *table[-1][1].values(), sep="\t", flush=True)
    cryopod("delete", "--force", "cycles")
    sys.exit(report(f"{CYCLES} cycles", table))


main()
