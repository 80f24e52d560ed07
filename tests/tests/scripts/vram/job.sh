# job.sh LOW: a container of the simulated driver's client under podman, and what the
# scenarios ask of it.
# shellcheck shell=bash disable=SC2154,SC2034
low=$1
mkimage
simulate "$low" --proc-root /run/simulated
mount --bind /run/simulated/driver /proc/driver

gpus=(0 1) # that the container has
given() {  # its options: nodes, and the simulated driver
    local gpu
    for gpu in "${gpus[@]}"; do printf '%s\n' --device "/dev/nvidia$gpu"; done
    printf '%s\n' --network none --device /dev/nvidiactl --device /dev/nvidia-uvm \
        -v /run/cusim:/run/cusim -v /opt/cusim:/cusim:ro -e LD_LIBRARY_PATH=/cusim
}
run() { # [--annotation KEY=VALUE] cusim-client ARG...
    local options && mapfile -t options < <(given)
    if [ "$1" = --annotation ]; then options+=("$1" "$2") && shift 2; fi
    pod run -d --name job "${options[@]}" \
        -v /usr/lib/x86_64-linux-gnu:/lib/x86_64-linux-gnu:ro -v /usr/lib64:/lib64:ro \
        localhost/busybox /cusim/cusim-client "$@" > /dev/null
    wait_for ticked 3
}
end() { pod rm -f -t 0 job > /dev/null; }
ticks() { printed job | grep -c ok || true; }
ticked() { [ "$(ticks)" -ge "$1" ]; }
on_failure() { cat /tmp/said; printed job 2> /dev/null | tail -n 5; }
goes_on() { # the sums come again, and are right
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
# What the device server says is in use on each GPU.
in_use() { /opt/build/cusim-ctl --socket "$sim" status | jq -c '[.gpus[] | [.pids[]] | add // 0]'; }
uses() { local now && now=$(in_use) && jq -e "$1" > /dev/null <<< "$now"; }
# It learns of a process's death when its own thread reads that the connection is closed: soon, not at once.
used() { wait_for uses "$1" || { in_use; false; }; }
set_switch() { /opt/build/cusim-ctl --socket "$sim" set "$1" > /dev/null; }
clear_switches() { /opt/build/cusim-ctl --socket "$sim" clear > /dev/null; }
# hangs_at SWITCH: the step hangs, set by `set_switch SWITCH:1`. It goes on with `clear_switches`.
hangs_at() { /opt/build/cusim-ctl --socket "$sim" status | jq -e --arg name "$1" 'any(.faults[]; .name == $name and .count == 0)' > /dev/null; }
# As long as there is one, it may still hold the container's lock.
no_agent() { ! pgrep -x cryopod-cuda-ag > /dev/null; }
# hangs_or_ended SWITCH PID: the same, or the process whose step it is has ended without it.
hangs_or_ended() { hangs_at "$1" || ! kill -0 "$2" 2> /dev/null; }
: > /tmp/said

# With the preload library: of a root with the C library of this one, which the runtime looks for.
on=dev.cryopod.preload=on
program=cusim-client
handed_over='[.gpu.plugin_report.processes[].vram[] | select(.preload)]'
glibc_image() {
    mkdir -p /tmp/glibc/{lib/x86_64-linux-gnu,lib64,dev,proc,sys,run,tmp}
    cp /usr/lib/x86_64-linux-gnu/lib{c,m,gcc_s,dl,pthread,rt}.so.* /tmp/glibc/lib/x86_64-linux-gnu/ 2> /dev/null || true
    cp -L /lib64/ld-linux-x86-64.so.2 /tmp/glibc/lib64/
    tar -C /tmp/glibc -c . | pod import -q - localhost/glibc > /dev/null
}
extra=() # further options of run_rootfs
run_rootfs() { # ARG-OF-THE-PROGRAM...
    local options && mapfile -t options < <(given)
    pod create --name job --annotation "$on" "${extra[@]}" "${options[@]}" localhost/glibc "/cusim/$program" "$@" > /dev/null
    pod start job > /dev/null
    wait_for ticked 3
}
