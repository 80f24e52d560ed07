# killed.sh: cryopod pack and unpack killed at 8 random points each: nothing under the final name, a second run succeeds, and
# what it made is whole.
mkdir -p /tmp/in/checkpoint
printf '{"id":"a","name":"job","lockID":1,"runtime":"crun"}' > /tmp/in/config.dump
printf '{}' > /tmp/in/spec.dump
printf '\x19CVT\x16\x311X\0\0\0\0' > /tmp/in/checkpoint/inventory.img
head -c 24M /dev/urandom > /tmp/in/checkpoint/pages-1.img
seq 10000000 12000000 > /tmp/in/checkpoint/pages-2.img
cryopod pack -q /tmp/in -o oci:/tmp/image

whole() { # PLACE
    case $1 in
        /tmp/out/directory) diff -r /tmp/in "$1" ;;
        *) cryopod verify -q "$1" ;;
    esac
}
killed() { # NAME PATH COMMAND...: kills it at points spread over the time that it takes
    local name=$1 path=$2 took=1000000 from ms pause i left early=0 && shift 2
    mkdir -p /tmp/out
    for i in 1 2 3; do
        from=$(date +%s%N)
        "$@" > /dev/null
        ms=$((($(date +%s%N) - from) / 1000000))
        [ "$ms" -ge "$took" ] || took=$ms
        rm -rf "$path"
    done
    for i in $(seq 8); do
        pause=$(awk -v ms=$((RANDOM % (took + 1))) 'BEGIN {print ms / 1000}')
        from=$(date +%s%N)
        "$@" > /dev/null 2>&1 &
        sleep "$pause"
        kill -KILL $! 2> /dev/null || true
        wait $! 2> /dev/null || true
        ms=$((($(date +%s%N) - from) / 1000000))
        # Past its last step it has its name, and is whole. Then it takes less time by now: no more than it has had.
        if [ -e "$path" ]; then
            whole "$path" || return 1
            took=$((took * 9 / 10))
            [ "$ms" -ge "$took" ] || took=$ms
        else
            early=$((early + 1))
        fi
        rm -rf "$path"
        if [ $((i % 4)) = 0 ]; then
            "$@" > /dev/null && whole "$path" || return 1
            left=$(find /tmp/out -mindepth 1 -maxdepth 1 ! -path "$path")
            [ -z "$left" ] || { echo "left: $left" && return 1; }
            rm -rf "$path"
        fi
    done
    echo "$name: $early of 8 before the end ($took ms)"
    [ "$early" -ge 2 ]
}
check 'pack to a layout' killed 'pack to a layout' /tmp/out/layout cryopod pack -q /tmp/in -o oci:/tmp/out/layout
check 'pack to an archive' killed 'pack to an archive' /tmp/out/a.tar cryopod pack -q /tmp/in -o oci-archive:/tmp/out/a.tar
check 'pack an image' killed 'pack an image' /tmp/out/a.tar.zst cryopod pack -q oci:/tmp/image -o /tmp/out/a.tar.zst
check 'unpack' killed unpack /tmp/out/directory cryopod unpack -q oci:/tmp/image -o /tmp/out/directory

# how far it is: a bar on a terminal, nothing of it elsewhere
script -qec 'TERM=xterm cryopod pack /tmp/in -o oci:/tmp/bar --level 18' /tmp/said > /dev/null
check 'progress: bytes, rate, time left' says /tmp/said 'pack .*iB/[0-9.]+ MiB .*/s .* left'
cryopod pack /tmp/in -o oci:/tmp/bar --replace --level 18 > /dev/null 2> /tmp/said
check 'progress: no bar without a terminal' sh -c '! grep -q "iB/[0-9]" /tmp/said'
