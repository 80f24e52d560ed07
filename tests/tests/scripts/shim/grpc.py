"""grpc.py SOCKET SERVICE/METHOD JSON [NAMESPACE]: a gRPC call to containerd, by curl. Messages are lists of
[field, value]: a string, a number, or a list for a message. Prints the first string of the answer, or fails with
containerd's words."""

import json
import struct
import subprocess
import sys


def varint(n):
    out = b""
    while n > 127:
        out += bytes([n & 127 | 128])
        n >>= 7
    return out + bytes([n])


def message(fields):
    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            data = value.encode() if isinstance(value, str) else message(value)
            out += varint(number << 3 | 2) + varint(len(data)) + data
    return out


def first_string(data):
    if not data or data[0] != 0x0A:
        return ""
    return data[2 : 2 + data[1]].decode(errors="replace")


socket, method, fields = sys.argv[1:4]
namespace = sys.argv[4] if len(sys.argv) > 4 else "default"
body = message(json.loads(fields))
done = subprocess.run(
    [
        "curl", "--silent", "--show-error", "--http2-prior-knowledge", "--max-time", "60", "--unix-socket", socket,
        "--header", "content-type: application/grpc", "--header", "te: trailers",
        "--header", f"containerd-namespace: {namespace}", "--dump-header", "/tmp/grpc.headers",
        "--data-binary", "@-", f"http://localhost/{method}",
    ],
    input=struct.pack(">BI", 0, len(body)) + body, stdout=subprocess.PIPE, check=True,
)  # fmt: skip
with open("/tmp/grpc.headers", encoding="utf-8") as lines:
    headers = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
if headers.get("grpc-status") != "0":
    sys.exit(f"{method}: {headers.get('grpc-status')}: {headers.get('grpc-message')}")
print(first_string(done.stdout[5:]))
