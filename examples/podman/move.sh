#!/bin/bash
# move.sh [PODMAN-OPTION...]: checkpoints a container under podman into a file, removes it, and restores it from the file.
# Needs root, podman, CRIU, runc or crun, and cryopod-runtime. IMAGE: default docker.io/library/busybox. For a container with
# GPUs add the options of `podman run`, say `--device nvidia.com/gpu=all`.
set -euo pipefail
image=${IMAGE:-docker.io/library/busybox}
archive=$(mktemp --suffix .tar.zst)
podman() { command podman --runtime "$(type -P cryopod-runtime)" "$@"; }
cleanup() { podman rm --force --time 0 example > /dev/null 2>&1 || true; rm -f "$archive"; }
trap cleanup EXIT

podman run --detach --name example "$@" "$image" sh -c 'i=0; while :; do echo $i; i=$((i + 1)); sleep 0.1; done'
sleep 2
podman container checkpoint --export "$archive" example
last=$(podman logs example | tail -n 1)
podman rm example
podman container restore --import "$archive"
until [ "$(podman logs example | wc -l)" -ge $((last + 4)) ]; do sleep 0.2; done
echo "stopped at $last, goes on with $(podman logs example | tail -n "+$((last + 2))" | head -n 3 | tr '\n' ' ')"
[ "$(podman logs example | sed -n "$((last + 2))p")" = $((last + 1)) ]
