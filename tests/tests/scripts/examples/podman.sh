mkimage
low_level crun
IMAGE=localhost/busybox bash /src/examples/podman/move.sh --network none
