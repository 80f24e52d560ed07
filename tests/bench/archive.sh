#!/bin/bash
# archive.sh: how fast `cryopod pack` and `unpack` are, plain and encrypted, beside podman's own export, tar with zstd, and tar
# with pigz, in turns, best and median of several rounds (pigz and podman once). cryopod's times have digests, checksums and the sync to disk in them; the
# others have no digests and do not sync. podman's is the stage after CRIU, by its own statistics.
#
# Runs in the test bed (make bench-archive) or wherever podman, criu, tar and zstd are; takes pigz and age-keygen where they are.
#
#   GIB      of memory in the container (4); ROUNDS of each (3); PODMAN_ROUNDS (1)
#   KINDS    noise: does not compress; half: every other 256 KiB does; mixed: half of every page does (noise half)
#   PIGZ     0: without pigz (1)
#   FILES    processes that have it, each of which becomes a file (1)
#   WORK     a directory with room for five times GIB (/var/tmp)
set -euo pipefail

gib=${GIB:-4} rounds=${ROUNDS:-3} podman_rounds=${PODMAN_ROUNDS:-1} files=${FILES:-1} pigz=${PIGZ:-1}
unset PIGZ # pigz would take options from it
cryopod=${CRYOPOD:-cryopod} pages=${BENCH_PAGES:-/opt/build/bench-pages}
work=$(mktemp -d "${WORK:-/var/tmp}/cryopod-bench.XXXXXX")
pod=(podman --root "$work/storage" --runroot "$work/run" --runtime crun)
end() {
    "${pod[@]}" rm -f -t 0 -a > /dev/null 2>&1 || true
    "${pod[@]}" unmount -a > /dev/null 2>&1 || true
    umount "$work/storage/overlay" 2> /dev/null || true
    rm -rf "$work"
}
trap end EXIT
cd "$work"

# An image of empty directories, on which this machine's programs are mounted.
mkdir -p tree/{usr,dev,proc,sys,run,tmp,etc,data}
for dir in bin sbin lib lib64; do ln -s "usr/$dir" "tree/$dir"; done
tar -C tree -c . | "${pod[@]}" import -q - localhost/bench > /dev/null

recipient=''
if type -P age-keygen > /dev/null; then
    age-keygen -o key 2> /dev/null
    recipient=$(age-keygen -y key)
    printf '[encrypt]\nidentities = ["%s/key"]\n' "$work" > config.toml
    chmod 600 config.toml
    export CRYOPOD_CONFIG=$work/config.toml
fi

declare -A all note
# timed KEY COMMAND...
timed() {
    local key=$1 from to code=0
    shift
    sync
    from=$(date +%s%N)
    bash -c "set -o pipefail; $*" > log 2>&1 || code=$?
    to=$(date +%s%N)
    [ "$code" = 0 ] || { cat log >&2 && echo "archive.sh: failed: $*" >&2 && exit 1; }
    all[$key]+="$(((to - from) / 1000000)) "
}
# peak COMMAND...: the most memory that it had, in MiB
peak() {
    local pid kib=0 now
    "$@" > log 2>&1 &
    pid=$!
    while now=$(awk '/^VmHWM/{print $2}' "/proc/$pid/status" 2> /dev/null) && [ -n "$now" ]; do
        kib=$now
        sleep 0.02
    done
    wait "$pid"
    echo $((kib / 1024))
}
sorted() { tr ' ' '\n' <<< "$1" | grep . | sort -n; }
median() { sorted "$1" | awk '{v[NR] = $1} END {print v[int((NR + 1) / 2)]}'; }
report() { # KEY BYTES BASE
    awk -v key="${1#* }" -v best="$(sorted "${all[$1]}" | sed q)" -v mid="$(median "${all[$1]}")" -v bytes="$2" \
        -v base="$(median "${all[$3]}")" -v note="${note[$1]:-}" 'BEGIN {
        printf "| %-22s | %7.2f | %7.2f | %5.2f | %5.2f | %s |\n", key, best / 1000, mid / 1000, bytes / mid / 1e6, base / mid, note }'
}
warm() { find "$@" -type f -exec cat {} + > /dev/null; }
bytes_of() { find "$1" -type f -exec stat -c %s {} + | awk '{n += $1} END {printf "%.0f", n}'; }
mib() { echo $(($(bytes_of "$1") >> 20)); }

