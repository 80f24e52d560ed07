"""Jobs on several GPUs, a process each, over NCCL: the same numbers, bit for bit, with and without a checkpoint.

parallel.py KIND STEPS RANKS, where KIND is
    ddp       training, the gradients averaged by DistributedDataParallel
    fsdp      training of 1.1 billion parameters in bfloat16, sharded by fully_shard
    tensor    tokens of a transformer of 6.7 billion random weights in bfloat16, each layer split between the ranks
    pipeline  training, half of the layers on each rank, with send and receive
    exchange  all_to_all, reduce_scatter, all_gather and broadcast, in the whole group and in subgroups that overlap
    uneven    all_reduce in groups that overlap, with ranks out of step: they sleep, and one works on the host for long
    apart     rank 1 comes to each all_reduce 15 s after the others
    cost      no steps: prints `# rate WHAT NUMBER` for all_reduce of 8 bytes, 1 MiB and 1 GiB, a step of ddp, and one of ddp
              with 16 times the words, so that it waits for the GPU and not for Python
Each rank prints STEP NUMBER ok SECONDS pRANK for each step; the number is a loss, a token or a sum. Two ranks add in either
order to the same sum, so their numbers do not depend on NCCL's choices. CORRUPT is in the place of ok if a sum is not what a
formula says. Ranks meet over a file.
"""

import os
import subprocess
import sys
import time

VOCABULARY = 32000


def transformer(torch, width, layers):
    block = torch.nn.TransformerEncoderLayer(width, 16, 4 * width, batch_first=True, dropout=0.0)
    return torch.nn.TransformerEncoder(block, layers)


def model_of(torch, width, layers):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, width), transformer(torch, width, layers), torch.nn.Linear(width, VOCABULARY))


def words(torch, rank, batch=2, length=256):
    source = torch.Generator(device="cuda")
    source.manual_seed(rank + 1)
    while True:
        yield torch.randint(0, VOCABULARY, (batch, length), device="cuda", generator=source)


def training(torch, model, rank, batch=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for x in words(torch, rank, batch):
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item().hex()


def ddp(torch, rank, ranks, batch=2):
    from torch.nn.parallel import DistributedDataParallel

    yield from training(torch, DistributedDataParallel(model_of(torch, 1024, 6).to("cuda"), device_ids=[rank]), rank, batch)


def fsdp(torch, rank, ranks):
    from torch.distributed.fsdp import fully_shard

    model = model_of(torch, 2560, 12).to("cuda", torch.bfloat16)
    for block in model[1].layers:
        fully_shard(block)
    fully_shard(model)
    torch.cuda.empty_cache()
    yield from training(torch, model, rank)


def tensor(torch, rank, ranks):
    import torch.distributed as dist

    width, layers, heads, inner, longest = 4096, 32, 32 // ranks, 11008 // ranks, 512
    source = torch.Generator(device="cuda")

    def weights(rows, columns, seed):
        source.manual_seed(seed)
        return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16, generator=source) * 0.02

    own = lambda rows, columns, seed: weights(rows, columns, seed * 100 + rank)  # noqa: E731
    embedding, output = weights(VOCABULARY, width, 1), weights(width, VOCABULARY, 2)
    stack = [
        (own(width, 3 * heads * 128, 5 * n + 3), own(heads * 128, width, 5 * n + 4), own(width, inner, 5 * n + 5), own(width, inner, 5 * n + 6), own(inner, width, 5 * n + 7))
        for n in range(layers)
    ]
    cache = torch.zeros(layers, 2, heads, longest, 128, device="cuda", dtype=torch.bfloat16)
    norm = lambda x: torch.nn.functional.rms_norm(x, (width,))  # noqa: E731
    token, at = torch.tensor([1], device="cuda"), 0
    with torch.inference_mode():
        while True:
            x = embedding[token]
            for n, (qkv, out, gate, up, down) in enumerate(stack):
                q, k, v = (norm(x) @ qkv).view(3, heads, 1, 128)
                cache[n, 0, :, at], cache[n, 1, :, at] = k[:, 0], v[:, 0]
                scores = (q @ cache[n, 0, :, : at + 1].transpose(1, 2)) / 128**0.5
                part = (torch.softmax(scores, -1) @ cache[n, 1, :, : at + 1]).reshape(1, heads * 128) @ out
                dist.all_reduce(part)
                x = x + part
                part = (torch.nn.functional.silu(norm(x) @ gate) * (norm(x) @ up)) @ down
                dist.all_reduce(part)
                x = x + part
            logits = norm(x) @ output
            token = logits.argmax(-1)
            at = (at + 1) % longest
            # Random weights soon say the same token for ever: what they say of it goes on changing.
            yield f"{token.item()}:{logits.float().sum().item().hex()}"


