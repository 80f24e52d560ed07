"""soak.py LOW ENGINES CYCLES MANY: checkpoints and restores two GPU containers again and again, and measures all that lives long.

The first goes on at each checkpoint: its shims and its processes live through all of them. The second ends, and comes back; with
MANY (1) each cycle removes it and makes another, and the first is checkpointed in each tenth. Prints a line of numbers every tenth
cycle (MANY: fiftieth), and at the end how much each grows in 100 cycles: least squares over the second half. Fails if a count grows,
or the memory of cryopod's shim or the container by more than a tenth."""
import os
import sys

import campaign
from campaign import Container, must, processes, read, run
from growth import files_in, kib_of, memory, report

CYCLES, MANY = int(sys.argv[3]), sys.argv[4] == "1"
SIZES = ["/run/cryopod", "/var/lib/cryopod", "/var/cache/cryopod", "/var/lib/containerd", "/var/lib/docker", "/tmp"]


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
    seen["cgroups"] = files_in("/sys/fs/cgroup", directories=True)
    seen["leases"] = len(run("ctr", "-n", "moby", "leases", "ls", "-q")[1].split())
    seen["contents"] = len(run("ctr", "-n", "moby", "content", "ls", "-q")[1].split())
    for place in SIZES:
        seen[f"{place} files"] = files_in(place)
        if place == "/tmp":  # has the daemons' logs
            continue
        seen[f"{place} KiB"] = kib_of(place)
    return seen


def begin(container):
    must(*container.create())
    campaign.until(lambda: container.at() > 1)


def main():
    campaign.prepare()
    stays, moves = Container("stays", "docker", "gpu1", "ours"), Container("moves", "docker", "gpu-threads", "ours")
    for c in (stays, moves):
        begin(c)
    table = []
    for cycle in range(1, CYCLES + 1):
        if not MANY or cycle % 10 == 0:
            must("docker", "checkpoint", "create", "--leave-running", stays.name, "kept")
            must("docker", "checkpoint", "rm", stays.name, "kept")
        must("docker", "checkpoint", "create", moves.name, "left")
        campaign.until(lambda: moves.status() == "gone")
        must("docker", "start", "--checkpoint", "left", moves.name)
        must("docker", "checkpoint", "rm", moves.name, "left")
        if MANY:
            moves.goes_on()
            moves.remove()
            moves = Container(f"moves-{cycle}", "docker", "gpu-threads", "ours")
            begin(moves)
        if cycle % (50 if MANY else 10) == 0:
            for c in (stays, moves):
                c.goes_on()
            campaign.until(lambda: not run("ctr", "-n", "moby", "content", "ls", "-q")[1], 30)
            table.append((cycle, measured(stays)))
            if len(table) == 1:
                print("cycle", *(name.replace(" ", "_") for name in table[0][1]), sep="\t")
            print(cycle, *table[-1][1].values(), sep="\t", flush=True)
    for c in (stays, moves):
        c.remove()
    grows = report(f"{CYCLES} cycles", table, ("dockerd KiB", "containerd KiB", "containerd's"))
    sys.stdout.flush()
    os._exit(bool(grows))


main()
