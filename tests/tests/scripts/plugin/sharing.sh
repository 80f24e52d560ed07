# sharing.sh LOW: processes of one container that share GPU memory, under podman with cryopod-runtime, on the simulated driver,
# whose checkpoint of them succeeds and whose restore fails. What cannot come back is refused before the freeze and goes on.
low=$1
mkimage
configure() { # LINE...
    low_level "$low"
    printf '[nvidia]\nlibcuda = ["/opt/cusim/libcuda.so.1"]\n' >> /etc/cryopod/config.toml
    [ $# = 0 ] || printf '%s\n' "$@" >> /etc/cryopod/config.toml
}
configure
mkdir -p /run/cusim
sim=/run/cusim/server.sock
/opt/build/cusim-ctl --socket "$sim" install /opt/cusim > /dev/null
/opt/build/cusim-server --socket "$sim" --dev-root /dev --gpus 2 --memory-mib 4096 > /tmp/server.log 2>&1 &
wait_for /opt/build/cusim-ctl --socket "$sim" status > /dev/null 2>&1

common=(--network none --device /dev/nvidiactl --device /dev/nvidia-uvm --device /dev/nvidia0 --device /dev/nvidia1
    -v /run/cusim:/run/cusim -v /opt/cusim:/cusim:ro -e LD_LIBRARY_PATH=/cusim
    -v /usr/lib/x86_64-linux-gnu:/lib/x86_64-linux-gnu:ro -v /usr/lib64:/lib64:ro)
ranks=(/cusim/cusim-client --mib 8 --procs 2 --gpus 0,1 --nccl)
run() { # ARG... -- COMMAND...
    local args=()
    while [ "$1" != -- ]; do args+=("$1") && shift; done
    shift
    pod run -d --name job "${common[@]}" "${args[@]}" localhost/busybox "$@" > /dev/null
    wait_for ticked 6
}
ticks() { printed job | grep -c ' ok ' || true; }
ticked() { [ "$(ticks)" -ge "$1" ]; }
on_failure() { printed job | tail -n 5; cat /tmp/said; }
goes_on() {
    local now && now=$(ticks)
    wait_for ticked $((now + 8)) && ! printed job | grep -E 'CORRUPT|rror'
}
one_sum() { # of each process, from the first line to the last
    [ "$(printed job | awk '$3 == "ok" {print $2, $5}' | sort -u | wc -l)" = "$(printed job | awk '$3 == "ok" {print $5}' | sort -u | wc -l)" ]
}
end() { pod rm -f -t 0 job > /dev/null; }
said() { printed job | grep "^# $1" > /dev/null; }
both_said() { [ "$(printed job | grep -c "^# $1 p")" = 2 ]; }

refused() { # NAME PATTERN: nothing is frozen, and no driver is asked
    rm -f /tmp/job.tar
    /opt/build/cusim-ctl --socket "$sim" set fail-lock > /dev/null
    if pod container checkpoint --export /tmp/job.tar job > /tmp/said 2>&1; then echo "$1: checkpointed" && exit 1; fi
    check "$1: refused with the reason" grep -Eq "the checkpoint was refused and the container goes on running: process [0-9]+ \(cusim-client\): it $2" /tmp/said
    check "$1: no archive" test ! -s /tmp/job.tar
    if cryopod suspend job > /tmp/said 2>&1; then echo "$1: suspended" && exit 1; fi
    check "$1: not suspended either" grep -Eq "not suspended, and it runs on: process [0-9]+ \(cusim-client\): it $2" /tmp/said
    /opt/build/cusim-ctl --socket "$sim" clear > /dev/null
    check "$1: goes on" goes_on
}
restored() { # NAME: with the same sums
    : > /tmp/said
    pod container checkpoint --export /tmp/job.tar job > /dev/null
    end
    pod container restore --import /tmp/job.tar > /dev/null
    check "$1: restored, goes on" goes_on
    check "$1: the same sums" one_sum
}

# ---- NCCL's transports
run -- "${ranks[@]}"
check 'the default is P2P/CUMEM' said 'rank 1 via P2P/CUMEM p1'
refused P2P/CUMEM 'shares GPU memory through NCCL with process [0-9]+ \(cusim-client\); .* is P2P/CUMEM: .*destroy_process_group.*dev.cryopod.env.avoid=nccl.*dev.cryopod.gpu.sharing=allow'
end
run -e NCCL_CUMEM_ENABLE=0 -- "${ranks[@]}"
refused P2P/IPC 'shares .* is P2P/IPC:'
end
run -e NCCL_P2P_DISABLE=1 -- "${ranks[@]}"
refused 'cuMem host memory' 'shares .* is SHM in cuMem host memory:'
end
run -e NCCL_P2P_DISABLE=1 -e NCCL_CUMEM_HOST_ENABLE=0 -e NCCL_NVLS_ENABLE=0 -- "${ranks[@]}"
check 'legacy SHM is used' said 'rank 0 via SHM/direct p0'
restored 'legacy SHM'
end
run --annotation dev.cryopod.env.avoid=nccl -- "${ranks[@]}"
check 'env.avoid=nccl: sockets are used' said 'rank 0 via NET/Socket p0'
restored sockets
end

# ---- taken down
run -- "${ranks[@]}"
podman exec job touch /tmp/down
wait_for both_said down
restored_down() { # NAME
    pod container checkpoint --export /tmp/job.tar job > /dev/null
    end
    pod container restore --import /tmp/job.tar > /dev/null
    podman exec job touch /tmp/up
    wait_for both_said up
    check "$1: made again, goes on" goes_on
    check "$1: the same sums" one_sum
}
restored_down 'communicators destroyed'
end
run --annotation dev.cryopod.gpu.sharing=allow -- "${ranks[@]}"
podman exec job touch /tmp/down
wait_for both_said down
restored_down 'communicators destroyed, sharing=allow'
# Made again, it shares memory again; the override lets it pass, and it is lost, as with the real driver.
pod container checkpoint --export /tmp/job.tar job > /dev/null
end
if pod container restore --import /tmp/job.tar > /tmp/said 2>&1; then echo 'sharing=allow with communicators up: restored' && exit 1; fi
check 'sharing=allow with communicators up: the driver does not restore it' \
    grep -Eqr --include restore.log 'cryopod: Error: .*cusim-client.*NOT_SUPPORTED' /var/lib/containers /run/containers
podman ps -aq | xargs -r podman rm -f -t 0 > /dev/null 2>&1

# ---- the configuration and the annotation
low_level "$low"
printf '[nvidia]\nlibcuda = ["/opt/cusim/libcuda.so.1"]\nsharing = "maybe"\n' >> /etc/cryopod/config.toml
if pod run --rm "${common[@]}" localhost/busybox true > /tmp/said 2>&1; then echo 'a wrong key is accepted' && exit 1; fi
check 'a wrong value in the configuration names the key' grep -q 'sharing = "maybe"' /tmp/said
sed -i 's/maybe/allow/' /etc/cryopod/config.toml
run --annotation dev.cryopod.gpu.sharing=perhaps -- "${ranks[@]}"
if pod container checkpoint --export /tmp/job.tar job > /tmp/said 2>&1; then echo 'a wrong annotation is accepted' && exit 1; fi
check 'a wrong annotation is named' grep -q 'annotation dev.cryopod.gpu.sharing: "perhaps" is not one of refuse, allow' /tmp/said
check 'a wrong annotation: goes on' goes_on
end
run --annotation dev.cryopod.gpu.sharing=refuse -- "${ranks[@]}"
refused 'the annotation comes before the configuration' 'shares '
end
configure

# ---- CUDA IPC
run -- /cusim/cusim-client --mib 8 --procs 2 --gpus 0 --ipc
refused 'an importer by CUDA IPC' 'uses GPU memory of process [0-9]+ \(cusim-client\) by CUDA IPC:'
end

# ---- what is no reason
run -- /cusim/cusim-client --mib 8 --nccl --fork-idle 2
restored 'one rank, children without a context'
end
run -- sh -c '/cusim/cusim-client --mib 8 --nccl & /cusim/cusim-client --mib 8 --nccl; wait'
restored 'two jobs of one rank each'
end
run -- /cusim/cusim-client --mib 8 --procs 3 --gpus 0,1
restored 'several processes, a front without a context'
end
run -- /cusim/cusim-client --mib 8 --ipc
restored 'memory exported that nobody imports'
end
check 'no operation is left' test -z "$(ls -A /run/cryopod)"
