# amd_failures.sh LOW: what fails at a checkpoint leaves the container running, its queues too, and says why.
# long
# runtimes: crun runc
# needs: amd
. /src/tests/amd/lib.sh
start "$1" vega-2
parameters=/sys/module/mock_kfd/parameters

gpu_run c1 '128 129' -- -p 2
wait_for rounds c1 3
fails() { # PATTERN
    if saved_or_not c1 /tmp/failed.tar.zst; then echo "it was checkpointed, in spite of $1" && exit 1; fi
    says /tmp/said "$1" || exit 1
    stays c1
    echo "checkpoint: $1"
}
mv /usr/lib/criu/amdgpu_plugin.so /tmp/
fails 'refused and the container goes on running: .*amdgpu_plugin.so, is in none of'
if ! criu_from 4.2; then # which loads the older one
    cp /opt/amd/plugin-4.2.1/amdgpu_plugin.so /usr/lib/criu/
    fails 'built for a newer CRIU'
fi
cp /tmp/amdgpu_plugin.so /usr/lib/criu/
echo 1:1 > $parameters/fail_checkpoint
fails 'goes on running: .*Failed to call dumper \(process\) ioctl: Operation not permitted'
echo 3:12 > $parameters/fail_checkpoint
fails 'goes on running: .*Cannot allocate memory'
echo > $parameters/fail_checkpoint
echo fails > $parameters/sdma
fails 'goes on running: .*amdgpu-pages-'
echo > $parameters/sdma
# Whatever has failed, it can be checkpointed, and go on beside its checkpoint.
saved_or_not c1 /tmp/c1.tar.zst --leave-running || { cat /tmp/said && exit 1; }
stays c1
rm /tmp/c1.tar.zst
saved c1 /tmp/c1.tar.zst
back c1 /tmp/c1.tar.zst
