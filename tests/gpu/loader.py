"""Training fed by DataLoader workers through pinned memory: the same losses, bit for bit, with and without a checkpoint.

loader.py STEPS [-early]: prints STEP LOSS_IN_HEX ok SECONDS for each step. The workers are forked when the model is on the GPU, as
in most programs: they inherit the driver's descriptors. With `-early` they are forked before. On a CPU all is smaller. Needs
CUBLAS_WORKSPACE_CONFIG=:4096:8 and room in /dev/shm.
"""

import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

device = "cuda" if torch.cuda.device_count() else "cpu"  # which does not start CUDA
batch, width = (1024, 2048) if device == "cuda" else (64, 256)


class Numbers(Dataset):
    """Batch `n` is made from the seed `n` by whichever worker gets it."""

    def __len__(self):
        return 1 << 20

    def __getitem__(self, n):
        source = torch.Generator().manual_seed(n)
        return torch.randn(batch, width, generator=source)


def main():
    steps, early = int(sys.argv[1]), "-early" in sys.argv
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    # The loader's own pinning starts CUDA before the workers; so with `-early` the batches are pinned here.
    pinned = device == "cuda" and not early
    loader = DataLoader(
        Numbers(), batch_size=None, num_workers=3, prefetch_factor=4, pin_memory=pinned, multiprocessing_context="fork"
    )
    batches = iter(loader) if early else loader
    model = torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    print(f"# torch {torch.__version__}, {device}, 3 workers{', early' if early else ''}", flush=True)
    for step, numbers in zip(range(steps), batches):
        if early and device == "cuda":
            numbers = numbers.pin_memory()
        x = numbers.to(device, non_blocking=True)
        loss = torch.nn.functional.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item().hex(), "ok", f"{time.time():.3f}", flush=True)
        time.sleep(0.02)


if __name__ == "__main__":
    main()
