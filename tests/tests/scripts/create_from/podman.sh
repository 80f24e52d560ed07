# podman.sh LOW: containers that are created from a checkpoint, under podman; with the simulated driver's GPU and without.
low=$1
mkimage
simulate "$low"
from=/srv/checkpoints
mkdir -p "$from"
printf '[restore]\nallow = [{ from = "%s", variable = true }]\n' "$from" >> /etc/cryopod/config.toml
on_failure() { cat /tmp/said; find /var/lib/containers/storage/overlay-containers -name restore.log -exec grep Error {} +; }
saved() { # CONTAINER: its images, and the container removed
    pod container checkpoint --keep "$1" > /dev/null
    cp -r "$(podman inspect -f '{{.StaticDir}}' "$1")/checkpoint" "$from/$1"
    podman rm -f -t 0 "$1" > /dev/null
}
ours() { cryopod-runtime state "$(podman inspect -f '{{.Id}}' "$1")" | jq -r .status; }
nothing_left() { [ -z "$(ls -A /run/cryopod)" ] && [ -z "$("$low" list -q)" ]; }

# podman shows the reason if it knows that the runtime's log is JSON (docs/usage.md).
mkdir -p /etc/containers/containers.conf.d
echo -e '[engine]\nruntime_supports_json = ["crun", "runc", "cryopod-runtime"]' > /etc/containers/containers.conf.d/json.conf

# ---- without a GPU ----
plain=(--network none localhost/busybox "${counter[@]}")
pod run -d --name c1 --hostname first "${plain[@]}" > /dev/null
wait_for counted c1 5
saved c1
copy() { pod "$1" -d --name "$2" --hostname "$2" --annotation dev.cryopod.restore=$from/c1 "${plain[@]}" > /dev/null 2> /tmp/said; }
for i in 1 2 3; do
    check "copy $i" copy run "copy$i"
    wait_for counted "copy$i" 6
    # The images' count, and none before it: it did not begin anew.
    check 'it goes on' test "$(printed "copy$i" | head -n 1)" -ge 4
    check 'its own name' test "$(podman exec "copy$i" hostname)" = "copy$i"
done
check 'a copy is checkpointed' saved copy1
pod run -d --name again --annotation dev.cryopod.restore=$from/copy1 "${plain[@]}" > /dev/null
wait_for counted again 8
check 'a copy of a copy' test "$(printed again | head -n 1)" -ge 6
podman pause copy2 > /dev/null && podman unpause copy2 > /dev/null
check 'it ends by a signal' podman stop -t 1 copy2
check 'and starts again from the checkpoint' podman start copy2
wait_for counted copy2 6
podman rm -f -t 0 copy2 copy3 again > /dev/null

# From an archive: an open file in /dev/shm, which podman mounts from outside.
shared=(--network none localhost/busybox sh -c 'sleep 1000 & exec 3> /dev/shm/own; i=0; while :; do echo $i; echo $i >&3; i=$((i + 1)); sleep 0.1; done')
pod run -d --name c4 -v /srv/checkpoints:/volume "${shared[@]}" > /dev/null
wait_for counted c4 5
pod container checkpoint --export "$from/c4.tar" c4 > /dev/null
chmod go-w "$from/c4.tar"
podman rm -f -t 0 c4 > /dev/null
copy() { pod run -d --name shm --annotation dev.cryopod.restore=$from/c4.tar "$@" > /dev/null 2> /tmp/said; }
check 'a copy' copy -v /srv/checkpoints:/volume -e RANK=7 "${shared[@]}"
wait_for counted shm 9 # a number is in the file once the next one is printed
check 'its file in /dev/shm' podman exec shm sh -c 'test $(head -n 1 /dev/shm/own) = 0; test $(tail -n 1 /dev/shm/own) -ge 8'
check 'the new environment' podman exec shm grep -qz '^RANK=7$' /run/cryopod/environ
podman rm -f -t 0 shm > /dev/null
for unfit in "-v /srv:/srv|the checkpoint has a mount at /volume that the new container lacks" \
    "-v /srv/checkpoints:/volume -v /srv:/etc|a mount at /etc, which would hide the checkpoint's at /etc/" \
    "-v /srv/checkpoints:/volume --network host|a network of its own, and the new container the host's" \
    '-v /srv/checkpoints:/volume --pids-limit 1|processes and threads, and the container may have 1; start it with a higher limit'; do
    # shellcheck disable=SC2086 # several words
    if copy ${unfit%|*} localhost/busybox true; then exit 1; fi
    podman rm -f -t 0 shm > /dev/null 2>&1 || true
    check "refused: ${unfit#*|}" grep -qF "${unfit#*|}" /tmp/said
done

