# amd_switches.sh LOW: each of the plugin's seven switches: where what it compares differs, a restore is refused, and with the check off
# the plugin restores.
# long
# runtimes: crun runc
# needs: amd
. /src/tests/amd/lib.sh
start "$1" vega-2

gpu_run c1 '128 129' -- -b 1
wait_for rounds c1 3
saved c1 /tmp/c1.tar.zst
cp /etc/cryopod/config.toml /tmp/config.toml
differs() { # CHECK SED-COMMAND...
    local check=$1 && shift
    like other vega-2 "$@"
    machine other
    not_back /tmp/c1.tar.zst "${said:-$check}"
    predicts /tmp/c1.tar.zst "${code:-1}"
    setting checks "$check = false"
    predicts /tmp/c1.tar.zst 0
    back c1 /tmp/c1.tar.zst
    pod rm -f -t 0 c1 > /dev/null
    cp /tmp/config.toml /etc/cryopod/config.toml
    echo "$check: refused, and restored with it off"
}
differs KFD_FW_VER_CHECK 's/ fw_version=392/ fw_version=391/'
differs KFD_SDMA_FW_VER_CHECK 's/sdma_fw_version=421/sdma_fw_version=420/'
differs KFD_CACHES_COUNT_CHECK 's/caches_count=96/caches_count=95/'
differs KFD_VRAM_SIZE_CHECK 's/^bank 1 17163091968/bank 1 17163091967/'
differs KFD_CAPABILITY_CHECK 's/capability=8832/capability=8833/'
# One CPU for each GPU, in place of one for both: only the plugin compares links.
said='Failed to match remaining nodes' code=0 differs KFD_NUMA_CHECK 's/^links 2:1 2:2/links 2:1\nnode 3 0\nlinks 2:2/' '/^node 2 /,$s/^links 2:0/links 2:3/'
# A machine whose GPUs have a global wave sync, for one where they have none.
like gws vega-2 's/lds_size_in_kb=64/lds_size_in_kb=64 num_gws=64/'
machine gws
gpu_run c1 '128 129' -- -b 1
wait_for rounds c1 3
rm /tmp/c1.tar.zst
saved c1 /tmp/c1.tar.zst
differs KFD_NUM_GWS_CHECK 's/lds_size_in_kb=64/lds_size_in_kb=64 num_gws=63/'
