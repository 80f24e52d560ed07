"""Training fed by DataLoader workers through pinned memory: the same losses, bit for bit, with and without a checkpoint.

loader.py STEPS: prints STEP LOSS_IN_HEX ok SECONDS for each step. Needs CUBLAS_WORKSPACE_CONFIG=:4096:8 and room in /dev/shm.
"""

import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    """Batch `n` is made from the seed `n` by whichever worker gets it."""

    def __len__(self):
        return 1 << 20

    def __getitem__(self, n):
        source = torch.Generator().manual_seed(n)
        return torch.randn(1024, 2048, generator=source)


def main():
    steps = int(sys.argv[1])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    model = torch.nn.Sequential(
        torch.nn.Linear(2048, 8192), torch.nn.GELU(), torch.nn.Linear(8192, 2048)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = DataLoader(Numbers(), batch_size=None, num_workers=3, pin_memory=device == "cuda", prefetch_factor=4)
    print(f"# torch {torch.__version__}, {device}, 3 workers", flush=True)
    for step, batch in zip(range(steps), loader):
        x = batch.to(device, non_blocking=True)
        loss = torch.nn.functional.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item().hex(), "ok", f"{time.time():.3f}", flush=True)
        time.sleep(0.02)


if __name__ == "__main__":
    main()