# podman_stage KIND: a container with such memory, podman's export of it, and the images of that as the directory KIND.
podman_stage() {
    local kind=$1 n stage
    mkdir data
    "$pages" fill "$kind" data "$files" $((gib * 1024 / files))
    "${pod[@]}" run -d --name bench --network none --pids-limit 0 --volume /usr:/usr:ro,bind --volume "$pages":/bench-pages:ro \
        --volume "$work/data":/data localhost/bench /bench-pages hold /data "$files" > /dev/null
    for ((n = 0; n < 6000; n++)); do
        if [ -e data/ready ]; then break; fi
        sleep 0.1
    done
    [ -e data/ready ] || { "${pod[@]}" logs bench >&2 && echo "archive.sh: the container is not ready" >&2 && exit 1; }
    find data -type f ! -name ready -exec rm {} + # their content is in memory
    for ((n = 0; n < podman_rounds; n++)); do
        rm -f podman.tar.zst
        sync
        "${pod[@]}" container checkpoint --leave-running --print-stats --export podman.tar.zst bench > stats.json ||
            { find storage -name dump.log -exec grep -h Error {} + | tail -n 5 >&2 && exit 1; }
        stage=$(jq '(.podman_checkpoint_duration - .container_statistics[0].runtime_checkpoint_duration) / 1000 | floor' stats.json)
        all["$kind podman's export stage"]+="$stage "
    done
    note["$kind podman's export stage"]="$(mib podman.tar.zst) MiB"
    "${pod[@]}" rm -f -t 0 bench > /dev/null
    "$cryopod" unpack --quiet podman.tar.zst -o "$kind"
    rm -rf data podman.tar.zst
}

echo "machine: $(nproc) cores, $(awk -F: '/model name/{print $2; exit}' /proc/cpuinfo), $(awk '/MemTotal/{printf "%d GiB", $2 / 1048576}' /proc/meminfo), kernel $(uname -r), files on $(stat -f -c %T .)"
echo "versions: $("$cryopod" --version), $(podman --version), $(criu --version | sed q), $(tar --version | sed q), zstd $(zstd --version | grep -o 'v[0-9.]*'); load $(cut -d' ' -f1 /proc/loadavg) at the start"
for kind in ${KINDS:-noise half}; do
    podman_stage "$kind"
    bytes=$(bytes_of "$kind")
    for ((round = 0; round < rounds; round++)); do
        warm "$kind"
        timed "$kind pack to a layout" "$cryopod pack --quiet $kind -o oci:layout"
        note["$kind pack to a layout"]="$(mib layout) MiB"
        warm layout
        timed "$kind unpack of a layout" "$cryopod unpack --quiet oci:layout -o out"
        if [ "$round" = 0 ]; then diff -r "$kind" out; fi
        rm -rf out layout
        if [ -n "$recipient" ]; then
            warm "$kind"
            timed "$kind pack, encrypted" "$cryopod pack --quiet $kind -o oci:layout --encrypt-to $recipient"
            warm layout
            timed "$kind unpack, encrypted" "$cryopod unpack --quiet oci:layout -o out"
            if [ "$round" = 0 ]; then diff -r "$kind" out; fi
            rm -rf out layout
        fi
        warm "$kind"
        timed "$kind pack to .tar.zst" "$cryopod pack --quiet $kind -o out.tar.zst"
        note["$kind pack to .tar.zst"]="$(mib out.tar.zst) MiB"
        warm out.tar.zst
        timed "$kind unpack of .tar.zst" "$cryopod unpack --quiet out.tar.zst -o out"
        rm -rf out out.tar.zst
        warm "$kind"
        timed "$kind tar, zstd -T0 -1" "tar -C $kind -c . | zstd -q -T0 -1 > out.tar.zst"
        note["$kind tar, zstd -T0 -1"]="$(mib out.tar.zst) MiB"
        warm out.tar.zst
        mkdir out
        timed "$kind tar --zstd -x" "tar -C out --zstd -xf out.tar.zst"
        rm -rf out out.tar.zst
        if [ "$round" = 0 ] && [ "$pigz" = 1 ] && type -P pigz > /dev/null; then # once, as it takes half a minute a GiB on two cores
            warm "$kind"
            timed "$kind tar, pigz" "tar -C $kind -c . | pigz > out.tar.gz"
            note["$kind tar, pigz"]="$(mib out.tar.gz) MiB"
            rm -f out.tar.gz
        fi
    done
    note["$kind pack to a layout"]+=", memory $(peak "$cryopod" pack --quiet "$kind" -o oci:layout) MiB"
    note["$kind unpack of a layout"]="memory $(peak "$cryopod" unpack --quiet oci:layout -o out) MiB"
    rm -rf layout out "$kind"
    echo
    echo "$kind: $gib GiB in $files files; load $(cut -d' ' -f1 /proc/loadavg)"
    echo "| | best, s | median, s | GB/s | times | |"
    echo "|---|---|---|---|---|---|"
    for what in "podman's export stage" 'tar, pigz' 'tar, zstd -T0 -1' 'pack to .tar.zst' 'pack to a layout' 'pack, encrypted'; do
        if [ -n "${all["$kind $what"]:-}" ]; then report "$kind $what" "$bytes" "$kind tar, zstd -T0 -1"; fi
    done
    for what in 'tar --zstd -x' 'unpack of .tar.zst' 'unpack of a layout' 'unpack, encrypted'; do
        if [ -n "${all["$kind $what"]:-}" ]; then report "$kind $what" "$bytes" "$kind tar --zstd -x"; fi
    done
done