def pipeline(torch, rank, ranks):
    import torch.distributed as dist

    width, batch, length = 1024, 2, 256
    torch.manual_seed(rank)
    layers = transformer(torch, width, 4).to("cuda")
    first = torch.nn.Embedding(VOCABULARY, width).to("cuda") if rank == 0 else None
    last = torch.nn.Linear(width, VOCABULARY).to("cuda") if rank == ranks - 1 else None
    parts = torch.nn.ModuleList([part for part in (first, layers, last) if part is not None])
    optimizer = torch.optim.AdamW(parts.parameters(), lr=1e-4)
    # All have the same words; the first takes them as its input, and the last as what should come out.
    for x in words(torch, 0, batch, length):
        optimizer.zero_grad()
        for half in x.chunk(2):
            if first is not None:
                taken = first(half)
            else:
                taken = torch.empty(batch // 2, length, width, device="cuda")
                dist.recv(taken, rank - 1)
                taken.requires_grad_()
            given = layers(taken)
            if last is not None:
                loss = torch.nn.functional.cross_entropy(last(given).flatten(0, 1), half.flatten())
                loss.backward()
                number = loss.item()
            else:
                dist.send(given.detach(), rank + 1)
                gradient = torch.empty_like(given)
                dist.recv(gradient, rank + 1)
                given.backward(gradient)
                number = gradient.sum().item()
            if first is None:
                dist.send(taken.grad, rank - 1)
        optimizer.step()
        yield number.hex()


def exchange(torch, rank, ranks):
    import torch.distributed as dist

    # Groups that overlap: each rank with its right neighbour, and all of them once more.
    pairs = [dist.new_group(sorted({n, (n + 1) % ranks})) for n in range(ranks if ranks > 2 else 1)]
    again = dist.new_group(list(range(ranks)))
    own = [pair for n, pair in enumerate(pairs) if rank in (n, (n + 1) % ranks)]
    size = 1 << 20
    x = torch.arange(ranks * size, device="cuda", dtype=torch.int64) + rank
    step = 0
    while True:
        y = torch.empty_like(x)
        dist.all_to_all_single(y, x)
        part = torch.empty(size, device="cuda", dtype=torch.int64)
        dist.reduce_scatter_tensor(part, y, group=again)
        whole = torch.empty_like(x)
        dist.all_gather_into_tensor(whole, part, group=again)
        for pair in own:
            dist.all_reduce(part, group=pair)
        first = whole[:8].clone()
        dist.broadcast(first, src=step % ranks, group=again)
        x = (whole * 31 + part.sum() + first.sum() + rank + step) % 1_000_003
        step += 1
        yield str(int(x.sum().item()))


def uneven(torch, rank, ranks):
    import random

    import torch.distributed as dist

    chance = random.Random(rank)
    again = dist.new_group(list(range(ranks)))
    x = torch.arange(1 << 20, device="cuda", dtype=torch.int64) % 1000
    step = 0
    while True:
        if chance.random() < 0.3:
            time.sleep(chance.random() * 0.3)
        if rank == 0 and step % 7 == 0:
            sum(n * n for n in range(1_000_000))
        y = x * (rank + 1) + step
        # Several that nobody waits for, and then one.
        works = [dist.all_reduce(y.clone(), group=group, async_op=True) for group in (None, again, again)]
        dist.all_reduce(y)
        for work in works:
            work.wait()
        right = torch.equal(y, x * (ranks * (ranks + 1) // 2) + ranks * step)
        step += 1
        yield str(int(y.sum().item())) if right else None


def apart(torch, rank, ranks):
    import torch.distributed as dist

    x = torch.ones(1000, device="cuda")
    while True:
        if rank == 1:
            time.sleep(15)
        dist.all_reduce(x)
        torch.cuda.synchronize()
        yield "1"


def cost(torch, rank, ranks):
    import torch.distributed as dist

    # Where the kernel puts the ranks makes more of a difference than what is measured here.
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, min(4, len(cores) // ranks))
    os.sched_setaffinity(0, cores[rank * each : (rank + 1) * each])

    def rate(what, calls, work, rounds=15):
        times = []
        for _ in range(rounds):
            torch.cuda.synchronize()
            dist.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                work()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        if rank == 0:
            print(f"# rate {what} {calls / min(times):.3f}", flush=True)

    for what, size, calls in (("8B", 8, 5000), ("1MiB", 1 << 20, 2000), ("1GiB", 1 << 30, 40)):
        x = torch.zeros(size // 4, device="cuda")
        rate(what, calls, lambda: dist.all_reduce(x))
    losses = ddp(torch, rank, ranks)
    rate("ddp", 20, lambda: next(losses))
    losses = ddp(torch, rank, ranks, 32)
    rate("ddp-large", 5, lambda: next(losses), 8)
    return iter(())


def work(kind, steps, rank, ranks):
    import torch
    import torch.distributed as dist

    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method="file:///tmp/rendezvous", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    for step, number in zip(range(steps), globals()[kind](torch, rank, ranks)):
        print(step, number, "ok" if number else "CORRUPT", f"{time.time():.3f}", f"p{rank}", flush=True)
        time.sleep(0.05)
    print(f"# {torch.cuda.memory_reserved() >> 20} MiB reserved p{rank}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) == 5:
        work(sys.argv[1], int(sys.argv[2]), int(sys.argv[4]), int(sys.argv[3]))
    else:
        ranks = int(sys.argv[3])
        children = [subprocess.Popen([sys.executable, __file__, *sys.argv[1:4], str(n)]) for n in range(ranks)]
        sys.exit(max(abs(child.wait()) for child in children))
