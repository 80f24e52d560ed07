# amd_measure.sh LOW: sizes and times with 2 GiB of GPU memory: in the plugin's own files, in VRAM files, and in those of a
# second checkpoint that builds on the first. All is in memory, and podman does not compress. docs/amd.md has the numbers of a run.
# measures
# memory: 12G
# runtimes: crun
# needs: amd
. /src/tests/amd/lib.sh
start "$1" vega-2

now() { date +%s%N; }
seconds() { printf '%d.%d' $(($1 / 1000000000)) $(($1 / 100000000 % 10)); }
# checkpoint NAME ARCHIVE [OPTION...]
checkpoint() {
    local name=$1 archive=$2 begin && shift 2
    begin=$(now)
    saved_or_not c1 "$archive" --compress none "$@" || { cat /tmp/said && exit 1; }
    echo "$name: checkpoint $(seconds $(($(now) - begin))) s, archive $(($(stat -c %s "$archive") >> 20)) MiB"
    tar -xOf "$archive" checkpoint/cryopod.json |
        jq -c '{timings, vram: (.gpu.vram // {} | {bytes, stored_bytes, zero, same, parent})}'
}
# restored NAME ARCHIVE
restored() {
    local begin
    before=$(count c1)
    pod rm -f -t 0 c1 > /dev/null
    begin=$(now)
    pod container restore --import "$2" > /tmp/said 2>&1 || { cat /tmp/said && exit 1; }
    echo "$1: restore $(seconds $(($(now) - begin))) s"
    wait_for rounds c1 $((before + 2))
}
fresh() {
    gpu_run c1 '128 129' -- -b 4 -m 256
    wait_for rounds c1 1
}

cp /etc/cryopod/config.toml /tmp/config.toml
setting nvidia 'vram = "off"'
fresh
checkpoint "the plugin's files" /tmp/c1.tar
restored "the plugin's files" /tmp/c1.tar
pod rm -f -t 0 c1 > /dev/null
rm /tmp/c1.tar
cp /tmp/config.toml /etc/cryopod/config.toml
fresh
checkpoint 'VRAM files' /tmp/c1.tar
mkdir /tmp/parent
tar -C /tmp/parent -xf /tmp/c1.tar checkpoint
restored 'VRAM files' /tmp/c1.tar
rm /tmp/c1.tar
setting vram 'parent = "/tmp/parent/checkpoint"' 'parents = ["/tmp/parent"]'
checkpoint 'VRAM files, the second' /tmp/c2.tar
restored 'VRAM files, the second' /tmp/c2.tar
