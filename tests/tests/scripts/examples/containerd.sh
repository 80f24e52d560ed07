containerd_up
images
IMAGE=$image bash /src/examples/containerd/move.sh
