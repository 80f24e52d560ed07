"""soak.py LOW ENGINES CYCLES: checkpoints and restores two GPU containers again and again, and measures all that lives long.

The first goes on at each checkpoint: its shims and its processes live through all of them. The second ends, and comes back. Prints
a line of numbers every tenth cycle, and at the end how much each grows in 100 cycles: least squares over the second half. Fails if a
count grows, or the memory of cryopod's shim or the container by more than a tenth."""
import os
import subprocess
import sys

import campaign
from campaign import Container, must, processes, read, run

CYCLES = int(sys.argv[3])
SIZES = ["/run/cryopod", "/var/lib/cryopod", "/var/cache/cryopod", "/var/lib/containerd", "/var/lib/docker", "/tmp"]


def memory(pid):
    """KiB that no other process shares."""
    return sum(int(line.split()[1]) for line in read(f"/proc/{pid}/smaps_rollup").split("\n") if line.startswith("Private_"))


def measured(stays):
    seen = {}
    pids = {"containerd": campaign.daemons["containerd"].pid, "dockerd": campaign.daemons["dockerd"].pid,
            "container": int(must("docker", "inspect", "-f", "{{.State.Pid}}", stays.name))}
    ident = must("docker", "inspect", "-f", "{{.Id}}", stays.name)
    for pid, _, line in processes():
        if ident in line and "-shim-" in line:
            pids["shim" if "cryopod-v2" in line or not os.path.exists(f"/proc/{pid}/exe") else "containerd's shim"] = pid
    for name, pid in pids.items():
        seen[f"{name} KiB"] = memory(pid)
        seen[f"{name} descriptors"] = len(os.listdir(f"/proc/{pid}/fd"))
        seen[f"{name} mounts"] = read(f"/proc/{pid}/mountinfo").count("\n")
    seen["processes"] = len(list(processes()))
    seen["cgroups"] = sum(len(dirs) for _, dirs, _ in os.walk("/sys/fs/cgroup"))
    seen["leases"] = len(run("ctr", "-n", "moby", "leases", "ls", "-q")[1].split())
    seen["contents"] = len(run("ctr", "-n", "moby", "content", "ls", "-q")[1].split())
    for place in SIZES:
        seen[f"{place} files"] = sum(len(files) for _, _, files in os.walk(place))
        if place == "/tmp":  # has the daemons' logs
            continue
        seen[f"{place} KiB"] = int(subprocess.run(["du", "-skx", place], capture_output=True, text=True, check=False).stdout.split("\t")[0] or 0)
    return seen


def slope(points):
    """Of y over x."""
    n = len(points)
    x, y = sum(p[0] for p in points) / n, sum(p[1] for p in points) / n
    return sum((a - x) * (b - y) for a, b in points) / (sum((a - x) ** 2 for a, _ in points) or 1)


def main():
    campaign.prepare()
    stays, moves = Container("stays", "docker", "gpu1", "ours"), Container("moves", "docker", "gpu-threads", "ours")
    for c in (stays, moves):
        must(*c.create())
        campaign.until(lambda c=c: c.at() > 1)
    table = []
    for cycle in range(1, CYCLES + 1):
        must("docker", "checkpoint", "create", "--leave-running", stays.name, "kept")
        must("docker", "checkpoint", "rm", stays.name, "kept")
        must("docker", "checkpoint", "create", moves.name, "left")
        campaign.until(lambda: moves.status() == "gone")
        must("docker", "start", "--checkpoint", "left", moves.name)
        must("docker", "checkpoint", "rm", moves.name, "left")
        if cycle % 10 == 0:
            for c in (stays, moves):
                c.goes_on()
            campaign.until(lambda: not run("ctr", "-n", "moby", "content", "ls", "-q")[1], 30)
            table.append((cycle, measured(stays)))
            if cycle == 10:
                print("cycle", *(name.replace(" ", "_") for name in table[0][1]), sep="\t")
            print(cycle, *table[-1][1].values(), sep="\t", flush=True)
    grows = []
    half = table[len(table) // 2:]
    for name in half[0][1]:
        points = [(cycle, seen[name]) for cycle, seen in half if name in seen]
        each = slope(points) * 100
        added = slope(points) * (points[-1][0] - points[0][0])
        print(f"{name}: {points[0][1]} to {points[-1][1]}, {each:+.2f} in 100 cycles")
        size = name.endswith("KiB")
        if added > (points[0][1] / 10 + 256 if size else 2) and not name.startswith(("dockerd KiB", "containerd KiB", "containerd's")):
            grows.append(name)
    for c in (stays, moves):
        c.remove()
    print(f"soak: {CYCLES} cycles, {len(grows)} grow" + "".join(f", {name}" for name in grows))
    sys.stdout.flush()
    os._exit(bool(grows))


main()
