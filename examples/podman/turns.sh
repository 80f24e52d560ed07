#!/bin/bash
# turns.sh [PODMAN-OPTION...]: two containers take turns on one GPU, each with its memory in host memory meanwhile. Needs root,
# podman, cryopod, and room for both in /etc/cryopod/config.toml: `[suspend] keep = GIB`. IMAGE: default
# docker.io/pytorch/pytorch. COMMAND: what each runs and answers in its log, default 8 GiB of weights. TURNS: default 3. For a GPU:
# `turns.sh --device nvidia.com/gpu=all`.
set -euo pipefail
image=${IMAGE:-docker.io/pytorch/pytorch}
read -ra command <<< "${COMMAND:-}"
if [ ${#command[@]} = 0 ]; then
    command=(python3 -uc 'import time, torch
weights = torch.rand(1 << 31, device="cuda")
while True:
    print(weights.sum().item())
    time.sleep(0.05)')
fi
podman() { command podman --runtime "$(type -P cryopod-runtime)" "$@"; }
cleanup() { podman rm --force --time 0 one two > /dev/null 2>&1 || true; }
trap cleanup EXIT
answers() { # CONTAINER: waits until it answers again
    local before && before=$(podman logs "$1" 2> /dev/null | wc -l)
    until [ "$(podman logs "$1" 2> /dev/null | wc -l)" -gt "$before" ]; do sleep 0.02; done
}

for name in one two; do
    podman run --detach --name $name --annotation dev.cryopod.preload=on "$@" "$image" "${command[@]}"
    answers $name
    cryopod suspend $name
done
cryopod resume one
for turn in $(seq "${TURNS:-3}"); do
    for names in 'one two' 'two one'; do
        read -r from to <<< "$names"
        start=$(date +%s%N)
        cryopod resume --instead-of "$from" "$to"
        answers "$to"
        echo "turn $turn: $to answers $((($(date +%s%N) - start) / 1000000)) ms after $from had to stop"
    done
done
