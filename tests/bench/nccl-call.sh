#!/bin/bash
# nccl-call.sh BIN_DIR: what the preload library adds to a call of NCCL, in nanoseconds, with and without it in turns. NCCL
# is a library that does nothing; a GPU is not needed. `make bench` starts it.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
library=$(readlink -f "$1")/libcryopod_preload.so
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cc -O2 -w -shared -fPIC -DSTUB -Wl,-soname,libnccl.so.2 -o "$work/libnccl.so.2" "$here/nccl-call.c"
cc -O2 -w -o "$work/call" "$here/nccl-call.c" "$work/libnccl.so.2" -Wl,-rpath,"$work"
for _ in 1 2 3 4 5; do
    "$work/call" >> "$work/without"
    LD_PRELOAD=$library "$work/call" >> "$work/with"
done
median() { sort -n "$1" | sed -n 3p; }
printf '\n| a call of NCCL, ns, median of 5 | without | with the preload library |\n|---|---|---|\n| ncclAllReduce | %s | %s |\n' \
    "$(median "$work/without")" "$(median "$work/with")"
