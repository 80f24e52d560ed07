# cost.sh: what our shim adds to containerd's own: memory of its process, time of a container's run, of twenty at once.
# Prints lines of NAME VALUE; `make bench` shows them.
low_level runc
containerd_up
images
now() { date +%s%N; }
median() { sort -n | awk '{v[NR] = $1} END {print v[int((NR + 1) / 2)]}'; }
pss() { awk '/^Pss:/ {print $2}' "/proc/$1/smaps_rollup"; }
one() { # RUNTIME N: milliseconds of a run from its start to its end
    local at
    at=$(now)
    ctr run --rm --null-io --runtime "$1" $image "r$2" true < /dev/null
    echo $((($(now) - at) / 1000))
}
for n in $(seq 41); do
    one $STOCK "s$n" >> /tmp/stock.us
    one $OURS "o$n" >> /tmp/ours.us
done
stock=$(median < /tmp/stock.us) ours=$(median < /tmp/ours.us)
echo "run_stock_us $stock"
echo "run_cryopod_us $ours"
echo "run_added_us $((ours - stock))"
many() { # RUNTIME TAG: milliseconds until twenty run
    local at n starting=()
    at=$(now)
    for n in $(seq 20); do
        ctr run -d --null-io --runtime "$1" $image "m$2$n" sleep 1000 > /dev/null 2>&1 &
        starting[n]=$!
    done
    wait "${starting[@]}"
    echo $((($(now) - at) / 1000000))
    if [ "$1" = $OURS ] && [ "$2" = o1 ]; then
        for n in $(seq 20); do pss "$(our_shim "m$2$n")"; done | median > /tmp/pss
    fi
    for n in $(seq 20); do ctr tasks delete -f "m$2$n" > /dev/null 2>&1 && ctr containers rm "m$2$n" & starting[n]=$!; done
    wait "${starting[@]}"
}
for round in 1 2 3 4 5; do
    many $STOCK "s$round" >> /tmp/stock.ms
    many $OURS "o$round" >> /tmp/ours.ms
done
echo "twenty_stock_ms $(median < /tmp/stock.ms)"
echo "twenty_cryopod_ms $(median < /tmp/ours.ms)"
echo "pss_kib $(cat /tmp/pss)"
ctr run -d --null-io --runtime $OURS $image alone sleep 1000
echo "pss_alone_kib $(pss "$(our_shim alone)")"