# Another image under the same name: CRIU says that a file has another size.
mkdir /tmp/moved && tar -C /tmp/moved -xf /usr/local/share/testbed/busybox.tar && echo >> /tmp/moved/bin/busybox
tar -C /tmp/moved -c . | podman import -q - localhost/moved > /dev/null
if copy -v /srv/checkpoints:/volume localhost/moved true; then exit 1; fi
podman rm -f -t 0 shm > /dev/null
check 'told: another image' grep -q 'has bad size.*use the same image' /tmp/said

# A port of the host's network that another process has. Older CRIUs save no socket on a new kernel.
# shellcheck disable=SC2016
port=(--network host localhost/busybox sh -c 'nc -l -p 7777 & i=0; while :; do echo $i; i=$((i + 1)); sleep 0.1; done')
if criu_from 4.2; then
    pod run -d --name c6 "${port[@]}" > /dev/null
    wait_for counted c6 3
    saved c6
    copy() { pod run -d --name port --annotation dev.cryopod.restore=$from/c6 "${port[@]}" > /dev/null 2> /tmp/said; }
    python3 -c 'import socket, time; s = socket.socket(socket.AF_INET6); s.bind(("::", 7777)); s.listen(); time.sleep(1000)' &
    listens() { grep -q ':1E61 .* 0A ' /proc/net/tcp6; }
    wait_for listens
    if copy; then exit 1; fi
    podman rm -f -t 0 port > /dev/null
    check 'refused: a port that is taken' grep -q 'the TCP port 7777, which another process has.*ss -tlnp' /tmp/said
    kill %% && wait %% || true
    check 'a copy when it is free' copy
    podman rm -f -t 0 port > /dev/null
fi

# A terminal, and an exit code.
# shellcheck disable=SC2016
terminal=(--network none localhost/busybox sh -c 'trap "exit 7" TERM; i=0; while :; do echo $i; i=$((i + 1)); sleep 0.1; done')
typed() { printed "$1" | tr -d '\r' | sed -n "$2p"; } # NAME LINE
typed_past() { local n && n=$(typed "$1" '$') && [ "${n:--1}" -ge "$2" ]; }
pod run -d --tty --name tty "${terminal[@]}" > /dev/null
wait_for typed_past tty 5
saved tty
check 'a copy with a terminal' pod run -d --tty --name tty1 --annotation dev.cryopod.restore=$from/tty "${terminal[@]}" > /dev/null
wait_for typed_past tty1 6
check 'it goes on' test "$(typed tty1 1)" -ge 4
check 'on its terminal' podman exec tty1 sh -c 'test -c /proc/1/fd/1 && case $(readlink /proc/1/fd/1) in /dev/pts/*) ;; *) false ;; esac'
podman stop -t 60 tty1 > /dev/null
check 'its exit code' test "$(podman inspect -f '{{.State.ExitCode}}' tty1)" = 7
podman rm tty1 > /dev/null

# Between create and start.
pod create --name c2 --annotation dev.cryopod.restore=$from/c1 "${plain[@]}" > /dev/null
podman init c2 > /dev/null
check 'created' test "$(ours c2)" = created
sleep 0.5
check 'it runs no instruction' test -z "$(printed c2)"
podman start c2 > /dev/null
wait_for counted c2 6
check 'running' test "$(ours c2)" = running
podman rm -f -t 0 c2 > /dev/null
pod create --name c3 --annotation dev.cryopod.restore=$from/c1 "${plain[@]}" > /dev/null
podman init c3 > /dev/null
check 'removed before its start' podman rm -f -t 0 c3
check 'nothing is left' wait_for nothing_left

# Hooks, each at its point.
mkdir /srv/hooks
cat > /srv/hook.sh << 'T'
#!/bin/bash
echo "$1 $(jq -r '"\(.status) \(.id) \(.pid)"') $(readlink /proc/self/ns/net)" >> /tmp/hooks
[ ! -e "/tmp/fails-$1" ] || { echo "not today, ${HOOKED:-without it}" >&2 && exit 1; }
T
chmod 755 /srv/hook.sh
hook() { # STAGE
    jq -n --arg stage "$1" '{version: "1.0.0", when: {always: true}, stages: [$stage], hook: {path: "/srv/hook.sh", args: ["hook.sh", $stage]}}' \
        > "/srv/hooks/$1.json"
}
hooked() { podman --runtime cryopod-runtime --hooks-dir /srv/hooks "$@"; }
stages() { cut -d ' ' -f 1,2 /tmp/hooks | tr '\n' ','; }
for stage in prestart createRuntime createContainer poststart poststop; do hook $stage; done
hooked create --name hooks --annotation dev.cryopod.restore=$from/c1 "${plain[@]}" > /dev/null
hooked init hooks > /dev/null
check 'the hooks of create' test "$(stages)" = 'createRuntime creating,prestart creating,createContainer creating,'
pid=$(podman inspect -f '{{.State.Pid}}' hooks)
check 'with the state' test "$(cut -d ' ' -f 3,4 /tmp/hooks | sort -u)" = "$(podman inspect -f '{{.Id}}' hooks) $pid"
check 'in the namespaces' test "$(awk '{print $5}' /tmp/hooks | tr '\n' ' ')" = \
    "$(readlink /proc/self/ns/net) $(readlink /proc/self/ns/net) $(readlink "/proc/$pid/ns/net") "
