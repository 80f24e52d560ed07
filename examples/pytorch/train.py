"""Trains a small model and prints the loss of every step, in full precision: `train.py STEPS`.

With the same seed every run prints the same losses, so that a run through a checkpoint can be compared with one without.
"""

import sys
import time

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
source = torch.Generator().manual_seed(1)
for step in range(int(sys.argv[1])):
    x = torch.randn(64, 256, generator=source).to(device)
    loss = torch.nn.functional.mse_loss(model(x), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex(), flush=True)
    time.sleep(0.03)
