"""Changes fields and messages of CRIU's images, one or two at a time, and restores each variant by the runtime's `create`. A variant is
refused, or has exactly what the unchanged checkpoint gives, as seen from the host: credentials, seccomp, limits, mounts,
cgroup, ids. Nothing of the host changes. What is refused never starts CRIU, and costs a tenth of what is restored.

    mutations.py RUNTIME COUNT SEED DIRECTORY...    each DIRECTORY has a checkpoint, and bundle/ to restore it into
"""
import collections
import glob
import json
import os
import random
import shutil
import subprocess
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from images import Image, decode, encode, field  # noqa: E402

RUNTIME, COUNT, SEED, *DIRECTORIES = sys.argv[1:]
ROOT, WORK = "/run/mutations", "/tmp/mutations"
# Data is no message.
DATA = ("pages-", "tmpfs-", "iptables-", "ip6tables-", "nftables-", "ifaddr-", "route", "rule-", "stats-", "vram-", "cryopod-")
NUMBERS = [0, 1, 2, 7, 0o4777, 1 << 21, (1 << 31) - 1, (1 << 32) - 1, 1 << 32, (1 << 64) - 1]
TEXTS = [b"", b"/", b"..", b"/../../../../../../srv", b"../../../../../../../../srv/victim", b"/proc/1/root", b"a\0b", b"x" * 5000]
VICTIM = "/srv/victim"


def nested(value):
    """The fields of a message in a field; None for a text or other bytes."""
    if not value or value.isascii() and value.decode().isprintable():
        return None
    try:
        return decode(value)
    except (ValueError, IndexError):
        return None


def places(fields, path=()):
    """Paths of all fields: positions, from the outermost message."""
    for at, (_, wiretype, value) in enumerate(fields):
        yield (*path, at)
        inner = nested(value) if wiretype == 2 else None
        if inner:
            yield from places(inner, (*path, at))


def change(fields, path, how, rng):
    """Changes the field at a path. Returns what was done."""
    at = path[0]
    number, wiretype, value = fields[at]
    if len(path) > 1:
        inner = nested(value)
        said = change(inner, path[1:], how, rng)
        fields[at][2] = encode(inner)
        return f"{number}.{said}"
    if how == "drop":
        del fields[at]
    elif how == "double":
        fields.insert(at, [number, wiretype, value])
    elif how == "unknown":
        fields.append(field(rng.choice([99, 500]), 1))
    elif wiretype == 0:
        fields[at][2] = rng.choice([n for n in NUMBERS + [value + 1, value ^ 1, value | 1 << 12] if n != value])
        how = f"{value} to {fields[at][2]}"
    elif wiretype == 2:
        fields[at][2] = rng.choice([t for t in TEXTS if t != value])
        how = f"{value[:30]!r} to {fields[at][2][:30]!r}"
    return f"{number} {how}"


def vary(directory, rng):
    """Makes one or two changes. Returns what was done."""
    names = [n for n in sorted(os.listdir(directory)) if n.endswith(".img") and not n.startswith(DATA)]
    said = []
    for _ in range(rng.choice([1, 1, 2])):
        image = Image(f"{directory}/{rng.choice(names)}")
        if not image.messages:
            continue
        at = rng.randrange(len(image.messages))
        if rng.random() < 0.1:
            whole = rng.choice(["drop", "double"])
            image.messages[at:at + 1] = [] if whole == "drop" else [image.messages[at]] * 2
            said.append(f"{os.path.basename(image.path)} {whole} message {at}")
            image.write()
            continue
        message = image.messages[at]
        all_places = list(places(message))
        if not all_places:
            continue
        how = rng.choice(["drop", "double", "unknown", "value", "value", "value", "value"])
        said.append(f"{os.path.basename(image.path)} {change(message, rng.choice(all_places), how, rng)}")
        image.write()
    return ", ".join(said)


def read(path):
    with open(path) as file:
        return file.read()


def tree(pid):
    yield pid
    for task in os.listdir(f"/proc/{pid}/task"):
        for child in read(f"/proc/{pid}/task/{task}/children").split():
            yield from tree(int(child))


def seen(pid, name):
    """What the host sees of the container: sets, since a variant may have fewer processes, and never more rights."""
    has, limits = collections.defaultdict(set), {}
    for process in tree(pid):
        for task in os.listdir(f"/proc/{process}/task"):
            status = dict(line.split(":", 1) for line in read(f"/proc/{process}/task/{task}/status").splitlines())
            # A group that it has anyway is none more.
            has["Groups"] |= set(status["Groups"].split()) - set(status["Gid"].split())
            for key in ("Uid", "Gid", "NoNewPrivs", "Seccomp"):
                has[key].add(status[key].strip())
            for key in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
                has[key] |= {n for n in range(64) if int(status[key], 16) >> n & 1}
        has["uid_map"].add(read(f"/proc/{process}/uid_map"))
        has["cgroup"] |= {line.split(":", 1)[1] for line in read(f"/proc/{process}/cgroup").splitlines()}
        for line in read(f"/proc/{process}/mountinfo").splitlines():
            head, tail = line.split(" - ")
            _, _, _, root, at, options = head.split()[:6]
            # Another cgroup, another directory of the operation.
            has["mounts"].add((root.replace(name, "NAME"), at, tail.split()[0]))
            # More of these is fine.
            lacks = {"ro", "nosuid", "nodev", "noexec"} - set(options.split(","))
            has["open mounts"] |= {(at, limit) for limit in lacks}
        for namespace in ("net", "ipc", "uts", "mnt", "pid", "user"):
            same = os.readlink(f"/proc/{process}/ns/{namespace}") == os.readlink(f"/proc/self/ns/{namespace}")
            has["host's namespaces"] |= {namespace} if same else set()
        for line in read(f"/proc/{process}/limits").splitlines()[1:]:
            resource, hard = line[:26].strip(), line[47:68].strip()
            most = limits.get(resource, -1)
            limits[resource] = max(most, float("inf") if hard == "unlimited" else int(hard))
    has["limits"] = limits
    has["cgroup"] = {line.replace(name, "NAME") for line in has["cgroup"]}
    return has


