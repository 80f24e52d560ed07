# amd_failed_restores.sh LOW: what fails at a restore leaves the archive as it was, and says why; then it is restored.
# long
# runtimes: crun runc
# needs: amd
. /src/tests/amd/lib.sh
start "$1" vega-2
parameters=/sys/module/mock_kfd/parameters

gpu_run c1 '128 129' -- -p 2
wait_for rounds c1 3
saved c1 /tmp/c1.tar.zst

mv /usr/lib/criu/amdgpu_plugin.so /tmp/
not_back /tmp/c1.tar.zst 'the checkpoint holds the state of AMD GPUs, and .*amdgpu_plugin.so, is in none of'
if ! criu_from 4.2; then # which loads the older one
    cp /opt/amd/plugin-4.2.1/amdgpu_plugin.so /usr/lib/criu/
    not_back /tmp/c1.tar.zst 'built for a newer CRIU'
fi
cp /tmp/amdgpu_plugin.so /usr/lib/criu/
echo 1:12 > $parameters/fail_restore
not_back /tmp/c1.tar.zst 'the checkpoint is untouched: .*Restore ioctl failed: Cannot allocate memory'
echo > $parameters/fail_restore
echo fails > $parameters/sdma
not_back /tmp/c1.tar.zst 'the checkpoint is untouched: .*SDMA'
echo > $parameters/sdma
echo hangs > $parameters/sdma
cp /etc/cryopod/config.toml /tmp/config.toml
setting limits 'restore_s = 15'
not_back /tmp/c1.tar.zst 'the checkpoint is untouched: .*limits.restore_s'
echo > $parameters/sdma
cp /tmp/config.toml /etc/cryopod/config.toml
machine vega-2 vram_mib=3
not_back /tmp/c1.tar.zst 'vram_size|Cannot allocate memory'
machine vega-1
not_back /tmp/c1.tar.zst 'GPU count'
machine vega-2
back c1 /tmp/c1.tar.zst
