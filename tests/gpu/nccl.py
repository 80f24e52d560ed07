"""Several ranks with a GPU each, which add up a tensor over NCCL again and again: each result is what a formula says.

nccl.py [RANKS]: each rank prints STEP SUM ok|CORRUPT SECONDS pRANK. A file /tmp/down has all ranks destroy their process group,
keep their tensors, and print `# down`; /tmp/up has them make it again and print `# up`. They meet over a file: no TCP store, no
io_uring. NCCL_DEBUG=INFO tells the transport: `via P2P/CUMEM`.
"""

import os
import subprocess
import sys
import time


def work(rank, ranks):
    import torch
    import torch.distributed as dist

    def join(generation):
        where = f"file:///tmp/rendezvous.{generation}"
        dist.init_process_group("nccl", init_method=where, rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))

    def total(numbers):
        dist.all_reduce(numbers)
        return numbers

    def say(what):
        print(f"# {what} p{rank}", flush=True)

    torch.cuda.set_device(rank)
    join(0)
    x = torch.arange(16 << 20, device="cuda", dtype=torch.int32) % 1000
    want = x * (ranks * (ranks + 1) // 2)
    step = generation = 0
    while True:
        # All take part in the decision, so that all take it at the same step.
        down = int(total(torch.tensor([os.path.exists("/tmp/down") and generation == 0], device="cuda", dtype=torch.int32)).item())
        if down:
            torch.cuda.synchronize()
            dist.destroy_process_group()
            say("down")
            while not os.path.exists("/tmp/up"):
                time.sleep(0.02)
            generation += 1
            join(generation)
            say("up")
        y = total(x * (rank + 1) + step) - ranks * step
        verdict = "ok" if torch.equal(y, want) else "CORRUPT"
        print(step, int(y.sum().item()), verdict, f"{time.time():.3f}", f"p{rank}", flush=True)
        step += 1
        time.sleep(0.05)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        work(int(sys.argv[1]), int(sys.argv[2]))
    else:
        count = sys.argv[1] if len(sys.argv) > 1 else "2"
        children = [subprocess.Popen([sys.executable, __file__, str(n), count]) for n in range(int(count))]
        sys.exit(max(abs(child.wait()) for child in children))
