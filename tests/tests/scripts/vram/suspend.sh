# suspend.sh: suspend and resume under podman and with the runtime alone, with the simulated driver. After job.sh.
# shellcheck shell=bash disable=SC2154,SC2034
GPU0=GPU-c0da0000-5130-4d00-8000-000000000000
GPU1=GPU-c0da0000-5130-4d00-8000-000000000001
here() { [ "$(pod inspect -f '{{.State.Status}}' job)" = running ]; }
holders() { pgrep -x 'cryopod-cuda-ag|cryopod' > /dev/null; }
none() { used 'all(. == 0)' && here && ! holders; }

run --mib 100 --procs 2 --gpus 0,1
id=$(pod inspect -f '{{.Id}}' job)
both() { [ "$(printed job | awk '{print $5}' | sort -u | grep -c '^p[01]$')" = 2 ]; }
wait_for both
last=$(printed job | awk '{print $2, $5}' | sort -u)
check 'before: both GPUs are in use' used 'all(. > 100000000)'
check 'suspend, by name' does cryopod suspend job
check 'nothing is in use, the container is there, and nothing of cryopod' none
check 'twice: refused' refused 'it is suspended already, since .*; its GPU memory is in host memory; .cryopod resume job' cryopod suspend job
check 'a checkpoint is refused, with the remedy' refused 'it is suspended since .*resume it first: cryopod resume' cryopod-runtime checkpoint --image-path /tmp/no "$id"
init=$(pod inspect -f '{{.State.Pid}}' job)
check 'two at a time: refused' refused 'a checkpoint, suspend or resume of it is under way' flock -o "/proc/$init/environ" cryopod resume job
check 'a checkpoint meanwhile: refused' refused 'a checkpoint, suspend or resume of it is under way' flock -o "/proc/$init/environ" cryopod-runtime checkpoint --image-path /tmp/no "$id"
setpriv --reuid 65534 --regid 65534 --clear-groups flock "/proc/$init" sleep 100 &
stranger=$!
wait_for sh -c "! flock --nonblock /proc/$init true"
check 'resume, by a part of the id' does cryopod resume "${id:0:12}"
kill $stranger
check 'it goes on, whatever another user has locked' goes_on
check 'on both GPUs' used 'all(. > 100000000)'
check 'the same sums' test "$(printed job | awk '{print $2, $5}' | sort -u)" = "$last"
check 'resume, and it is not suspended: refused' refused 'none of its processes is suspended' cryopod resume job
check 'and it goes on' goes_on
check 'suspended again' does cryopod suspend job
for pid in $(pgrep -x cusim-client); do LD_LIBRARY_PATH=/opt/cusim /opt/build/cusim-step "$pid" restore unlock > /tmp/said 2>&1 || true; done
check 'resumed by another tool: it goes on' goes_on
check 'which resume then says' refused 'not resumed: none of its processes is suspended: they run' cryopod resume job
check 'and the record of it is gone' test ! -e /run/cryopod/suspended

check 'into files' does cryopod suspend --to /tmp/files job
check 'into files: they are there' test -s /tmp/files/vram-index.img
check 'into files: nothing is in use' none
shmem() { awk '/^Rss(Shmem|Anon)/ {n += $2} END {exit n > 60000}' "/proc/$(pgrep -x cusim-client | tail -n 1)/status"; }
check 'into files: not in host memory either' shmem
check 'into files: a name that is taken is refused' refused 'suspended already' cryopod suspend --to /tmp/files job
damage /tmp/files/vram-0000.img 5000000
cp -a /tmp/files /tmp/damaged
check 'a damaged file: refused, and it stays suspended' refused 'stays suspended, with its GPU memory in /tmp/files.*vram-0000.img: chunk .* does not fit its digest' cryopod resume job
check 'still nothing is in use' none
mv /tmp/files /tmp/away
check 'no files: refused, and what is lost is said' refused '/tmp/files: the GPU memory of job is not whole there, and without it the container cannot go on' cryopod resume job
end
check 'removed while suspended: nothing is in use' used 'all(. == 0)'
rm -rf /tmp/away /tmp/damaged

run --mib 100
check 'into files again' does cryopod suspend -q --to /tmp/files job
check 'back from files' does cryopod resume job
check 'back from files: it goes on' goes_on
check 'the files are removed' test ! -e /tmp/files
check 'suspended, and paused' does sh -c 'cryopod suspend job && podman pause job'
check 'paused: resume is refused' refused 'it is paused.*unpause it first' cryopod resume job
check 'unpaused: it goes on' does sh -c 'podman unpause job && cryopod resume job'
check 'and so it does' goes_on
podman pause job > /dev/null
check 'paused: suspend is refused' refused 'it is paused.*unpause it first' cryopod suspend job
podman unpause job > /dev/null
check 'by its first process' does cryopod suspend "pid:$(pod inspect -f '{{.State.Pid}}' job)"
check 'to another GPU' does cryopod resume --map 0=1 job
check 'to another GPU: it goes on' goes_on
check 'to another GPU: it is there' used '.[0] == 0 and .[1] > 100000000'

