#!/bin/bash
# archive.sh [GIB [ROUNDS]]: how fast `cryopod pack` and `unpack` are beside tar with zstd and pigz, in turns, best and
# median of ROUNDS (3), for GIB (4) of pages that do not compress and of pages of which half does. cryopod's times have
# digests, checksums and the sync to disk in them, the others' have none of these.
#
# Needs cryopod, tar and zstd, and takes pigz where it is; WORK is a folder with room for four times GIB.
set -euo pipefail

gib=${1:-4} rounds=${2:-3}
cryopod=${CRYOPOD:-cryopod}
work=$(mktemp -d "${WORK:-/var/tmp}/cryopod-bench.XXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work"

# Pages as CRIU writes them, with what makes a folder of images a checkpoint around them.
images() { # NAME
    mkdir -p "$1/checkpoint"
    printf '{"id":"bench","name":"bench","lockID":1,"runtime":"crun"}' > "$1/config.dump"
    printf '{}' > "$1/spec.dump"
    printf '\x19CVT\x16\x311X\0\0\0\0' > "$1/checkpoint/inventory.img"
}
noise() { # MIB
    head -c "$(($1 << 20))" /dev/urandom
}
words() { # MIB: numbers in text, which zstd takes to about a tenth
    seq 1000000000 9000000000 | head -c "$(($1 << 20))"
}
make_noise() {
    images noise
    noise $((gib * 1024)) > noise/checkpoint/pages-1.img
}
make_half() { # 256 KiB of noise, 256 KiB of words, and so on
    images half
    mkfifo a b
    noise $((gib * 512)) > a &
    words $((gib * 512)) > b &
    exec 3< a 4< b
    for ((i = 0; i < gib * 2048; i++)); do
        head -c 262144 <&3
        head -c 262144 <&4
    done > half/checkpoint/pages-1.img
    exec 3<&- 4<&-
    rm a b
}

declare -A all
# timed KEY COMMAND...: with everything written to disk counted in by those that do that
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
        sleep 0.05
    done
    wait "$pid"
    echo $((kib / 1024))
}
report() { # KEY BYTES
    local sorted n
    mapfile -t sorted < <(tr ' ' '\n' <<< "${all[$1]}" | grep . | sort -n)
    n=${#sorted[@]}
    awk -v key="$1" -v best="${sorted[0]}" -v mid="${sorted[$((n / 2))]}" -v bytes="$2" 'BEGIN {
        printf "| %-34s | %6.2f | %6.2f | %5.2f |\n", key, best / 1000, mid / 1000, bytes / mid / 1e6 }'
}

echo "machine: $(nproc) cores, $(awk -F: '/model name/{print $2; exit}' /proc/cpuinfo), $(awk '/MemTotal/{printf "%d GiB", $2 / 1048576}' /proc/meminfo), kernel $(uname -r), $(stat -f -c %T .)"
echo "versions: $($cryopod --version), $(tar --version | head -1), $(zstd --version | grep -o 'v[0-9.]*'), load $(cut -d' ' -f1 /proc/loadavg)"
make_noise
make_half
bytes=$((gib << 30))
for data in noise half; do
    cat "$data/checkpoint/pages-1.img" > /dev/null
    for ((round = 0; round < rounds; round++)); do
        rm -rf out layout
        timed "$data pack oci" "$cryopod pack --quiet $data -o oci:layout"
        rm -rf out
        timed "$data unpack oci" "$cryopod unpack --quiet oci:layout -o out"
        cmp "$data/checkpoint/pages-1.img" out/checkpoint/pages-1.img
        all["$data size"]=$(du -sm layout | cut -f1)
        rm -rf out layout
        timed "$data pack tar.zst" "$cryopod pack --quiet $data -o out.tar.zst"
        timed "$data unpack tar.zst" "$cryopod unpack --quiet out.tar.zst -o out"
        rm -rf out out.tar.zst
        timed "$data tar | zstd -T0 -1" "tar -C $data -c . | zstd -q -T0 -1 > out.tar.zst"
        mkdir out
        timed "$data tar --zstd -x" "tar -C out --zstd -xf out.tar.zst"
        rm -rf out out.tar.zst
        if type -P pigz > /dev/null; then
            timed "$data tar | pigz" "tar -C $data -c . | pigz > out.tar.gz"
            rm -f out.tar.gz
        fi
    done
    pack=$(peak "$cryopod" pack --quiet "$data" -o oci:layout)
    unpack=$(peak "$cryopod" unpack --quiet oci:layout -o out)
    rm -rf layout out
    echo
    echo "$data: $gib GiB; a layout of ${all["$data size"]} MiB; peak memory: pack $pack MiB, unpack $unpack MiB"
    echo "| | best, s | median, s | GB/s |"
    echo "|---|---|---|---|"
    for what in 'pack oci' 'pack tar.zst' 'tar | zstd -T0 -1' 'tar | pigz' 'unpack oci' 'unpack tar.zst' 'tar --zstd -x'; do
        if [ -n "${all["$data $what"]:-}" ]; then report "$data $what" "$bytes"; fi
    done
done
