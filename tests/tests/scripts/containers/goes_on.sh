# goes_on.sh LOW: checkpoints of containers that go on running and write all the while. Engines pack the files after CRIU's
# dump; without those of that moment CRIU refuses a file that has grown (`has bad size`).
low=$1
mkimage
simulate "$low"
from=/srv/checkpoints
mkdir -p $from
printf '[restore]\nallow = ["%s"]\n' $from >> /etc/cryopod/config.toml
on_failure() { cat /tmp/said; }
quiet() { "$@" > /tmp/said 2>&1; }
gpu=(--network none "${nodes[@]/#/--device=}" "${binds[@]/#/--volume=}" -e LD_LIBRARY_PATH=/cusim)
# shellcheck disable=SC2016 # for the container's shell
writer='exec 3> /grows; (while :; do echo line; done) >&3 & exec /cusim/cusim-client --mib 16'
grown() { [ "$(podman exec copy stat -c %s /grows)" -gt "$size" ]; }
pod run -d --name job "${gpu[@]}" localhost/busybox sh -c "$writer" > /dev/null
wait_for ticked job 3
for n in 1 2 3; do
    check "checkpoint $n" quiet pod container checkpoint --leave-running --export "$from/$n.tar" job
    check 'it goes on' goes_on job
    chmod go-w "$from/$n.tar"
    check "checkpoint $n: whole" quiet cryopod verify "$from/$n.tar"
done
printf '[rootfs]\ncarry = "never"\n' >> /etc/cryopod/config.toml
check 'a checkpoint with the files of later' quiet pod container checkpoint --leave-running --export "$from/later.tar" job
sed -i '/^\[rootfs\]/,$d' /etc/cryopod/config.toml
podman rm -f -t 0 job > /dev/null
for n in 1 2 3; do
    check "import $n" quiet pod container restore --import "$from/$n.tar"
    check 'it goes on' goes_on job
    podman rm -f -t 0 job > /dev/null
    check "copy $n" quiet pod run -d --name copy "${gpu[@]}" --annotation "dev.cryopod.restore=$from/$n.tar" localhost/busybox true
    check 'it goes on' goes_on copy
    size=$(podman exec copy stat -c %s /grows)
    check 'it writes on' wait_for grown
    podman rm -f -t 0 copy > /dev/null
done

# A process that SIGSTOP has stopped, to which CRIU cannot attach in the freezer of cgroup v1.
pod run -d --name job "${gpu[@]}" localhost/busybox sh -c 'sleep 98765 3> /file & exec /cusim/cusim-client --mib 16' > /dev/null
wait_for ticked job 3
is() { grep -qs "State:.$1" "/proc/$(pgrep -fx 'sleep 98765')/status"; }
stopped() { wait_for is T; }
wait_for is S
kill -STOP "$(pgrep -fx 'sleep 98765')"
check 'one is stopped' stopped
check 'one is stopped: left running' quiet timeout 300 podman --runtime cryopod-runtime container checkpoint --leave-running --export $from/stopped.tar job
check 'it goes on' goes_on job
check 'and is stopped' stopped
podman rm -f -t 0 job > /dev/null
check 'restored' quiet pod container restore --import $from/stopped.tar
check 'it goes on' goes_on job
check 'and is stopped' stopped

# It is a zombie in a second checkpoint, whose directory still has its images of the first.
check 'left running' quiet pod container checkpoint --leave-running job
sleeper=$(pgrep -fx 'sleep 98765')
kill -KILL "$sleeper"
wait_for grep -q 'State:.Z' "/proc/$sleeper/status" # one that dies in the middle is a reason to refuse
check 'a zombie' quiet pod container checkpoint job
check 'restored' quiet pod container restore job
check 'it goes on' goes_on job
podman rm -f -t 0 job > /dev/null

# Nor does the first one's copy of the files come back.
pod run -d --name job "${gpu[@]}" localhost/busybox sh -c "$writer" > /dev/null
wait_for ticked job 3
check 'left running' quiet pod container checkpoint --leave-running job
podman exec job sh -c 'echo new > /root/file'
check 'a second one' quiet pod container checkpoint --keep --export $from/second.tar job
check 'restored in place' quiet pod container restore --keep job
check 'it goes on' goes_on job
check 'with its newest files' test "$(podman exec job cat /root/file)" = new
podman rm -f -t 0 job > /dev/null
check 'imported' quiet pod container restore --import $from/second.tar
check 'with its newest files' test "$(podman exec job cat /root/file)" = new
podman rm -f -t 0 job > /dev/null

