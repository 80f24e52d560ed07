"""A deterministic iteration on large arrays with JAX or CuPy: the same norms, bit for bit, with and without a checkpoint.

arrays.py jax|cupy STEPS: prints STEP NORM_IN_HEX ok SECONDS for each step. About 4 GiB of GPU memory.
"""

import os
import sys
import time

kind, steps = sys.argv[1], int(sys.argv[2])
size, count = 8192, 16

if kind == "jax":
    # By default JAX takes three quarters of the GPU's memory at once.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # XLA looks for nvvm/libdevice below its data directory, and then here.
    if os.path.isdir("/work/nvvm/libdevice"):
        os.chdir("/work/nvvm/libdevice")
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0 --xla_gpu_cuda_data_dir=/work",
    )
    import jax
    import jax.numpy as np

    start = jax.random.normal(jax.random.key(0), (count, size, size), dtype=np.float32)

    @jax.jit
    def advance(all):
        mixed = np.roll(all, 1, axis=0) @ (all[0] / size) + all
        return mixed / np.linalg.norm(mixed, axis=(1, 2), keepdims=True) * size

    norm = lambda all: float(np.sum(np.abs(all[:, ::64, ::64]), dtype=np.float32))
    version = jax.__version__
else:
    import cupy as np

    random = np.random.Generator(np.random.XORWOW(0))
    start = random.standard_normal((count, size, size), dtype=np.float32)

    def advance(all):
        mixed = np.roll(all, 1, axis=0) @ (all[0] / size) + all
        return mixed / np.linalg.norm(mixed, axis=(1, 2), keepdims=True) * size

    norm = lambda all: float(np.sum(np.abs(all[:, ::64, ::64]), dtype=np.float32))
    version = np.__version__

print(f"# {kind} {version}", flush=True)
now = start
for step in range(steps):
    now = advance(now)
    print(step, norm(now).hex(), "ok", f"{time.time():.3f}", flush=True)
