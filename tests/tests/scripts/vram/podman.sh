# podman.sh: the VRAM files under podman with cryopod-runtime. After job.sh.
# shellcheck shell=bash disable=SC2154
mode=dev.cryopod.vram

run --annotation $mode=on --mib 100
last=$(sum)
pod container checkpoint --leave-running --export /tmp/job.tar job > /dev/null
check 'left running: it goes on' goes_on
check 'left running: durable after it was frozen' recorded '.gpu.vram.raw >= 100 and .timings.durable_us > .timings.dump_us'
for times in once twice; do
    pod container checkpoint --export /tmp/job.tar job > /dev/null
    pod rm -f -t 0 job > /dev/null
    check "$times: the metadata vouches for the VRAM files" recorded '.gpu.vram.digest | length == 64'
    pod container restore --import /tmp/job.tar > /dev/null
    check "$times: restored" goes_on
    # The processes share the agent's memory, and the driver begins before it has been read.
    check "$times: nothing is copied" eval '! grep -q "its memory is copied" "$(podman inspect -f "{{.StaticDir}}" job)/restore.log"'
    check "$times: the same sum" test "$(sum)" = "$last"
done

id=$(pod inspect -f '{{.Id}}' job)
cryopod-runtime checkpoint --leave-running --image-path /tmp/ahead --work-path /tmp/ahead "$id" > /tmp/said 2>&1
check 'its memory was allocated ahead' grep -Eq 'for the driver at .*, allocated ahead' /tmp/ahead/dump.log
check 'allocated ahead: it goes on' goes_on
rm -rf /tmp/ahead

# The image directory's disk is full in the middle of the VRAM files.
mkdir -p /tmp/small
for flag in '' --leave-running; do
    mount -t tmpfs -o size=40m tmpfs /tmp/small
    # shellcheck disable=SC2086
    if cryopod-runtime checkpoint $flag --image-path /tmp/small --work-path /tmp "$id" > /tmp/said 2>&1; then
        echo 'a checkpoint on a full disk' && exit 1
    fi
    # The VRAM files or CRIU, which writes at the same time, is told first.
    check "a full disk ($flag): said" grep -q 'the container goes on running: .*No space left on device' /tmp/said
    check "a full disk ($flag): no metadata" test ! -e /tmp/small/cryopod.json
    check "a full disk ($flag): it goes on" goes_on
    umount /tmp/small
done

# The writer is killed: with the container stopped for it, and when it runs again.
printf '[vram]\ncodec = "zstd"\nlevel = 19\n' >> /etc/cryopod/config.toml # slow enough to be met at work
kill_worker() { wait_for pgrep -f '^/proc/self/exe --vram-worker' > /dev/null && pkill -KILL -f '^/proc/self/exe --vram-worker'; }
for flag in '' --leave-running; do
    kill_worker &
    # shellcheck disable=SC2086
    if cryopod-runtime checkpoint $flag --image-path /tmp/killed --work-path /tmp "$id" > /tmp/said 2>&1; then
        echo 'a checkpoint whose writer was killed' && exit 1
    fi
    check "the writer is killed ($flag): said" grep -q 'goes on running: .*worker ended without an answer' /tmp/said
    check "the writer is killed ($flag): nothing that verifies" sh -c '[ ! -e /tmp/killed/cryopod.json ] && [ ! -e /tmp/killed/vram-index.img ] && ! cryopod verify /tmp/killed 2> /dev/null'
    check "the writer is killed ($flag): it goes on" goes_on
    rm -rf /tmp/killed
done
sed -i '/^\[vram\]/,$d' /etc/cryopod/config.toml

