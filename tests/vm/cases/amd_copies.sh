# amd_copies.sh LOW: a container on one GPU is checkpointed into an archive and goes on; a new container, created with that archive
# on another GPU, begins where the checkpoint ended, and both run.
# long
# runtimes: crun runc
# needs: amd
. /src/tests/amd/lib.sh
start "$1" vega-2
mkdir -m 700 /srv/checkpoints
setting restore 'allow = ["/srv/checkpoints"]'

gpu_run c1 128 -- -m 40
wait_for rounds c1 3
saved_or_not c1 /srv/checkpoints/c1.tar.zst --leave-running || { cat /tmp/said; exit 1; }
gpu_run copy 129 --annotation dev.cryopod.restore=/srv/checkpoints/c1.tar.zst -- -m 40
begun() { [ -n "$(count copy)" ]; }
wait_for begun
first=$(printed copy | head -n 1)
[ "$first" -ge 3 ] || { echo "the copy begins at $first" && exit 1; }
wait_for rounds copy $((first + 5))
stays c1
gpus_of copy 128 129 > /tmp/copy
says /tmp/copy '^/dev/dri/renderD129 e2:81 opens$'
says /tmp/copy '^226:129 opens$'
says /tmp/copy '^226:128 Operation not permitted$'
echo "a copy from $first"
