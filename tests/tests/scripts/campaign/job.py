"""job.py KIND LOG: a workload that checks itself, and appends `N SUM ok|CORRUPT` to LOG ten times a second.

KIND: memory (shared memory of two processes), sockets (a pair and a listening one, of two processes), files (a deleted file, a
pipe, a FIFO), threads (eight of them)."""
import hashlib
import mmap
import os
import socket
import sys
import threading
import time

kind, log = sys.argv[1:]


def memory():
    """Two processes count in memory that they share, and a private copy holds a pattern."""
    shared, pattern = mmap.mmap(-1, 1 << 20), os.urandom(1 << 20)
    shared[4096:] = pattern[4096:]
    digest = hashlib.sha256(pattern[4096:]).digest()
    if os.fork() == 0:
        while True:
            shared[0:8] = (int.from_bytes(shared[0:8], "little") + 1).to_bytes(8, "little")
            time.sleep(0.01)
    last = 0

    def tick():
        nonlocal last
        before, last = last, int.from_bytes(shared[0:8], "little")
        return last >= before and hashlib.sha256(shared[4096:]).digest() == digest
    return tick


def sockets():
    """What one process writes, the other sends back: over a pair and over a named socket."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("/tmp/named")
    listener.listen()
    mine, other = socket.socketpair()
    if os.fork() == 0:
        named = socket.socket(socket.AF_UNIX)
        named.connect("/tmp/named")
        for end in (other, named):
            threading.Thread(target=lambda end=end: [end.sendall(end.recv(64)) for _ in iter(int, 1)]).start()
        time.sleep(1 << 30)
    accepted, _ = listener.accept()

    def tick():
        sent = os.urandom(32)
        for end in (mine, accepted):
            end.sendall(sent)
            if end.recv(64) != sent:
                return False
        return True
    return tick


def files():
    """A deleted file, a pipe with data in it, a FIFO."""
    deleted = open("/tmp/deleted", "w+b", buffering=0)
    os.unlink("/tmp/deleted")
    data = os.urandom(1 << 18)
    while (got := deleted.tell()) < len(data):  # the disk may be full for now
        try:
            deleted.write(data[got:])
        except OSError:
            time.sleep(0.1)
    read, write = os.pipe()
    os.write(write, data[:1000])
    os.mkfifo("/tmp/fifo")
    fifo = os.open("/tmp/fifo", os.O_RDWR)

    def tick():
        nonlocal data
        held = os.read(read, 1000)
        os.write(write, held)
        os.write(fifo, held)
        good = held == data[:1000] == os.read(fifo, 1000) and os.pread(deleted.fileno(), 1 << 19, 0) == data
        os.pwrite(deleted.fileno(), held[500:] + held[:500], 1000)
        data = data[:1000] + held[500:] + held[:500] + data[2000:]
        return good
    return tick


def threads():
    """Each thread counts; none stands still for long."""
    counts = [0] * 8

    def work(i):
        while True:
            counts[i] += 1
            time.sleep(0.005)
    for i in range(8):
        threading.Thread(target=work, args=(i,), daemon=True).start()
    last = list(counts)

    def tick():
        nonlocal last
        good = all(now >= then for now, then in zip(counts, last))
        last = list(counts)
        return good and sum(counts) >= 0
    return tick


tick, n = globals()[kind](), 0
out = open(log, "a", buffering=1)
while True:
    print(n, n * n, "ok" if tick() else "CORRUPT", file=out)
    n += 1
    time.sleep(0.1)
