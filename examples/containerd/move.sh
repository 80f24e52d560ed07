#!/bin/bash
# move.sh [CTR-OPTION...]: checkpoints a container under containerd into an image, removes it, and restores it from the image.
# Needs root, containerd, ctr, CRIU, containerd-shim-cryopod-v2 and cryopod-runtime in containerd's PATH. IMAGE: default
# docker.io/library/busybox:latest, which `ctr images pull` has fetched.
set -euo pipefail
image=${IMAGE:-docker.io/library/busybox:latest} checkpoint=localhost/example:first
log=$(mktemp)
cleanup() {
    ctr tasks kill --signal KILL example > /dev/null 2>&1 || true
    sleep 0.5
    ctr tasks delete --force example > /dev/null 2>&1 || true
    ctr containers delete example > /dev/null 2>&1 || true
    ctr images rm "$checkpoint" > /dev/null 2>&1 || true
    rm -f "$log"
}
trap cleanup EXIT

ctr run --detach --runtime io.containerd.cryopod.v2 --log-uri "file://$log" "$@" "$image" example \
    sh -c 'i=0; while :; do echo $i; i=$((i + 1)); sleep 0.1; done'
sleep 2
ctr containers checkpoint --task --rw --image example "$checkpoint"
ctr tasks kill --signal KILL example
until ctr tasks ls | grep -q 'example.*STOPPED'; do sleep 0.1; done
last=$(tail -n 1 "$log")
ctr tasks delete example || true
ctr containers delete example
ctr containers restore --live example "$checkpoint"
sleep 2
echo "the first one ended at $last, the restored one is $(ctr tasks ls | awk '$1 == "example" {print $3}')"
ctr tasks ls | grep -q 'example.*RUNNING'
