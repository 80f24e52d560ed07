"""An inference server of about 1 B parameters (26 layers of 4096: 7 B) with random weights behind HTTP, and a client that keeps asking it.

serve.py REQUESTS tcp|unix [LAYERS WIDTH [WEIGHTS]]: request N asks for the tokens of seed N % 50; prints N SHA256 ok SECONDS for each. The
same seed must give the same answer, whenever it is asked; the runs with and without a checkpoint are compared line by line.
`unix` serves over a Unix socket: CRIU before 4.2 cannot dump TCP sockets on Linux 6.16 and newer. On a CPU the model is small. WEIGHTS is a directory: the model
is read from it, as servers do, or at the end written to it where it is empty.
"""

import hashlib
import http.client
import http.server
import json
import os
import socket
import socketserver
import sys
import threading
import time

import torch

requests, family = int(sys.argv[1]), sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
layers, width = map(int, sys.argv[3:5] or (14, 2048)) if device == "cuda" else (2, 128)
words = 32000 if device == "cuda" else 1000
weights = sys.argv[5] if len(sys.argv) > 5 else None
stored = weights is not None and len(os.listdir(weights)) > 0
PATH = "/tmp/serve.sock"

torch.manual_seed(0)
torch.use_deterministic_algorithms(True, warn_only=True)
# Half precision. Random weights are made where they are used.
torch.set_default_dtype(torch.bfloat16)
if not stored:
    torch.set_default_device(device)
try:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=words, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=16,
        attn_implementation="eager",
    )
    if stored:
        model = LlamaForCausalLM.from_pretrained(weights, dtype=torch.bfloat16, attn_implementation="eager")
    else:
        model = LlamaForCausalLM(config)
    model = model.to(device).eval()
    save = lambda: model.save_pretrained(weights)
    logits = lambda tokens: model(tokens, use_cache=False).logits[:, -1]
    kind = "transformers"
except ImportError:
    block = torch.nn.TransformerEncoderLayer(width, 16, 4 * width, batch_first=True, dropout=0.0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(words, width), torch.nn.TransformerEncoder(block, layers), torch.nn.Linear(width, words)
    )
    if stored:
        model.load_state_dict(torch.load(f"{weights}/model.pt", mmap=True))
    model = model.to(device).eval()
    save = lambda: torch.save(model.state_dict(), f"{weights}/model.pt")
    logits = lambda tokens: model(tokens)[:, -1]
    kind = "torch"
torch.set_default_dtype(torch.float32)
torch.set_default_device("cpu")


@torch.inference_mode()
def answer(seed):
    source = torch.Generator(device=device)
    source.manual_seed(seed)
    tokens = torch.randint(0, words, (1, 16), device=device, generator=source)
    for _ in range(8):
        chosen = torch.multinomial(logits(tokens).float().softmax(-1), 1, generator=source)
        tokens = torch.cat([tokens, chosen], 1)
    return tokens[0].tolist()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        body = json.dumps(answer(int(self.path[1:]))).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

    def address_string(self):
        return "client"


class UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


class UnixConnection(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(PATH)


if family == "unix":
    if os.path.exists(PATH):
        os.unlink(PATH)
    server, client = UnixServer(PATH, Handler), UnixConnection("localhost")
else:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler)
    client = http.client.HTTPConnection("127.0.0.1", 8000)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(f"# {kind} on torch {torch.__version__}, {device}, {sum(p.numel() for p in model.parameters())} parameters", flush=True)

known = {}
for n in range(requests):
    client.request("GET", f"/{n % 50}")
    digest = hashlib.sha256(client.getresponse().read()).hexdigest()
    if known.setdefault(n % 50, digest) != digest:
        print(n, digest, "CORRUPT", f"{time.time():.3f}", flush=True)
    print(n, digest, "ok", f"{time.time():.3f}", flush=True)
    time.sleep(0.01)

if weights and not stored:
    save()
