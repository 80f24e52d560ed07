#!/bin/bash
# run.sh: checkpoint and restore of GPU containers with podman, crun, runc, CRIU and cryopod on a machine with NVIDIA
# GPUs. Prints a table and leaves results.json, table.txt, probe.txt and logs.tar.gz in GPU_TEST_OUT.
#
# Needs: root, a kernel with cgroup v2, an NVIDIA driver (570 or later), nvcc, and for the PyTorch part a Python with
# torch. No container stack is needed: it comes in dist/gpu-root.tar.gz (made by pack.sh, which needs Debian and the
# release binaries). Everything runs in mount and cgroup namespaces of its own and is removed at the end.
#
#   GPU_TEST_PARTS      of: probe jobs leave-running at-pause twice cycles torch loader loader-early serve two map vram unreadable overlap
#                       vram-two vram-apart digests preload preload-calls preload-running preload-pause serving turns preload-torch preload-programs preload-cost preload-two preload-apart
#                       parallel parallel-random parallel-apart parallel-copy parallel-cost processes preload-processes suspend chain archive archive-vram sealed nccl ipc copies
#                       copies-two docker ctr cri elsewhere against (default: all but the last that the machine can do; docker, ctr and cri need dist/gpu-engines.tar.zst)
#   GPU_TEST_ELSEWHERE  a place that part elsewhere filled on another machine (elsewhere.tar.zst in GPU_TEST_OUT); its training goes on here
#   GPU_TEST_OTHER      a tar.gz of another build's cryopod-runtime, cryopod-cuda-agent and cryopod_nvidia.so: part against takes turns
#   GPU_TEST_RUNTIMES   default "crun runc"
#   GPU_TEST_SIZES      GiB of GPU memory, default "1 8 24"; host memory of about three times the largest is needed, of five for cri
#   GPU_TEST_STORE_OFF_SIZES  the same without the store, for docker and ctr, default 2: docker takes 22 s a GiB
#   GPU_TEST_TWO_SIZE   GiB on each of several GPUs, default 16; GPU_TEST_MANY: of so many, default 2;
#                       GPU_TEST_PROCESSES: processes of one container in part processes (200)
#   GPU_TEST_CYCLES     checkpoints and restores of part cycles (200), GPU_TEST_KILLS: how many of them are killed (30)
#   GPU_TEST_VRAM_SIZE  GiB for the VRAM files, default 24 (100 MiB in a rehearsal); GPU_TEST_VRAM_RUNS: how often each (3),
#                       GPU_TEST_VRAM_OFF_RUNS: how often without the VRAM files (1)
#   GPU_TEST_PAUSE_SIZES  GiB for the application's pause, default "24 48" (100 MiB in a rehearsal)
#   GPU_TEST_CHAIN_LAYERS  layers of the transformer whose training is checkpointed every 10 s (2: 12 checkpoints take
#                       about 50 GB)
#   GPU_TEST_ARCHIVE_GIB  for tests/bench/archive.sh, default 16 (1 in a rehearsal), in GPU_TEST_ARCHIVE_FILES (16)
#   GPU_TEST_COMPRESS   compression of the exported archive, default zstd as podman's
#   GPU_TEST_STORE      a directory for container storage and archives; default: memory, a tmpfs of GPU_TEST_STORE_SIZE (90%) with
#                       GPU_TEST_STORE_OPTIONS (none; huge=within_size, say)
#   GPU_TEST_PYTHON     a Python with torch, default: the first of python3 on PATH and /opt/torch/.venv/bin/python3
#   GPU_TEST_STEPS      training steps (120); GPU_TEST_LAYERS: layers of the transformer (6)
#   GPU_TEST_PROGRAMS   of: jax cupy, and values of PYTORCH_CUDA_ALLOC_CONF, each with /LAYERS or 2 (all, with three allocators); GPU_TEST_COSTS of:
#                       launches train serve (all)
#   GPU_TEST_PARALLEL_KINDS  of: ddp fsdp tensor pipeline exchange (all), GPU_TEST_PARALLEL_STEPS each (240), on GPU_TEST_PARALLEL_RANKS
#                       GPUs (2); GPU_TEST_PARALLEL_ROUNDS: checkpoints at random moments (20)
#   GPU_TEST_TOUCH      GiB of memory that are used once before all cases (0)
#   GPU_TEST_LIMIT      seconds for everything (3000); GPU_TEST_WAIT: for one thing that a case waits for (180)
#   GPU_TEST_OUT        where results go, default $OUT, else dist/gpu-test
#   GPU_TEST_SIM=1      a rehearsal without a GPU: the simulated driver in place of the real one, MiB in place of GiB
#                       In the test bed: tests/testbed/testbed enter -- env GPU_TEST_SIM=1 GPU_TEST_OUT=/tmp/out /src/tests/gpu/run.sh
#   GPU_TEST_TORCH      in a rehearsal: the directory of tests/torch/build, shown in the bed under the name it has there, /opt/torch;
#                       with it loader and serve are rehearsed on the CPU
set -euo pipefail