# The driver agent is killed while the driver moves the memory: another one brings the process back.
set_switch hang-checkpoint:1
cryopod-runtime checkpoint --image-path /tmp/killed --work-path /tmp "$id" > /tmp/said 2>&1 &
taking=$!
wait_for hangs_at hang-checkpoint
pkill -KILL -x cryopod-cuda-ag
clear_switches
if wait $taking; then echo 'a checkpoint whose agent was killed' && exit 1; fi
check 'the agent is killed: said' grep -q 'goes on running: .*agent ended unexpectedly' /tmp/said
check 'the agent is killed: it goes on' goes_on
rm -rf /tmp/killed

sed 's/^MemAvailable:.*/MemAvailable:    1100000 kB/' /proc/meminfo > /tmp/meminfo
mount --bind /tmp/meminfo /proc/meminfo
no_room() { ! cryopod-runtime checkpoint --image-path /tmp/no "$id" > /tmp/said 2>&1 && grep -Eq 'goes on running: [0-9]+ MiB of host memory are needed' /tmp/said; }
check 'too little host memory: refused in the plan' no_room
umount /proc/meminfo
check 'too little host memory: nothing is left, and it goes on' sh -c '! ls /tmp/no/* 2> /dev/null'
goes_on

pod container checkpoint --export /tmp/job.tar job > /dev/null
pod rm -f -t 0 job > /dev/null
mkdir /tmp/open
tar -C /tmp/open -xf /tmp/job.tar
damage /tmp/open/checkpoint/vram-0000.img 5000000
tar -C /tmp/open -cf /tmp/bad.tar .
if pod container restore --import /tmp/bad.tar > /tmp/said 2>&1; then
    echo 'restored from a damaged archive' && exit 1
fi
check 'a damaged archive: nothing is left' wait_for sh -c '! pgrep -x cusim-client'
pod rm -f -t 0 job > /dev/null 2>&1 || true
pod container restore --import /tmp/job.tar > /dev/null
check 'the whole one: restored' goes_on

# cryopod's own import reads the GPU memory where it lies in the archive, unless the archive is compressed.
last=$(sum)
imports() { # ARCHIVE
    pod rm -f -t 0 job > /dev/null
    check "import $1" does cryopod import "$1" --restore -q
    check "import $1: it goes on" goes_on
    check "import $1: the same sum" test "$(sum)" = "$last"
    check "import $1: nothing is left" test -z "$(ls -A /run/cryopod/away)$(find /var/lib/containers/storage -maxdepth 1 -name '.cryopod-*')"
}
for archive in oci-archive:/tmp/job.oci.tar oci:/tmp/job.oci /tmp/job.tar.zst /tmp/plain.tar; do
    does cryopod export job -o "$archive" --leave-running -q
    imports "$archive"
done
# Where the first shard begins, in blocks of 512 bytes.
block=$(tar -tRf /tmp/plain.tar | sed -n 's/^block \([0-9]*\): checkpoint\/vram-0000.img$/\1/p')
damage /tmp/plain.tar $(((block + 10000) * 512))
pod rm -f -t 0 job > /dev/null
check 'import of a damaged archive: refused' refused 'chunk [0-9]+ does not fit its digest' cryopod import /tmp/plain.tar --restore -q
check 'import of a damaged archive: the archive is named' grep -q '/tmp/plain.tar: chunk' /tmp/said
check 'import of a damaged archive: nothing is left' wait_for sh -c '! pgrep -x cusim-client'
pod rm -f -t 0 job > /dev/null 2>&1 || true
cryopod import /tmp/job.tar.zst --restore -q > /dev/null
check 'import of the whole one: it goes on' goes_on
pod rm -f -t 0 job > /dev/null

run --annotation $mode=off --mib 100
pod container checkpoint --export /tmp/job.tar job > /dev/null
pod rm -f -t 0 job > /dev/null
check 'off: through CRIU' recorded '.gpu.vram == null'
pod container restore --import /tmp/job.tar > /dev/null
check 'off: restored' goes_on
pod rm -f -t 0 job > /dev/null
check 'no operation is left' test -z "$(ls -A -I away /run/cryopod)"
check 'no agent is left' wait_for sh -c '! pgrep cryopod-cuda'
