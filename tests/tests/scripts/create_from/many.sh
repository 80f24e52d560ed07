# many.sh LOW [COPIES [CREATES]]: many copies at once of one checkpoint, without a GPU and with; a runtime that is killed
# or whose CRIU is killed, at ten points of a create.
low=$1 copies=${2:-20} creates=${3:-20}
mkimage
low_level "$low"
printf '[nvidia]\nlibcuda = ["/opt/cusim/libcuda.so.1"]\n' >> /etc/cryopod/config.toml
mkdir -p /run/cusim
sim=/run/cusim/server.sock
/opt/build/cusim-ctl --socket "$sim" install /opt/cusim > /dev/null
/opt/build/cusim-server --socket "$sim" --dev-root /dev --proc-root /run/simulated --gpus 4 --memory-mib 1024 > /tmp/server.log 2>&1 &
wait_for test -S "$sim"
mount --bind /run/simulated/driver /proc/driver
from=/srv/checkpoints cache=/var/cache/cryopod
mkdir -p "$from"
printf '[restore]\nallow = ["%s"]\n' "$from" >> /etc/cryopod/config.toml
on_failure() { tail -q -n 3 /tmp/said*; ps -eo pid,ppid,stat,comm | tail -n 20; ls -la "$cache" /run/cryopod; "$low" list; }
saved() { # CONTAINER
    pod container checkpoint --export "$from/$1.tar" "$1" > /dev/null
    chmod go-w "$from/$1.tar"
    podman rm -f -t 0 "$1" > /dev/null
}
frozen() { # the cgroups that are frozen
    grep -lrx --include=cgroup.freeze 1 /sys/fs/cgroup 2> /dev/null; grep -lrx --include=freezer.state FROZEN /sys/fs/cgroup 2> /dev/null; :
}
nothing_runs() {
    [ -z "$(ls -A "/run/$low" | grep ^many)" ] && [ -z "$("$low" list -q)" ] && [ -z "$(ls -A $cache | grep '^\.')" ] && [ -z "$(frozen)" ] && ! pgrep -x 'criu|crun|runc|sh' > /dev/null
}
nothing_left() { nothing_runs && [ -z "$(ls -A /run/cryopod)" ] && ! grep -q /run/cryopod /proc/self/mountinfo; }
# podman shows the reason if it knows that the runtime's log is JSON (docs/usage.md).
mkdir -p /etc/containers/containers.conf.d
echo -e '[engine]\nruntime_supports_json = ["crun", "runc", "cryopod-runtime"]' > /etc/containers/containers.conf.d/json.conf
plain=(--network none localhost/busybox "${counter[@]}")
pod run -d --name c1 "${plain[@]}" > /dev/null
wait_for counted c1 5
saved c1

all() { # COMMAND: with each of the copies' numbers, at once
    local i pids=()
    for i in $(seq "$copies"); do "$1" "$i" & pids+=($!); done
    for i in "${pids[@]}"; do wait "$i" || return 1; done
}
plain_run() { pod run -d --name "plain$1" --hostname "plain$1" "${plain[@]}" > /dev/null 2> "/tmp/said$1"; }
copy() { pod run -d --name "copy$1" --hostname "copy$1" --annotation dev.cryopod.restore=$from/c1.tar "${plain[@]}" > /dev/null 2> "/tmp/said$1"; }
whole() { # NUMBER
    wait_for counted "copy$1" 6 && [ "$(printed "copy$1" | head -n 1)" -ge 4 ] && [ "$(podman exec "copy$1" hostname)" = "copy$1" ]
}
began() { date +%s%3N; }
at=$(began)
check "$copies plain containers at once" all plain_run
plain_ms=$(($(began) - at))
podman rm -f -t 0 -a > /dev/null
at=$(began)
check "$copies copies at once" all copy
echo "plain: $plain_ms ms, copies: $(($(began) - at)) ms"
check 'all right, each with its name' all whole
check 'one entry in the cache' test "$(cryopod cache ls | grep -c "^[0-9a-f]")" = 1
podman rm -f -t 0 -a > /dev/null
check 'nothing is left' wait_for nothing_left