# What fails leaves it running.
for at in lock checkpoint; do
    /opt/build/cusim-ctl --socket "$sim" set fail-$at:1 > /dev/null
    check "$at fails: said" refused "not suspended, and it runs on: $at of process .*cusim-client" cryopod suspend job
    check "$at fails: it goes on" goes_on
done
/opt/build/cusim-ctl --socket "$sim" clear > /dev/null
mkdir /tmp/small && mount -t tmpfs -o size=40m tmpfs /tmp/small
check 'a full disk: said' refused 'not suspended, and it runs on: .*No space left on device' cryopod suspend --to /tmp/small/files job
check 'a full disk: it goes on' goes_on
check 'a full disk: nothing is left' test -z "$(ls -A /tmp/small)"
/opt/build/cusim-ctl --socket "$sim" set fail-restore > /dev/null
check 'not brought back: said' refused 'not suspended: .*its CUDA calls may wait: process .*cusim-client.* is left checkpointed .*.cryopod resume job. tries again' cryopod suspend --to /tmp/small/files job
/opt/build/cusim-ctl --socket "$sim" clear > /dev/null
check 'not brought back: resume' does cryopod resume job
check 'not brought back: it goes on' goes_on
umount /tmp/small
sed 's/^MemAvailable:.*/MemAvailable:    1000000 kB/' /proc/meminfo > /tmp/meminfo
mount --bind /tmp/meminfo /proc/meminfo
check 'too little memory: refused' refused 'of host memory are needed for the GPU memory' cryopod suspend job
umount /proc/meminfo
set_switch hang-checkpoint:1
cryopod suspend job > /tmp/said 2>&1 &
suspending=$!
wait_for hangs_at hang-checkpoint
kill -KILL "$suspending"
clear_switches
check 'killed in the middle: it goes on' goes_on
wait_for no_agent
# The agent alone is killed: another one brings it back.
set_switch hang-checkpoint:1
(wait_for hangs_at hang-checkpoint && pkill -KILL -x cryopod-cuda-ag && clear_switches) &
check 'its agent is killed: said' refused 'not suspended, and it runs on: the driver agent' cryopod suspend job
check 'its agent is killed: it goes on' goes_on
# A checkpoint whose wrapper is killed: its driver agent brings the GPU memory back, and has the lock until then.
set_switch hang-checkpoint:1
podman --runtime cryopod-runtime container checkpoint --keep job > /tmp/first.said 2>&1 & # `pod` has one file for what two say
checkpointing=$!
wait_for hangs_at hang-checkpoint
pkill -KILL -x cryopod-runtime
check 'another checkpoint at once: refused' refused 'a checkpoint or pause of it is under way' pod container checkpoint --keep job
clear_switches
wait $checkpointing || true
check 'it goes on' goes_on
wait_for no_agent
check 'and then a checkpoint' does pod container checkpoint --keep job
check 'is restored' does pod container restore --keep job
check 'it goes on there, too' goes_on
/opt/build/cusim-ctl --socket "$sim" set oom-restore:1 > /dev/null
check 'suspended once more' does cryopod suspend job
check 'the restore fails: said' refused 'stays suspended, with its GPU memory in host memory.*restore of process' cryopod resume job
end
/opt/build/cusim-ctl --socket "$sim" clear > /dev/null

gpus=(0)
run --mib 100
check 'a GPU that the container lacks: suspended' does cryopod suspend job
check 'a GPU that the container lacks: refused' refused 'the container has no /dev/nvidia1, the node of GPU-' cryopod resume --map "$GPU0=$GPU1" job
check 'and back where it was' does cryopod resume job
check 'it goes on there' goes_on
check 'killed while suspended' does sh -c 'cryopod suspend job && podman kill job && podman wait job'
check 'killed while suspended: nothing is in use' used 'all(. == 0)'
end
pod run -d --name job localhost/busybox "${counter[@]}" > /dev/null
check 'no GPU in use: refused' refused 'none of its processes uses CUDA' cryopod suspend job
check 'no such container' refused 'no running container of podman' cryopod suspend nothing
end
wait_for no_agent || true
check 'no operation is left' test -z "$(find /run/cryopod -mindepth 1 -maxdepth 1 -not -name suspended)"
