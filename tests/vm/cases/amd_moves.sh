# amd_moves.sh LOW: containers that see a part of the machine's GPUs; restored on the same ones, on others of the machine, and on
# machines with another topology: their sums go on, and nodes and rules inside are those of the new GPUs.
# long
# runtimes: crun runc
# needs: amd
. /src/tests/amd/lib.sh
start "$1" mi210-8

half='128 129 130 131' other='132 133 134 135'
gpu_run c1 "$half" -- -p 2
wait_for rounds c1 3
gpus_of c1 $half $other > /tmp/before
saved c1 /tmp/c1.tar.zst
back c1 /tmp/c1.tar.zst
gpus_of c1 $half $other > /tmp/after
cmp /tmp/before /tmp/after
pod rm -f -t 0 c1 > /dev/null
echo "a part of the machine's GPUs: on from $before"

# The other hive: the plugin chooses who goes where in it. Where that is not the wish, the error has its map.
cp /etc/cryopod/config.toml /tmp/config.toml
setting gpu 'map = "renderD128=renderD132"'
if ! pod container restore --import /tmp/c1.tar.zst > /tmp/said 2>&1; then
    cat /tmp/said
    map=$(grep -om1 'gpu.map=0x[0-9a-fx=,]*' /tmp/said)
    podman rm -f -t 0 -a > /dev/null
    cp /tmp/config.toml /etc/cryopod/config.toml
    setting gpu "map = \"${map#*=}\""
    back c1 /tmp/c1.tar.zst
else
    wait_for rounds c1 $((before + 5))
fi
gpus_of c1 $half $other > /tmp/after
for minor in $other; do
    says /tmp/after "^/dev/dri/renderD$minor e2:$(printf %x "$minor") opens$"
    says /tmp/after "^226:$minor opens$"
done
for minor in $half; do
    says /tmp/after "^/dev/dri/renderD$minor e2:8[4-7] opens$"
    says /tmp/after "^226:$minor Operation not permitted$"
done
echo "on other GPUs of the machine: on from $before"

# The processes still know their GPUs by the ids of the old ones. CRIU's plugin takes those for the ids of the machine's, and
# saves no memory.
if saved_or_not c1 /tmp/c2.tar.zst; then echo "a checkpoint without the GPUs' memory was taken" && exit 1; fi
says /tmp/said "checkpoint of .* failed and the container goes on running: .*amdgpu-pages-"
stays c1
pod rm -f -t 0 c1 > /dev/null
cp /tmp/config.toml /etc/cryopod/config.toml

machine mi210-4
predicts /tmp/c1.tar.zst 0
back c1 /tmp/c1.tar.zst
saved c1 /tmp/c2.tar.zst
echo "on a machine of half the size: on from $before"
like moved mi210-8 's/^node \([0-9]*\) 4/node \1 5/'
machine moved
back c1 /tmp/c2.tar.zst
gpus_of c1 $half > /tmp/after
for minor in $half; do says /tmp/after "^226:$minor opens$"; done
echo "on a machine of twice the size, whose GPUs have other ids: on from $before"
pod rm -f -t 0 c1 > /dev/null
machine mi250x-8
not_back /tmp/c2.tar.zst 'device_id'
predicts /tmp/c2.tar.zst 1
machine vega-2
not_back /tmp/c2.tar.zst 'GPU count'
predicts /tmp/c2.tar.zst 1
