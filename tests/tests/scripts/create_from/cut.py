"""A registry that is lost: forwards connections at port 5001 to port 5000, and after N bytes of answers it ends all of
them and itself."""
import contextlib
import os
import socket
import sys
import threading

left = int(sys.argv[1])
lock = threading.Lock()


def forward(source, target, counts):
    global left
    with contextlib.suppress(OSError):  # either side may end first
        while data := source.recv(1024):
            with lock:
                if counts:
                    left -= len(data)
                if left < 0:
                    os._exit(0)
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


server = socket.create_server(("127.0.0.1", 5001))
while True:
    client, _ = server.accept()
    registry = socket.create_connection(("127.0.0.1", 5000))
    for pair in ((client, registry, False), (registry, client, True)):
        threading.Thread(target=forward, args=pair, daemon=True).start()
