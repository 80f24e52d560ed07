# podman.sh LOW ROUNDS MODE: under podman, with the simulated driver. MODE: `admin`, a container with CAP_SYS_ADMIN, or
# `user`, one in a user namespace of its own.
low=$1 count=$2 mode=$3
. /src/tests/tests/scripts/hostile/lib.sh
mkimage
simulate "$low" --proc-root /run/simulated
printf '[rootfs]\ncarry = "always"\n' >> /etc/cryopod/config.toml
# A namespace of users gets a /proc of its own only where nothing lies over parts of the one outside.
if [ "$mode" = admin ]; then mount --bind /run/simulated/driver /proc/driver; fi

alive() { [ "$(pod inspect -f '{{.State.Status}}' job 2> /dev/null)" = running ]; }
ticked() { [ "$(printed job | grep -c ok)" -ge 3 ]; }
mounts=no
begin() {
    local how=(--cap-add SYS_ADMIN --security-opt apparmor=unconfined -e MOUNTS="$mounts")
    if [ "$mode" = user ]; then how=(--uidmap 0:100000:65536 --gidmap 0:100000:65536 -e MOUNTS=no); fi
    pod run -d --name job --network none --device /dev/nvidiactl --device /dev/nvidia-uvm \
        --device /dev/nvidia0 --device /dev/nvidia1 "${how[@]}" --security-opt seccomp=unconfined \
        -v /run/cusim:/run/cusim -v /opt/cusim:/cusim:ro -e LD_LIBRARY_PATH=/cusim \
        -v /usr/lib/x86_64-linux-gnu:/lib/x86_64-linux-gnu:ro -v /usr/lib64:/lib64:ro \
        localhost/busybox sh -c "($attack) & exec /cusim/cusim-client --mib 70" > /dev/null
    within 60 ticked || true
}
again() {
    does podman --runtime cryopod-runtime rm -f -t 0 job || true
    # CRIU can hardly ever dump one that mounts.
    next
    begin
}
round() {
    rm -f /tmp/job.tar
    case $(($1 % 4)) in
        0) does podman --runtime cryopod-runtime container checkpoint --leave-running --export /tmp/job.tar job ;;
        1) does cryopod suspend job && does cryopod resume job ;;
        2)
            does podman --runtime cryopod-runtime container checkpoint --export /tmp/job.tar job || return
            untouched && does podman --runtime cryopod-runtime rm -f -t 0 job && does podman --runtime cryopod-runtime container restore --import /tmp/job.tar
            ;;
        3) pod exec job sh -c "$attack" > /dev/null 2>&1 &
            does podman --runtime cryopod-runtime container checkpoint --leave-running --export /tmp/job.tar job ;;
    esac
}
rounds "$count"
does podman --runtime cryopod-runtime rm -f -t 0 job
