# gpu_map.sh LOW: a container on GPU 0 is restored on GPU 1, on the simulated driver, whose server says where the memory is;
# and what is refused.
low=$1
mkimage
configure() { # [MAP]
    low_level "$low"
    printf '[nvidia]\nlibcuda = ["/opt/cusim/libcuda.so.1"]\n' >> /etc/cryopod/config.toml
    [ $# = 0 ] || printf '[gpu]\nmap = "%s"\n' "$1" >> /etc/cryopod/config.toml
}
configure
mkdir -p /run/cusim
sim=/run/cusim/server.sock
/opt/build/cusim-ctl --socket "$sim" install /opt/cusim > /dev/null
serve() { /opt/build/cusim-server --socket "$sim" --dev-root /dev --proc-root /run/simulated --gpus 4 --memory-mib 1024 "$@" > /tmp/server.log 2>&1 & }
serve
wait_for serves
mount --bind /run/simulated/driver /proc/driver

run() { # NODES cusim-client ARG...
    local nodes=() n
    for n in $1; do nodes+=(--device "/dev/nvidia$n"); done
    shift
    pod run -d --name job --network none --device /dev/nvidiactl --device /dev/nvidia-uvm "${nodes[@]}" ${annotation:-} \
        -v /run/cusim:/run/cusim -v /opt/cusim:/cusim:ro -e LD_LIBRARY_PATH=/cusim \
        -v /usr/lib/x86_64-linux-gnu:/lib/x86_64-linux-gnu:ro -v /usr/lib64:/lib64:ro \
        localhost/busybox /cusim/cusim-client "$@" > /dev/null
    wait_for ticked 3
}
ticks() { printed job | grep -c ok || true; }
ticked() { [ "$(ticks)" -ge "$1" ]; }
goes_on() {
    local now && now=$(ticks)
    wait_for ticked $((now + 3)) && ! printed job | grep CORRUPT
}
used() { # the minors of the GPUs that hold memory
    /opt/build/cusim-ctl --socket "$sim" status | jq -r '[.gpus[] | select(.pids != {}) | .minor] | join(" ")'
}
save() { pod container checkpoint --export /tmp/job.tar job > /dev/null && pod rm -f -t 0 job > /dev/null && sum=$(sha256sum < /tmp/job.tar); }
# The server frees a process's memory when it hears of its end, and each of several processes takes its own.
uses() { [ "$(used)" = "$1" ]; }
on() { # NAME MINORS
    goes_on || { echo "$1: does not go on"; exit 1; }
    wait_for uses "$2" || { echo "$1: memory on $(used), not $2"; exit 1; }
    echo "ok: $1"
}
quiet() { ! pgrep -x cusim-client > /dev/null; }
refused() { # NAME WANT...
    local name=$1 want
    shift
    if pod container restore --import /tmp/job.tar > /tmp/said 2>&1; then echo "$name: restored"; exit 1; fi
    for want in "$@"; do grep -qF -- "$want" /tmp/said || { echo "$name: not told: $want"; cat /tmp/said; exit 1; }; done
    [ "$(sha256sum < /tmp/job.tar)" = "$sum" ] && wait_for quiet && [ -z "$(ls -A /run/cryopod)" ]
    pod rm -f -t 0 job > /dev/null 2>&1 || true
    echo "ok: $name"
}

run '0 1' --mib 64 --gpus 0
wait_for uses 0
save
jq -e '.gpu.gpus | map(.minor) == [0, 1] and all(.model == "NVIDIA H200" and .memory_bytes == 1073741824)' <<< "$(tar -xOf /tmp/job.tar checkpoint/cryopod.json)" > /dev/null
configure 0=1,1=0
pod container restore --import /tmp/job.tar > /dev/null
on 'GPU 0 to GPU 1, swapped by index' 1
pod rm -f -t 0 job > /dev/null
configure
pod container restore --import /tmp/job.tar > /dev/null
on 'the same archive on its own GPU' 0
pod rm -f -t 0 job > /dev/null

configure 0=7,3=1
refused 'a map that names what is not there' 'this host has no GPU 7' 'the checkpoint has no GPU 3'
configure '0=2,1=3'
pod container restore --import /tmp/job.tar > /dev/null
on 'two GPUs whose nodes the container had not got' 2
pod rm -f -t 0 job > /dev/null
configure
mkdir /tmp/taken && mv /proc/driver/nvidia/gpus/* /tmp/taken/
for one in /tmp/taken/*; do mv "$one" /proc/driver/nvidia/gpus/ && break; done
refused 'two GPUs, of which one is here' 'no GPU of this host can take the place of GPU-c0da0000-5130-4d00-8000-000000000001 (NVIDIA H200): none is left'
mv /tmp/taken/* /proc/driver/nvidia/gpus/
sed -i 's/580\.159\.04/575.1.1/' /proc/driver/nvidia/version
configure 0=1,1=0
refused 'a driver too old' 'nvidia-driver: the checkpoint has 580.159.04, this host has 575.1.1' 'needs driver 580 or newer'
sed -i 's/575\.1\.1/580.159.04/' /proc/driver/nvidia/version

# A container with the node of one GPU only.
run 0 --mib 32 --gpus 0
save
configure 0=1
pod container restore --import /tmp/job.tar > /dev/null
on 'one GPU, on one whose node the container had not got' 1
# What it was when it was made, the engine still says; where it is, counts.
save
configure
pod container restore --import /tmp/job.tar > /dev/null
on 'and again, where it is now' 1
pod rm -f -t 0 job > /dev/null

# Four processes on four GPUs, moved round, as the container's own annotation says.
configure
annotation='--annotation dev.cryopod.gpu.map=0=1,1=2,2=3,3=0'
run '0 1 2 3' --mib 16 --procs 3 --gpus 0,1,2
wait_for uses '0 1 2'
save
pod container restore --import /tmp/job.tar > /dev/null
on 'four GPUs, each moved to the next' '1 2 3'
save
pod container restore --import /tmp/job.tar > /dev/null
on 'and once more' '0 2 3'
