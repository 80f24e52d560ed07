#!/bin/bash
# suspend.sh [DOCKER-OPTION...]: checkpoints a container under docker, and starts it again from the checkpoint. Needs root,
# docker with `"experimental": true` and the runtime `cryopod` in daemon.json, the shim in place of containerd's
# (docs/containerd.md), CRIU. IMAGE: default busybox. For a container with GPUs add the options of `docker run`, say
# `--device /dev/nvidia0 --device /dev/nvidiactl --device /dev/nvidia-uvm`.
set -euo pipefail
image=${IMAGE:-busybox}
cleanup() { docker rm --force example > /dev/null 2>&1 || true; }
trap cleanup EXIT
numbers() { docker logs example 2> /dev/null; }

docker run --detach --name example --runtime cryopod "$@" "$image" sh -c 'i=0; while :; do echo $i; i=$((i + 1)); sleep 0.1; done'
sleep 2
docker checkpoint create example first
last=$(numbers | tail -n 1)
docker start --checkpoint first example
until [ "$(numbers | wc -l)" -ge $((last + 4)) ]; do sleep 0.2; done
echo "stopped at $last, goes on with $(numbers | tail -n "+$((last + 2))" | head -n 3 | tr '\n' ' ')"
[ "$(numbers | sed -n "$((last + 2))p")" = $((last + 1)) ]
