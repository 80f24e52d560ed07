# job.sh LOW: containers with the preload library, under podman, with the simulated driver: what the scenarios share.
# shellcheck shell=bash disable=SC2154,SC2034
low=$1
mkimage
simulate "$low" --proc-root /run/simulated
mount --bind /run/simulated/driver /proc/driver

run() { # ANNOTATION cusim-client ARG...
    local annotation=$1 && shift
    pod run -d --name job --annotation "$annotation" --network none --device /dev/nvidiactl \
        --device /dev/nvidia-uvm --device /dev/nvidia0 --device /dev/nvidia1 \
        -v /run/cusim:/run/cusim -v /opt/cusim:/cusim:ro -e LD_LIBRARY_PATH=/cusim \
        -v /usr/lib/x86_64-linux-gnu:/lib/x86_64-linux-gnu:ro -v /usr/lib64:/lib64:ro \
        localhost/busybox /cusim/cusim-client "$@" > /dev/null
    wait_for ticked 3
}
end() { pod rm -f -t 0 job > /dev/null; }
ticks() { printed job | grep -c ok || true; }
ticked() { [ "$(ticks)" -ge "$1" ]; }
on_failure() { cat /tmp/said; printed job 2> /dev/null | tail -n 5; }
goes_on() {
    local now && now=$(ticks)
    wait_for ticked $((now + 3)) && ! printed job | grep CORRUPT
}
sum() { printed job | tail -n 1 | cut -d' ' -f2; }
does() { "$@" > /tmp/said 2>&1; }
refused() { # PATTERN COMMAND...
    local pattern=$1 && shift
    ! "$@" > /tmp/said 2>&1 && grep -Eq -- "$pattern" /tmp/said
}
recorded() { tar -xOf /tmp/job.tar checkpoint/cryopod.json | jq -e "$1" > /dev/null; }
handed_over='[.gpu.plugin_report.processes[].vram[] | select(.preload)]'
in_use() { /opt/build/cusim-ctl --socket "$sim" status | jq -c '[.gpus[] | [.pids[]] | add // 0]'; }
used() { local now && now=$(in_use) && jq -e "$1" > /dev/null <<< "$now" || { echo "$now"; false; }; }
: > /tmp/said

on=dev.cryopod.preload=on
program=cusim-client
run_rootfs() { # the same, of a root with the C library of this one, which the runtime looks for
    pod create --name job --annotation "$on" --network none --device /dev/nvidiactl \
        --device /dev/nvidia-uvm --device /dev/nvidia0 --device /dev/nvidia1 \
        -v /run/cusim:/run/cusim -v /opt/cusim:/cusim:ro -e LD_LIBRARY_PATH=/cusim \
        localhost/glibc "/cusim/$program" "$@" > /dev/null
    pod start job > /dev/null
    wait_for ticked 3
}
mkdir -p /tmp/glibc/{lib/x86_64-linux-gnu,lib64,dev,proc,sys,run,tmp}
cp /usr/lib/x86_64-linux-gnu/lib{c,m,gcc_s,dl,pthread,rt}.so.* /tmp/glibc/lib/x86_64-linux-gnu/ 2> /dev/null || true
cp -L /lib64/ld-linux-x86-64.so.2 /tmp/glibc/lib64/
tar -C /tmp/glibc -c . | pod import -q - localhost/glibc > /dev/null