def host(criu_ran=True):
    victim = os.stat(VICTIM)
    mounts = sorted(line.split(" ", 2)[2] for line in read("/proc/self/mountinfo").splitlines())
    seen = [victim.st_mode, victim.st_uid, victim.st_size, mounts, os.uname().nodename, os.listdir("/srv")]
    if criu_ran:
        seen.append(subprocess.run(["nsenter", "--uts=/run/named/uts", "hostname"], capture_output=True).stdout)
    return seen


def runtime(*arguments):
    line = [RUNTIME, "--root", ROOT, *arguments]
    return subprocess.run(line, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=120)


def restore(bundle, images, name):
    """Creates a container from the images. Returns what is seen of it; None, and the reason, if it was not created."""
    config = json.loads(read(f"{bundle}/config.json.first"))
    config.setdefault("annotations", {})["dev.cryopod.restore"] = images
    config["linux"]["cgroupsPath"] = f"/mutations/{name}"
    with open(f"{bundle}/config.json", "w") as file:
        json.dump(config, file)
    log = f"{WORK}/log"
    if os.path.exists(log):
        os.remove(log)
    pid_file = f"{WORK}/pid"
    done = subprocess.run([RUNTIME, "--root", ROOT, "--log", log, "create", "--bundle", bundle, "--pid-file", pid_file, name],
                          stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120)
    if done.returncode:
        return None, read(log) if os.path.exists(log) else ""
    return seen(int(read(pid_file)), name), ""


def remove(name):
    runtime("delete", "--force", name)


rng = random.Random(int(SEED))
os.makedirs(WORK, exist_ok=True)
shutil.rmtree(ROOT, ignore_errors=True)
with open(VICTIM, "w") as file:
    file.write("mine\n")
os.chmod(VICTIM, 0o600)
counts = collections.Counter()
first, before = {}, None
for directory in DIRECTORIES:
    shutil.copy(f"{directory}/bundle/config.json", f"{directory}/bundle/config.json.first")
    first[directory], why = restore(f"{directory}/bundle", f"{directory}/images", "first")
    remove("first")
    if first[directory] is None:
        sys.exit(f"{directory}: unchanged, and not restored: {why[-500:]}")


def copied(source, to):
    """Data is not changed, so it is not copied."""
    return (os.link if os.path.basename(to).startswith("pages-") else shutil.copy2)(source, to)


def past(has, first, closed):
    """What a container has beyond the unchanged one. closed: the paths that its spec masks or makes read-only."""
    for key, values in has.items():
        if key == "limits":
            beyond = {k for k, v in values.items() if v > first[key][k]}
        else:
            beyond = values - first[key]
            if key == "mounts":
                # The runtime's masks are of another kind than the restore's.
                beyond = {m for m in beyond if m[1] not in closed or m[2] != "tmpfs" or m[0] != "/"}
                beyond |= ({m[1] for m in first[key]} - {m[1] for m in values}) & closed
        if beyond:
            yield f"{key}: {sorted(map(str, beyond))[:8]}"


# A variant that hangs in CRIU is given up soon: one in a hundred does. What is unchanged has its time.
with open("/etc/cryopod/config.toml", "a") as file:
    file.write("[limits]\nrestore_s = 8\nabort_s = 1\n")
before = host()
found = 0
for at in range(int(COUNT)):
    directory = DIRECTORIES[at % len(DIRECTORIES)]
    crafted = "/tmp/m/crafted"
    shutil.rmtree(crafted, ignore_errors=True)
    shutil.copytree(f"{directory}/images", crafted, symlinks=True, copy_function=copied)
    said = f"{os.path.basename(directory)}, variant {at} of seed {SEED}: {vary(crafted, rng)}"
    has, why = restore(f"{directory}/bundle", crafted, "variant")
    is_refused = has is None and "was refused" in why
    counts["refused" if is_refused else "failed in CRIU" if has is None else "restored"] += 1
    linux = json.loads(read(f"{directory}/bundle/config.json.first"))["linux"]
    closed = set(linux.get("maskedPaths", []) + linux.get("readonlyPaths", []))
    told = list(past(has, first[directory], closed)) if has else []
    if not is_refused:
        remove("variant")
    after = host(not is_refused)
    if after != before[:len(after)]:
        told.append(f"the host has changed: {before} {after}")
        before = host()
    found += bool(told)
    for what in told:
        print(f"PAST THE SPEC: {said}: {what}", flush=True)
    if at % 500 == 499:
        print(f"{at + 1} variants of seed {SEED}: {dict(counts)}", flush=True)
print(f"{COUNT} variants: {counts['refused']} refused, {counts['failed in CRIU']} failed in CRIU, {counts['restored']} restored, {found} past the spec")
if found or not counts["restored"] or not counts["refused"]:
    sys.exit(1)
