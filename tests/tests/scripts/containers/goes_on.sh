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
    check 'it writes on' podman exec copy sh -c 's=$(stat -c %s /grows); sleep 1; test $(stat -c %s /grows) -gt $s'
    podman rm -f -t 0 copy > /dev/null
done

# What cannot be restored is told by those who look.
if quiet pod container restore --import "$from/later.tar"; then echo 'FAILED: /grows is as it was' && exit 1; fi
podman rm -f -t 0 job > /dev/null 2>&1 || true
if quiet cryopod verify "$from/later.tar"; then echo 'FAILED: verify sees nothing' && exit 1; fi
check 'verify' says /tmp/said '/grows: .* bytes .*when CRIU saved'
if quiet cryopod check "$from/later.tar"; then echo 'FAILED: check sees nothing' && exit 1; fi
check 'check' says /tmp/said '/grows: .* bytes .*when CRIU saved'