rm /tmp/hooks
hooked start hooks > /dev/null
check 'the hook of start' test "$(stages)" = 'poststart running,'
wait_for counted hooks 6
hooked rm -f -t 0 hooks > /dev/null
check 'the hook of delete' grep -q '^poststop ' /tmp/hooks

refused() { # NAME WANT ARG...
    local name=$1 want=$2 && shift 2
    if pod run -d --name no "$@" "${plain[@]}" > /tmp/said 2>&1; then echo "$name: started" && exit 1; fi
    podman rm -f -t 0 no > /dev/null 2>&1 || true
    check "refused: $name" grep -qF -- "$want" /tmp/said
    check 'nothing is left' wait_for nothing_left
}
refused 'not allowed' 'add its directory to `restore.allow`' --annotation dev.cryopod.restore=/srv/other
refused 'not there' 'it cannot be opened' -e CRYOPOD_RESTORE=$from/none
mkdir "$from/empty"
refused 'no checkpoint' 'not a checkpoint: the directory has no inventory.img' --annotation dev.cryopod.restore=$from/empty
cp -r "$from/c1" "$from/damaged"
truncate -s 30 "$from/damaged/mm-1.img"
refused 'damaged' 'the checkpoint is untouched: mm-1.img: ends in the middle' --annotation dev.cryopod.restore=$from/damaged
refused 'more than the spec gives' 'has capabilities in the images that the spec does not give' --cap-drop all --annotation dev.cryopod.restore=$from/c1

pod() { HOOKED='by the runtime' hooked "$@"; }
touch /tmp/fails-createContainer
refused 'a hook that fails' 'the createContainer hook /srv/hook.sh failed: exit status: 1: not today, by the runtime' --annotation dev.cryopod.restore=$from/c1
rm /tmp/fails-createContainer
touch /tmp/fails-poststart
refused 'a hook of start that fails' 'the poststart hook /srv/hook.sh failed' --annotation dev.cryopod.restore=$from/c1
rm /tmp/fails-poststart
hook startContainer
refused 'a hook that cannot be run' 'has the startContainer hook /srv/hook.sh' --annotation dev.cryopod.restore=$from/c1
pod() { podman --runtime cryopod-runtime "$@"; }

otherwise() { # NAME WANT ARG...: it starts without the checkpoint, and says why
    local name=$1 want=$2 && shift 2
    pod run -d --name cold --annotation dev.cryopod.restore.otherwise=start "$@" "${plain[@]}" > /tmp/said
    wait_for counted cold 1
    # podman's log of the container has the runtime's messages as well.
    check "otherwise: $name" test "$(printed cold | grep -v '[^0-9]' | head -n 1)" = 0
    cryopod-runtime state "$(podman inspect -f '{{.Id}}' cold)" | jq -r '.annotations["dev.cryopod.restore.failed"]' > /tmp/said
    check 'it says why' grep -qF -- "$want" /tmp/said
    podman rm -f -t 0 cold > /dev/null
    check 'nothing is left' wait_for nothing_left
}
otherwise 'not there' 'it cannot be opened' -e CRYOPOD_RESTORE=$from/none
otherwise 'damaged' 'the checkpoint is untouched: mm-1.img: ends in the middle' --annotation dev.cryopod.restore=$from/damaged
refused 'an unknown word' 'is neither "fail" nor "start"' --annotation dev.cryopod.restore.otherwise=maybe -e CRYOPOD_RESTORE=$from/c1

# ---- with a GPU ----
run_job
saved job
for i in 1 2; do
    pod run -d --name "gpu$i" --network none "${nodes[@]/#/--device=}" "${binds[@]/#/--volume=}" \
        -e LD_LIBRARY_PATH=/cusim --annotation dev.cryopod.restore=$from/job localhost/busybox /cusim/cusim-client > /tmp/said 2>&1 ||
        { cat /tmp/said && exit 1; }
    check "GPU copy $i goes on" goes_on "gpu$i"
done
podman rm -f -t 0 gpu1 gpu2 > /dev/null
check 'nothing is left' wait_for nothing_left
