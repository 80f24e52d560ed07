"""How much what a soak measures grows with its cycles."""
import os
import subprocess

from campaign import read


def memory(pid):
    """KiB that no other process shares."""
    return sum(int(line.split()[1]) for line in read(f"/proc/{pid}/smaps_rollup").split("\n") if line.startswith("Private_"))


def files_in(place, directories=False):
    return sum(len(dirs if directories else files) for _, dirs, files in os.walk(place))


def kib_of(place):
    return int(subprocess.run(["du", "-skx", place], capture_output=True, text=True, check=False).stdout.split("\t")[0] or 0)


def slope(points):
    """Of y over x."""
    n = len(points)
    x, y = sum(p[0] for p in points) / n, sum(p[1] for p in points) / n
    return sum((a - x) * (b - y) for a, b in points) / (sum((a - x) ** 2 for a, _ in points) or 1)


def report(what, table, others=()):
    """Prints how much each number grows in 100 cycles: least squares over the second half. True: a count grows, or by more than a
    tenth the memory of what is not one of `others`."""
    grows = []
    half = table[len(table) // 2:]
    if len(half) < 3:
        print(f"soak: {what} are too few to tell what grows", flush=True)
        return True
    for name in half[0][1]:
        points = [(cycle, seen[name]) for cycle, seen in half if name in seen]
        each = slope(points) * 100
        added = slope(points) * (points[-1][0] - points[0][0])
        print(f"{name}: {points[0][1]} to {points[-1][1]}, {each:+.2f} in 100 cycles")
        size = name.endswith("KiB")
        if added > (points[0][1] / 10 + 256 if size else 2) and not name.startswith(tuple(others)):
            grows.append(name)
    print(f"soak: {what}, {len(grows)} grow" + "".join(f", {name}" for name in grows), flush=True)
    return bool(grows)