# Four copies of a GPU job, each on a GPU of its own. The job has one GPU.
nodes=(/dev/nvidiactl /dev/nvidia-uvm /dev/nvidia0)
run_job
saved job
on_gpu() { # NUMBER: of the GPU
    pod run -d --name "gpu$1" --network none --device /dev/nvidiactl --device /dev/nvidia-uvm --device "/dev/nvidia$1" "${binds[@]/#/--volume=}" \
        -e LD_LIBRARY_PATH=/cusim --annotation dev.cryopod.restore=$from/job.tar localhost/busybox /cusim/cusim-client > /dev/null 2> "/tmp/said$1"
}
pids=()
for i in 0 1 2 3; do on_gpu $i & pids+=($!); done
for i in 0 1 2 3; do check "a copy on GPU $i" wait "${pids[$i]}"; done
check 'one on each GPU' test "$(/opt/build/cusim-ctl --socket "$sim" status | jq -c '[.gpus[].pids | length]')" = '[1,1,1,1]'
for i in 0 1 2 3; do check "the sum on GPU $i goes on" goes_on "gpu$i"; done
podman rm -f -t 0 -a > /dev/null
check 'nothing is left' wait_for nothing_left

# Bundles without an engine: creates at once, and a runtime that is killed at ten points.
bundle /tmp/b "${counter[@]}"
jq --arg from "$from/c1.tar" '.annotations = {"dev.cryopod.restore": $from} | .linux.seccomp = null | .process.noNewPrivileges = false
    | .process.capabilities |= map_values(["CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_NET_BIND_SERVICE",
        "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT"])' /tmp/b/config.json > /tmp/config.json
made() { # NUMBER: a bundle of its own
    mkdir -p "/tmp/many/$1"
    cp -al /tmp/b/rootfs "/tmp/many/$1/rootfs"
    jq --arg path "/many/$1" '.linux.cgroupsPath = $path' /tmp/config.json > "/tmp/many/$1/config.json"
}
created() { # NUMBER
    made "$1" && cryopod-runtime create --bundle "/tmp/many/$1" "many$1" < /dev/null > "/tmp/many/$1/out" 2> "/tmp/many/$1/err" ||
        { cat "/tmp/many/$1/err"; return 1; }
}
deleted() { cryopod-runtime delete --force "many$1"; }
goes() { # NUMBER
    cryopod-runtime start "many$1" && wait_for test -s "/tmp/many/$1/out" && [ "$(head -n 1 "/tmp/many/$1/out")" -ge 4 ]
}
copies=$creates
check "$creates creates at once" all created
sleep 0.3
check 'none runs before its start' test "$(cat /tmp/many/*/out | wc -c)" = 0
check 'all start' all goes
check 'all are deleted' all deleted
check 'nothing is left' wait_for nothing_left
rm -rf /tmp/many
not_mounted() { ! grep -F "$1" /proc/self/mountinfo; }
for victim in cryopod-runtime criu; do
    for i in $(seq 10); do
        made "$i"
        cryopod-runtime create --bundle "/tmp/many/$i" "many$i" < /dev/null > "/tmp/many/$i/out" 2> "/tmp/many/$i/err" &
        runtime=$!
        sleep "0.$(printf %03d $((i * 25)))"
        pkill -KILL -x "${victim:0:15}" || true
        wait $runtime 2> /dev/null || true
        # What an engine does after a failed create.
        cryopod-runtime delete --force "many$i" > /tmp/said 2>&1 || true
        check "$victim killed after $((i * 25)) ms: nothing runs" wait_for nothing_runs
        check 'nothing is mounted' not_mounted "/tmp/many/$i"
        rm -rf --one-file-system "/tmp/many/$i"
    done
done
# The next operation removes the directory of a dead one.
check 'the next one' created next
check 'goes on' goes next
check 'and is deleted' deleted next
# As of any container that is only created. containerd does so if its client goes away meanwhile.
check 'one that does not start' created unstarted
for verb in pause resume checkpoint; do
    check "$verb: refused before its start" sh -c "! cryopod-runtime $verb manyunstarted 2> /tmp/said && grep -q 'has not been started; start it first' /tmp/said"
done
check 'it has not run' test ! -s /tmp/many/unstarted/out
check 'is deleted without force' cryopod-runtime delete manyunstarted
check 'nothing is left' wait_for nothing_left
