mkimage
low_level runc
fake_gpu_nodes
mount --bind /opt/torch /opt/torch && mount -o remount,bind,ro /opt/torch
mapfile -t environment < /opt/torch/environment
python=(-v /usr:/usr:ro -v /usr/lib64:/lib64:ro -v /usr/lib/x86_64-linux-gnu:/lib/x86_64-linux-gnu:ro -v /opt/torch:/opt/torch:ro)
for variable in "${environment[@]}"; do python+=(-e "$variable"); done
IMAGE=localhost/busybox PYTHON=/usr/bin/python3 bash /src/examples/pytorch/compare.sh --network none --device /dev/nvidia0 --security-opt seccomp=unconfined "${python[@]}"