here=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)
workspace=$(cd "$here/../.." && pwd)
pack=$workspace/dist/gpu-root.tar.gz
sim=${GPU_TEST_SIM:-}
out=$(realpath -m "${GPU_TEST_OUT:-${OUT:-$workspace/dist/gpu-test}}")

die() { echo "gpu-test: $*" >&2 && exit 1; }

# ---- what it needs --------------------------------------------------------------------------------

[ "$EUID" = 0 ] || die "needs root, for namespaces, mounts and CRIU; run it as root or with sudo"
[ "$(uname -m)" = x86_64 ] || die "the packed root is for x86_64"
cgroup2=$(awk '$3 == "cgroup2" {print $2; exit}' /proc/mounts)
[ -n "$cgroup2" ] || die "needs a cgroup v2 mount, and there is none in /proc/mounts"
if [ -z "$sim" ]; then
    # shellcheck disable=SC2015
    [ -e /dev/nvidiactl ] && [ -e /proc/driver/nvidia/version ] ||
        die "no NVIDIA GPU here (/dev/nvidiactl or /proc/driver/nvidia is missing); GPU_TEST_SIM=1 rehearses without one"
    libcuda=$(ldconfig -p | awk '/libcuda\.so\.1 .*x86-64/ {print $NF; exit}')
    for dir in /usr/local/nvidia/lib64 /usr/lib64 /usr/lib/x86_64-linux-gnu; do
        if [ -z "$libcuda" ] && [ -e "$dir/libcuda.so.1" ]; then libcuda=$dir/libcuda.so.1; fi
    done
    [ -n "$libcuda" ] || die "the driver's libcuda.so.1 was not found; install NVIDIA's driver"
    nvcc=$(type -P nvcc || ls /usr/local/cuda/bin/nvcc 2> /dev/null) || die "nvcc was not found; install CUDA's compiler"
fi
stale() { # an old pack, and newer binaries to make another of
    local newest
    newest=$(find "$workspace/target/release/cryopod-runtime" "$workspace/target/release/libcryopod_nvidia.so" \
        "$workspace/target/release/cryopod-cuda-agent" -newer "$pack" 2> /dev/null || true)
    [ -n "$newest" ]
}
if [ ! -e "$pack" ] || stale; then "$here/pack.sh" "$pack"; fi

# ---- what it leaves behind: nothing ---------------------------------------------------------------

work=$(mktemp -d "${TMPDIR:-/var/tmp}/cryopod-gpu-test.XXXXXX")
group=$cgroup2/cryopod-gpu-test-$$
child=''
# shellcheck disable=SC2317 # a trap calls it
end() {
    local code=$?
    trap - EXIT
    trap '' INT TERM HUP
    if [ -d "$group" ]; then
        { echo 1 > "$group/cgroup.kill"; } 2> /dev/null || true
        for _ in {1..100}; do
            find "$group" -depth -type d -exec rmdir {} + 2> /dev/null || true
            [ -d "$group" ] || break
            sleep 0.1
        done
    fi
    if [ -n "$child" ]; then wait "$child" 2> /dev/null || true; fi
    if [ -d "$work/logs" ]; then tar -C "$work" -czf "$out/logs.tar.gz" logs || true; fi
    rm -rf --one-file-system "$work"
    if [ -d "$group" ]; then echo "gpu-test: processes remain in $group" >&2; fi
    exit "$code"
}
trap end EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

