# train.sh LOW: PyTorch trains on the CPU, fed by DataLoader workers through shared memory, in a container with a GPU node. Checkpointed
# under load, removed and restored, it prints the same losses, bit for bit, as a run that nobody interrupted.
low=$1
mkimage
low_level "$low"
fake_gpu_nodes
mount --bind /opt/torch /opt/torch && mount -o remount,bind,ro /opt/torch
mkdir -p /srv/app
cat > /srv/app/train.py <<'PY'
import os, sys, time
import torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):  # batch N is made from the seed N, by whichever worker gets it; large enough for a file in /dev/shm
    def __len__(self):
        return 1 << 20

    def __getitem__(self, n):
        return torch.randn(64, 256, generator=torch.Generator().manual_seed(n))

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(Numbers(), batch_size=None, num_workers=3, prefetch_factor=4, multiprocessing_context="fork")
for step, x in zip(range(int(sys.argv[1])), loader):
    while step == 60 and not os.path.exists("/app/finish"):  # no end before the checkpoint
        time.sleep(0.05)
    loss = torch.nn.functional.mse_loss(model(x), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("loss", step, loss.item().hex(), flush=True)
    time.sleep(0.03)
print("end", flush=True)
PY
steps=100
mapfile -t environment < /opt/torch/environment
python=(-v /usr:/usr:ro -v /usr/lib64:/lib64:ro -v /usr/lib/x86_64-linux-gnu:/lib/x86_64-linux-gnu:ro -v /opt/torch:/opt/torch:ro -v /srv/app:/app:ro)
python+=(-e PYTHONDONTWRITEBYTECODE=1 -e HOME=/tmp)
for variable in "${environment[@]}"; do python+=(-e "$variable"); done
train() { pod run "$@" --network none --security-opt seccomp=unconfined --device /dev/nvidia0 --shm-size 512m "${python[@]}" localhost/busybox /usr/bin/python3 /app/train.py $steps; }

touch /srv/app/finish
train --rm > /tmp/whole 2>&1 || { tail /tmp/whole; exit 1; }
[ "$(grep -c '^loss' /tmp/whole)" = $steps ] && [ "$(tail -n 1 /tmp/whole)" = end ]

rm /srv/app/finish
train -d --name train > /dev/null
begun() { [ "$(printed train | grep -c '^loss')" -ge 30 ]; }
wait_for begun || { printed train | tail; exit 1; }
[ "$(podman top train pid | grep -c '[0-9]')" -ge 4 ] || { podman top train; exit 1; }
if ! pod container checkpoint --export /tmp/p.tar train > /tmp/said 2>&1; then
    cat /tmp/said; grep -h Error "$(podman inspect -f '{{.StaticDir}}' train)/dump.log"; exit 1
fi
pod rm -f -t 0 train > /dev/null
if ! pod container restore --import /tmp/p.tar --keep > /tmp/said 2>&1; then
    cat /tmp/said; find /var/lib/containers -name restore.log -exec grep -h Error {} +; exit 1
fi
touch /srv/app/finish
ended() { [ "$(podman inspect -f '{{.State.Status}}' train)" = exited ]; }
wait_for ended || { printed train | tail; exit 1; }
[ "$(podman inspect -f '{{.State.ExitCode}}' train)" = 0 ] || { printed train | tail -n 20; exit 1; }
printed train > /tmp/restored
cmp /tmp/whole /tmp/restored || { diff /tmp/whole /tmp/restored | head; exit 1; }
echo "ok: $steps losses, bit for bit"
