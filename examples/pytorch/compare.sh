#!/bin/bash
# compare.sh [PODMAN-OPTION...]: trains once without and once through a checkpoint, and compares the losses. Needs root, podman,
# CRIU, cryopod-runtime, and an image with PyTorch. IMAGE: default docker.io/pytorch/pytorch. PYTHON: in the image, default python3.
# With a GPU: `compare.sh --device nvidia.com/gpu=all`.
set -euo pipefail
image=${IMAGE:-docker.io/pytorch/pytorch} python=${PYTHON:-python3} steps=${STEPS:-200}
here=$(dirname "$(readlink -f "$0")")
work=$(mktemp -d)
podman() { command podman --runtime "$(type -P cryopod-runtime)" "$@"; }
cleanup() { podman rm --force --time 0 train > /dev/null 2>&1 || true; rm -rf "$work"; }
trap cleanup EXIT
run() { podman run "$@" "$image" "$python" /example/train.py "$steps"; }
options=(-v "$here:/example:ro" "$@")

run --rm "${options[@]}" > "$work/whole"
run --detach --name train "${options[@]}"
until [ "$(podman logs train | wc -l)" -ge $((steps / 4)) ]; do sleep 0.2; done
podman container checkpoint --export "$work/train.tar.zst" train
podman rm train
podman container restore --import "$work/train.tar.zst"
podman wait train > /dev/null
podman logs train > "$work/restored"
cmp "$work/whole" "$work/restored"
echo "$steps losses, the same bit for bit"
