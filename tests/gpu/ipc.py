"""A process passes a CUDA tensor to another by CUDA IPC, without NCCL: the other adds it up, and prints N SUM ok|CORRUPT SECONDS."""

import time

import torch
import torch.multiprocessing as mp


def importer(queue):
    x = queue.get()
    n = 0
    while True:
        total = int(x.sum().item())
        print(n, total, "ok" if total == 1000 * 1000 else "CORRUPT", f"{time.time():.3f}", flush=True)
        n += 1
        time.sleep(0.1)


if __name__ == "__main__":
    mp.set_start_method("spawn")
    queue = mp.Queue()
    child = mp.Process(target=importer, args=(queue,), daemon=True)
    child.start()
    x = torch.ones(1000, 1000, device="cuda")
    queue.put(x)
    child.join()