mkdir -p "$out" "$work"/{root,logs}
rm -f "$out"/{results.json,results.jsonl,table.txt,probe.txt,logs.tar.gz}
tar -C "$work/root" -xzf "$pack"
unzstd() { chroot "$work/root" /usr/bin/zstd -dc --long=27; } # the machine may have none
unzstd < "$work/root/rest.tar.zst" | tar -C "$work/root" -x
rm "$work/root/rest.tar.zst"
engines=${pack%/*}/gpu-engines.tar.zst
if [ -e "$engines" ]; then
    unzstd < "$engines" | tar -C "$work/root" -x
    cat "$work/root/etc/engine-versions" >> "$work/root/etc/stack-versions"
fi
cp "$workspace/tests/bench/archive.sh" "$work/root/opt/work/"
cp "$workspace/tests/testbed/grpc.sh" "$work/root/usr/local/bin/"
[ -z "${GPU_TEST_OTHER:-}" ] || { mkdir "$work/root/opt/work/other" && tar -C "$work/root/opt/work/other" -xzf "$GPU_TEST_OTHER"; }
[ -z "${GPU_TEST_ELSEWHERE:-}" ] || cp "$GPU_TEST_ELSEWHERE" "$work/root/opt/work/elsewhere.tar.zst"
cp "$here"/{inside.sh,cases.sh,vram_files.sh,sharing.sh,copies.sh,engines.sh,preload.sh,parallel.sh,train.py,loader.py,serve.py,nccl.py,parallel.py,ipc.py,arrays.py} "$work/root/opt/work/"

# ---- the machine's part ---------------------------------------------------------------------------

mounts=() # what PyTorch needs of the machine, beside /usr
python=''
if [ -z "$sim" ]; then
    cp -L "$libcuda" "$work/root/opt/driver/libcuda.so.1"
    for library in libnvidia-ml.so.1 libnvidia-ptxjitcompiler.so.1 libnvidia-nvvm.so.4; do
        [ -e "${libcuda%/*}/$library" ] || continue
        cp -L "${libcuda%/*}/$library" "$work/root/opt/driver/"
        ln -s "/opt/driver/$library" "$work/root/usr/lib/x86_64-linux-gnu/$library"
    done
    ln -s /opt/driver/libcuda.so.1 "$work/root/usr/lib/x86_64-linux-gnu/libcuda.so.1"
    for program in gpujob launches allreduce pointers; do
        echo "gpu-test: building $program with $nvcc"
        timeout 300 "$nvcc" -O2 -w -arch=native -Xcompiler -static-libstdc++,-static-libgcc -o "$work/root/opt/work/$program" \
            "$here/$program.cu" -ldl || die "$program could not be built"
    done
    mkdir "$work/root/opt/work/bin" # JAX compiles with them
    for tool in ptxas nvlink; do
        if [ -e "${nvcc%/*}/$tool" ]; then cp -L "${nvcc%/*}/$tool" "$work/root/opt/work/bin/"; fi
    done
    libdevice=$(find "$(dirname "$(dirname "$(readlink -f "$nvcc")")")" / -xdev -name 'libdevice*.bc' -print -quit 2> /dev/null || true)
    if [ -n "$libdevice" ]; then install -D -m 644 "$libdevice" "$work/root/opt/work/nvvm/libdevice/libdevice.10.bc"; fi
    for candidate in "${GPU_TEST_PYTHON:-}" "$(type -P python3 || true)" /opt/torch/.venv/bin/python3; do
        if [ -z "$candidate" ] || [ ! -x "$candidate" ]; then continue; fi
        # shellcheck disable=SC2016
        found=$(timeout 120 "$candidate" -c 'import os, sys, torch
for p in {sys.prefix, sys.base_prefix, os.path.dirname(sys.executable), os.path.dirname(os.path.realpath(sys.executable)), os.path.dirname(os.path.dirname(torch.__file__))}:
    print(p)' 2> /dev/null) || continue
        python=$candidate
        while read -r dir; do
            [[ $dir == /usr || $dir == /usr/* ]] || mounts+=("$dir")
        done <<< "$found"
        break
    done
    [ -n "$python" ] || echo "gpu-test: no Python with torch was found; set GPU_TEST_PYTHON. The PyTorch part is left out"
    nvidia-smi --query-gpu=index,name,uuid,memory.total,driver_version --format=csv,noheader > "$work/root/etc/gpus" || true
    cp "$work/root/etc/gpus" "$work/logs/gpus.txt"
fi
# Only the outermost directories: the rest lies in them.
top=()
while read -r dir; do
    [ -n "$dir" ] || continue
    [ ${#top[@]} -gt 0 ] && [[ $dir == "${top[-1]}"/* ]] || top+=("$dir")
done < <(printf '%s\n' "${mounts[@]}" | sort -u)
cat > "$work/root/opt/work/machine.sh" << CONF
sim=$(printf %q "$sim") python=$(printf %q "$python") torch_mounts=(${top[*]@Q})
parts=$(printf %q "${GPU_TEST_PARTS:-probe jobs leave-running at-pause twice cycles torch loader loader-early serve two map vram unreadable overlap vram-two vram-apart digests preload preload-calls preload-running preload-pause serving turns preload-torch preload-programs preload-cost preload-two preload-apart parallel parallel-random parallel-apart parallel-copy parallel-cost processes preload-processes suspend chain archive sealed nccl ipc copies copies-two docker ctr cri elsewhere}")
store_off_sizes=$(printf %q "${GPU_TEST_STORE_OFF_SIZES-2}")
runtimes=$(printf %q "${GPU_TEST_RUNTIMES:-crun runc}") sizes=$(printf %q "${GPU_TEST_SIZES:-1 8 24}")
compress=$(printf %q "${GPU_TEST_COMPRESS:-zstd}")
programs=$(printf %q "${GPU_TEST_PROGRAMS:-jax cupy backend:native expandable_segments:True backend:cudaMallocAsync}")
costs=$(printf %q "${GPU_TEST_COSTS:-launches train serve}") touch_gib=$(printf %q "${GPU_TEST_TOUCH:-0}") torch_env=() smi=$(type -P nvidia-smi || true) two_size=$(printf %q "${GPU_TEST_TWO_SIZE:-16}")
vram_size=$(printf %q "${GPU_TEST_VRAM_SIZE:-$([ -n "$sim" ] && echo 100 || echo 24)}") vram_runs=$(printf %q "${GPU_TEST_VRAM_RUNS:-3}")
archive_gib=$(printf %q "${GPU_TEST_ARCHIVE_GIB:-$([ -n "$sim" ] && echo 1 || echo 16)}") archive_files=$(printf %q "${GPU_TEST_ARCHIVE_FILES:-16}")
pause_sizes=$(printf %q "${GPU_TEST_PAUSE_SIZES:-$([ -n "$sim" ] && echo 100 || echo 24 48)}")
vram_off_runs=$(printf %q "${GPU_TEST_VRAM_OFF_RUNS:-1}") chain_layers=$(printf %q "${GPU_TEST_CHAIN_LAYERS:-2}")
many=$(printf %q "${GPU_TEST_MANY:-2}") many_processes=$(printf %q "${GPU_TEST_PROCESSES:-$([ -n "$sim" ] && echo 20 || echo 200)}") cycles=$(printf %q "${GPU_TEST_CYCLES:-$([ -n "$sim" ] && echo 20 || echo 200)}") kills=$(printf %q "${GPU_TEST_KILLS:-$([ -n "$sim" ] && echo 6 || echo 30)}")
wait_limit=$(printf %q "${GPU_TEST_WAIT:-180}") parallel_kinds=$(printf %q "${GPU_TEST_PARALLEL_KINDS:-ddp fsdp tensor pipeline exchange}") parallel_steps=$(printf %q "${GPU_TEST_PARALLEL_STEPS:-240}")
parallel_ranks=$(printf %q "${GPU_TEST_PARALLEL_RANKS:-2}") parallel_rounds=$(printf %q "${GPU_TEST_PARALLEL_ROUNDS:-20}")
steps=$(printf %q "${GPU_TEST_STEPS:-120}") layers=$(printf %q "${GPU_TEST_LAYERS:-6}")
CONF
if [ -n "$sim" ] && [ -n "${GPU_TEST_TORCH:-}" ]; then
    {
        echo "python=/usr/bin/python3 torch_mounts=($(printf %q "$GPU_TEST_TORCH")) torch_env=()"
        while read -r variable; do
            variable=${variable/LD_LIBRARY_PATH=/LD_LIBRARY_PATH=/cusim:}
            echo "torch_env+=(-e $(printf %q "$variable"))"
        done < "$GPU_TEST_TORCH/environment"
    } >> "$work/root/opt/work/machine.sh"
fi

# ---- into the root --------------------------------------------------------------------------------

mkdir "$group"
if [ -n "${GPU_TEST_STORE:-}" ]; then
    mkdir -p "$GPU_TEST_STORE"
    store=$(realpath "$GPU_TEST_STORE")
fi
# shellcheck disable=SC2016 # for the shell inside
enter='
echo 0 > "$group/cgroup.procs"
mount --bind "$root" "$root"
cd "$root"
mkdir -p out logs
mount --rbind / host
mount --make-rslave host
mount --rbind /proc proc
mount --make-rslave proc
mount -t sysfs sysfs sys
if [ -z "$sim" ]; then
    mount --rbind /dev dev
    mount --make-rslave dev
else
    mount -t tmpfs -o mode=755,size=64m dev dev
    mkdir dev/pts dev/shm
    mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts dev/pts
    cp -a /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty dev/
    ln -s pts/ptmx dev/ptmx
    ln -s /proc/self/fd dev/fd
    [ ! -e /dev/userfaultfd ] || cp -a /dev/userfaultfd dev/
fi
mount -t tmpfs tmpfs run
mkdir run/lock
mount -t tmpfs -o mode=1777 tmpfs tmp
if [ -n "$store" ]; then mount --bind "$store" var/lib/containers
else mount -t tmpfs -o "size=$store_size${store_options:+,$store_options}" tmpfs var/lib/containers; fi
mount --bind "$out" out
mount --bind "$logs" logs
exec unshare --cgroup bash -euc "$stage2"'
# shellcheck disable=SC2016
stage2='
mount -t cgroup2 cgroup2 sys/fs/cgroup
mkdir sys/fs/cgroup/init
echo 0 > sys/fs/cgroup/init/cgroup.procs
# A cgroup with processes cannot hand its controllers on, so this shell went first.
for controller in $(cat sys/fs/cgroup/cgroup.controllers); do echo "+$controller" > sys/fs/cgroup/cgroup.subtree_control || true; done
usr/bin/busybox pivot_root . old # newer util-linux has none
cd /
umount -l /old
exec env -i HOME=/root LANG=C.UTF-8 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PODMAN_IGNORE_CGROUPSV1_WARNING=1 bash /opt/work/inside.sh'
code=0
env stage2="$stage2" root="$work/root" out="$out" logs="$work/logs" group="$group" sim="$sim" store="${store:-}" \
    store_size="${GPU_TEST_STORE_SIZE:-90%}" store_options="${GPU_TEST_STORE_OPTIONS:-}" timeout --signal TERM --kill-after 20 "${GPU_TEST_LIMIT:-3000}" \
    unshare --mount --propagation private --ipc --uts bash -euc "$enter" &
child=$!
wait "$child" || code=$?
child=''
[ "$code" != 124 ] || echo "gpu-test: not within ${GPU_TEST_LIMIT:-3000} s; $out has what was done until then" >&2
exit "$code"
