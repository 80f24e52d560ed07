# lib.sh: GPU containers on the simulated driver, and archives of them.
# shellcheck shell=bash disable=SC2154
sim=/run/cusim/server.sock
nodes=(/dev/nvidiactl /dev/nvidia-uvm /dev/nvidia0 /dev/nvidia1)
# SOURCE:TARGET of what a client needs that busybox has not
binds=(/run/cusim:/run/cusim /opt/cusim:/cusim /usr/lib/x86_64-linux-gnu:/lib/x86_64-linux-gnu /usr/lib64:/lib64)

simulate() { # LOW: the driver, and cryopod-runtime over LOW
    low_level "$1"
    printf '[nvidia]\nlibcuda = ["/opt/cusim/libcuda.so.1"]\n' >> /etc/cryopod/config.toml
    mkdir -p /run/cusim
    /opt/build/cusim-ctl --socket "$sim" install /opt/cusim > /dev/null
    /opt/build/cusim-server --socket "$sim" --dev-root /dev --gpus 2 --memory-mib 4096 > /tmp/server.log 2>&1 &
    wait_for test -S "$sim"
}
run_job() { # cusim-client ARG...: under podman
    pod run -d --name job --network none "${nodes[@]/#/--device=}" "${binds[@]/#/--volume=}" \
        -e LD_LIBRARY_PATH=/cusim localhost/busybox /cusim/cusim-client "$@" > /dev/null
    wait_for ticked job 3
}
logs() { podman logs "$1" 2>&1; }
ticks() { logs "$1" | grep -c ok || true; }
ticked() { [ "$(ticks "$1")" -ge "$2" ]; }
sum() { logs "$1" | tail -n 1 | cut -d' ' -f2; }
goes_on() { # CONTAINER: the sum comes again, and was never wrong
    local now && now=$(ticks "$1")
    wait_for ticked "$1" $((now + 3)) && ! logs "$1" | grep CORRUPT
}
at_tick() { # CONTAINER N: the last line has a number of at least N; the first has 0
    local n && n=$(logs "$1" | tail -n 1 | cut -d' ' -f1) && [ "${n:--1}" -ge "$2" ]
}
cri_restores() { # does the CRI make a container of a checkpoint? containerd 2.4 does not any more
    ! containerd --version | grep -Eq ' v?(2\.([4-9]|[1-9][0-9])|[3-9]\.)' || { echo 'no restore by the CRI' && return 1; }
}
registry() { # the registry 127.0.0.1:5000, its blobs below /tmp/registry
    printf 'version: 0.1\nstorage: {filesystem: {rootdirectory: /tmp/registry}, delete: {enabled: true}}\nhttp: {addr: "127.0.0.1:5000"}\n' \
        > /tmp/registry.yml
    docker-registry serve /tmp/registry.yml > /tmp/registry.log 2>&1 &
    wait_for curl -sf http://127.0.0.1:5000/v2/ -o /dev/null
}
