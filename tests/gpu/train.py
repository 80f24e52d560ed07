"""Deterministic training of a small transformer: the same losses, bit for bit, with and without a checkpoint.

train.py STEPS [LAYERS [WIDTH WORDS]]: prints STEP LOSS_IN_HEX ok SECONDS for each step. Needs CUBLAS_WORKSPACE_CONFIG=:4096:8.
"""

import os
import sys
import time

import torch

steps = int(sys.argv[1])
layers = int(sys.argv[2]) if len(sys.argv) > 2 else 6
width, words = map(int, sys.argv[3:5] or (2048, 32000))
batch, length = 4, 512

# As a launcher would near a GPU: CRIU keeps no affinity.
cpus = set(sorted(os.sched_getaffinity(0))[:-1]) or os.sched_getaffinity(0)
os.sched_setaffinity(0, cpus)

torch.manual_seed(0)
torch.use_deterministic_algorithms(True)
block = torch.nn.TransformerEncoderLayer(width, 16, 4 * width, batch_first=True, dropout=0.0)
model = torch.nn.Sequential(
    torch.nn.Embedding(words, width),
    torch.nn.TransformerEncoder(block, layers),
    torch.nn.Linear(width, words),
).to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
source = torch.Generator(device="cuda")
source.manual_seed(1)
parameters = sum(p.numel() for p in model.parameters())
print(f"# torch {torch.__version__}, {parameters} parameters", flush=True)

for step in range(steps):
    if os.sched_getaffinity(0) != cpus:
        sys.exit(f"may run on {os.sched_getaffinity(0)} and not on {cpus}")
    x = torch.randint(0, words, (batch, length), device="cuda", generator=source)
    loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex(), "ok", f"{time.time():.3f}", flush=True)
print(f"# {torch.cuda.memory_reserved() >> 20} MiB reserved", flush=True)
