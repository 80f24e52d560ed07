# criu.sh: GPU memory that goes by the VRAM files, with CRIU alone.
simulate
on='{"vram": {"required": true}}'
vram() { jq -e "$1" /run/op/dump/plugin-report.json > /dev/null || { cat /run/op/dump/plugin-report.json && false; }; }
# CRIU's own images of memory are small: the VRAM files' contents are not among them.
small() { [ "$(cat /img/pages-*.img | wc -c)" -lt $((32 << 20)) ]; }
# Nothing of the VRAM files is left in the process once it runs.
unmapped() { ! grep -q 'deleted' "/proc/$(pgrep -x cusim-client | head -n 1)/maps"; }
cycle() { # NAME JQ-CONDITION cusim-client ARG...
    local name=$1 holds=$2 last && shift 2
    start "$@"
    last=$(tail -n 1 /tmp/out | cut -d' ' -f2)
    dump "$on"
    check "$name: as it should be" vram "$holds"
    check "$name: not in CRIU's images" small
    restore "$on"
    check "$name: restored" goes_on
    check "$name: the same sum" test "$(tail -n 1 /tmp/out | cut -d' ' -f2)" = "$last"
    check "$name: nothing is left of it" unmapped
    stop
}
cycle random '.vram.facts | .raw >= 100 and .stored_bytes > 100 * 1048576' --mib 100
cycle zero '.vram.facts | .raw <= 1 and .stored_bytes <= 1048576' --mib 100 --content zero
cycle half '.vram.facts | .stored_bytes > 45 * 1048576 and .stored_bytes < 60 * 1048576' --mib 100 --content half
cycle '3 GiB' '.vram.facts | .bytes > 3 * 1073741824 and .stored_bytes < 104857600' --mib 3072 --chunk-mib 512 --content zero
cycle '1 GiB random' '.vram.facts | .stored_bytes > 1063004405' --mib 1024 --chunk-mib 512
# Written while the driver fills it; what was taken too early is written again. It is filled again once some of it was written.
written() { [ -n "$(find /img -name 'vram-0*.img' -size +0)" ]; }
for fill in down twice; do
    export CUSIM_FILL=$fill
    rm -rf /img/*
    if [ $fill = twice ]; then (wait_for written && touch /tmp/cusim-second-fill) & fi
    cycle "filled $fill" '.vram.facts.stored_bytes > 400 * 1048576' --mib 400
    check "filled $fill: all is there once" vram ".vram.changed $([ $fill = twice ] && echo '> 0' || echo '>= 0')"
done
unset CUSIM_FILL
cycle 'two processes on two GPUs' '.processes | length == 2 and all(.vram | length == 1)' --mib 80 --procs 2 --gpus 0,1

start --mib 0
dump '{"vram": {}}'
check 'no memory: through CRIU' vram '.vram == null'
restore '{"vram": {}}'
check 'no memory: restored' goes_on
stop

start --mib 1
dump '{"vram": {}}'
check 'too small: through CRIU' vram '.vram == null'
restore '{"vram": {}}'
check 'too small: restored' goes_on
stop

start --mib 100
last=$(tail -n 1 /tmp/out | cut -d' ' -f2)
for times in once twice; do
    rm -rf /img/*
    dump '{"vram": {"required": true, "codec": "zstd"}, "leave_running": true}' --leave-running
    check "left running, $times: it goes on" goes_on
    check "left running, $times: nothing is left of it" unmapped
done
check 'left running: the same sum' test "$(tail -n 1 /tmp/out | cut -d' ' -f2)" = "$last"
stop

# The driver begins while the VRAM files are being read; the process waits where it touches what is not there yet.
reader='^/proc/self/exe --vram-worker'
reader_gets() { # SIGNAL: stops the reader, and sends it SIGNAL once the driver is at work
    until pkill -STOP -f "$reader"; do :; done
    wait_for grep -qs 'cryopod: .*: vram in' /img/restore.log
    sleep 1
    if grep -q 'cryopod: .*: restore in' /img/restore.log; then touch /tmp/too-early; fi
    # Only a kernel without userfaultfd has the driver wait outside.
    if [ -e /dev/userfaultfd ] && grep -q 'the driver waits until all has been read' /img/restore.log; then touch /tmp/too-late; fi
    pkill "-$1" -f "$reader"
}
start --mib 512
last=$(tail -n 1 /tmp/out | cut -d' ' -f2)
dump "$on"
reader_gets KILL &
restore_fails "$on"
wait $!
check 'a killed reader: the driver waited for it, at work' test ! -e /tmp/too-early -a ! -e /tmp/too-late
check 'a killed reader: said' grep -q 'cryopod: Error: .*worker ended without an answer' /img/restore.log
check 'a killed reader: nothing is left' wait_for gone
ctl clear
wait_for freed
reader_gets CONT &
restore "$on"
wait $!
check 'a slow reader: the driver waited for it, at work' test ! -e /tmp/too-early -a ! -e /tmp/too-late
check 'a slow reader: restored' goes_on
check 'a slow reader: the same sum' test "$(tail -n 1 /tmp/out | cut -d' ' -f2)" = "$last"
check 'a slow reader: nothing is left of it' unmapped
stop