# What cannot be restored is told by those who look.
if quiet pod container restore --import "$from/later.tar"; then echo 'FAILED: /grows is as it was' && exit 1; fi
podman rm -f -t 0 job > /dev/null 2>&1 || true
if quiet cryopod verify "$from/later.tar"; then echo 'FAILED: verify sees nothing' && exit 1; fi
check 'verify' says /tmp/said '/grows: .* bytes .*when CRIU saved'
if quiet cryopod check "$from/later.tar"; then echo 'FAILED: check sees nothing' && exit 1; fi
check 'check' says /tmp/said '/grows: .* bytes .*when CRIU saved'

# Files of volumes are not in an archive, or as of later. A log that has grown is as good; half a database is not.
mkdir -p /srv/volume /srv/app
cat > /srv/app/notes.py << 'P'
import mmap, os, sys, time
def file(path, mode, text):
    f = open(path, mode)
    f.write(text) and f.flush()
    return f
log, append, grows = file("/v/log", "w", ""), file("/v/append", "a", ""), file("/dev/shm/grows", "w", "")
reader, database = open("/v/append"), file("/v/database", "w+", "x" * 100)
database.seek(0)
mapped = file("/v/mapped", "w+", "y" * 4096)
mapping = mmap.mmap(mapped.fileno(), 4096)
n = 0
while True:
    n += 1
    # Shared memory is the container's own: what it has noted there is what it knows.
    fd = os.open("/dev/shm/n", os.O_CREAT | os.O_RDWR)
    os.pwrite(fd, b"%9d" % n, 0)
    if int(os.pread(fd, 9, 0)) != n:
        print("CORRUPT", flush=True)
    os.close(fd)
    for f in (log, append, grows):
        print(n, file=f, flush=True)
    print(n, flush=True)
    time.sleep(0.02)
P
python=(-v /usr:/usr:ro -v /usr/lib64:/lib64:ro -v /usr/lib/x86_64-linux-gnu:/lib/x86_64-linux-gnu:ro -v /srv/app:/app:ro)
notes=(--network none --device /dev/nvidia0 "${python[@]}" -v /srv/volume:/v localhost/busybox /usr/bin/python3 /app/notes.py)
numbers() { printed notes | grep -x '[0-9]*'; } # none at once
restored() { # COMMAND...: and it goes on; a warning of the runtime may be the last line
    "$@" > /tmp/said 2>&1 && wait_for numbers > /dev/null && n=$(numbers | tail -n 1) && wait_for counted notes $((n + 5)) && ! printed notes | grep CORRUPT
}
refused() { # WANT [COMMAND...]
    podman rm -f -t 0 notes > /dev/null 2>&1 || true
    [ $# -gt 1 ] || set -- "$1" pod container restore --import $from/notes.tar
    if quiet "${@:2}"; then echo 'FAILED: it went through' && exit 1; fi
    podman rm -f -t 0 notes > /dev/null 2>&1 || true
    check "refused: $1" grep -qF -- "$1" /tmp/said
}
pod run -d --name notes "${notes[@]}" > /dev/null
check 'notes' wait_for counted notes 5
check 'a checkpoint of notes' quiet pod container checkpoint --leave-running --export $from/notes.tar notes
n=$(count notes)
wait_for counted notes $((n + 20))
podman rm -f -t 0 notes > /dev/null
chmod go-w $from/notes.tar
check 'imported' restored pod container restore --import $from/notes.tar
podman rm -f -t 0 notes > /dev/null
copy=(pod run -d --name notes --annotation "dev.cryopod.restore=$from/notes.packed" "${notes[@]}")
cryopod pack -q $from/notes.tar -o oci-archive:$from/notes.packed # with no file's time
chmod go-w $from/notes.packed
check 'copied' restored "${copy[@]}"
echo more >> /srv/volume/database
refused "truncate -s 100 /srv/volume/database"
truncate -s 100 /srv/volume/database
sleep 1 # the time of a file has a second
printf z | dd of=/srv/volume/mapped conv=notrunc status=none
rewritten='/v/mapped (/srv/volume/mapped) has been written since the checkpoint'
refused "$rewritten"
refused "$rewritten" "${copy[@]}"
printf '[checks]\nvolumes = false\n' >> /etc/cryopod/config.toml
check 'taken as it is' restored pod container restore --import $from/notes.tar
