# podman.sh LOW: stops that are checkpoints, under podman; with the simulated driver's GPU and without.
low=$1
mkimage
simulate "$low"
place=/srv/place log=/var/log/cryopod-on-stop.log
mkdir -p "$place" /srv/full
printf '[checkpoint]\nallow = ["%s", "/srv/full"]\n[restore]\nallow = ["%s"]\n' "$place" "$place" >> /etc/cryopod/config.toml
on_failure() { cat /tmp/said "$log"; find "$place" -name '*.log' -exec grep Error {} +; }
plain=(--network none localhost/busybox "${counter[@]}")
to() { printf -- '--annotation=%s\n' dev.cryopod.on-stop=checkpoint dev.cryopod.grace_s=60 "dev.cryopod.checkpoint.to=$1" "dev.cryopod.name=$2"; } # PLACE NAME
exit_code() { podman inspect -f '{{.State.ExitCode}}' "$1"; }
stopped() { podman stop "$@" > /tmp/said 2>&1; }
nothing_left() { [ -z "$(ls -A /run/cryopod)" ] && [ -z "$("$low" list -q)" ] && nothing_runs; }
nothing_runs() { ! pgrep -f '^cryopod-(on-stop|lease) ' > /dev/null; }
numbers() { there "$1" | sed 's/ *lease-[0-9]*//'; }
there() { { ls -A "$1" 2> /dev/null || true; } | xargs; } # DIRECTORY: what is there

# ---- without a GPU ----
mapfile -t stops < <(to $place job)
newest=(--annotation dev.cryopod.restore=latest:$place)
start=(--annotation dev.cryopod.restore.otherwise=start)
check 'no checkpoint, no container' test "$(pod run -d --name c1 "${newest[@]}" "${stops[@]}" "${plain[@]}" 2>&1 | grep -c 'there is no checkpoint of job')" = 1
podman rm -f -t 0 c1 > /dev/null 2>&1 || true
pod run -d --name c1 "${newest[@]}" "${start[@]}" "${stops[@]}" "${plain[@]}" > /dev/null 2>&1
wait_for counted c1 5
podman exec c1 sh -c 'echo kept > /root/file'
check 'a stop' stopped -t 60 c1
check 'with the exit code of TERM' test "$(exit_code c1)" = 143
check 'is a checkpoint' test -e $place/job/000001/cryopod.json
last=$(count c1)
check 'nothing is left' wait_for nothing_left
pod run -d --name c2 "${newest[@]}" "${start[@]}" "${stops[@]}" "${plain[@]}" > /tmp/said 2>&1
wait_for counted c2 $((last + 3))
check 'it goes on where it was' test "$(printed c2 | head -n 1)" = $((last + 1))
check 'with its files' test "$(podman exec c2 cat /root/file)" = kept
check 'a second stop' stopped -t 60 c2
check 'is a checkpoint, too' test "$(numbers $place/job)" = '000001 000002'
mapfile -t one < <(to $place few)
for n in 1 2 3; do
    pod run -d --name "few$n" "${one[@]}" --annotation dev.cryopod.checkpoint.keep=$((3 - n % 2 * 2)) "${plain[@]}" > /dev/null
    wait_for counted "few$n" 1
    mkdir -p $place/few/.removed-000000/of-a-killed-one
    stopped -t 60 "few$n"
    wait_for nothing_left
    there $place/few >> /tmp/few
done
check 'the newest stay, as many as are asked for' test "$(xargs < /tmp/few)" = '000001 000001 000002 000003'
check 'nothing is left' wait_for nothing_left

# ---- a damaged checkpoint ----
mapfile -t hurts < <(to $place hurt)
hurt() { pod run -d --name hurt "${newest[@]}" "${hurts[@]}" "$@" "${plain[@]}" > /tmp/said 2>&1; }
ended() { stopped -t 60 hurt && now=$(count hurt) && podman rm hurt > /dev/null && wait_for nothing_left; }
hurt "${start[@]}"
wait_for counted hurt 3
ended
first=$now
flip() { printf '\377\376\375' | dd of="$1/pages-1.img" bs=1 seek=5000 conv=notrunc status=none; }
lost() { rm "$1"/core-1.img; }
hurt
check 'it goes on' wait_for counted hurt $((first + 3))
ended
cp -a $place/hurt/000002 /srv/whole
for damage in flip lost; do
    rm -rf $place/hurt/.damaged-000002
    [ -e $place/hurt/000002 ] || cp -a /srv/whole $place/hurt/000002
    $damage $place/hurt/000002
    hurt
    wait_for counted hurt $((first + 2))
    check "$damage: the one before it is taken" test "$(printed hurt | grep -v '^cryopod: ' | head -n 1)" = $((first + 1))
    check 'with one warning' test "$(printed hurt | grep -c '^cryopod: .* is damaged .* it is kept as ')" = 1
    check 'the damaged one is kept' test "$(numbers $place/hurt)" = '.damaged-000002 000001'
    podman rm -f -t 0 hurt > /dev/null
done
flip $place/hurt/000001
if hurt; then exit 1; fi
check 'none is whole' says /tmp/said 'there is no checkpoint of hurt that is not damaged'
podman rm -f hurt > /dev/null 2>&1 || true

# ---- two hosts that want it ----
far() { unshare --uts bash -euc 'hostname far; exec "$@"' - podman --runtime cryopod-runtime "$@" > /tmp/said 2>&1; }
taken() { far run -d --name c4 "${newest[@]}" "${start[@]}" "$@" "${stops[@]}" "${plain[@]}" || { podman rm -f -t 0 c4 > /dev/null 2>&1; return 1; }; }
pod run -d --name c3 "${newest[@]}" "${stops[@]}" "${plain[@]}" > /tmp/said 2>&1
wait_for counted c3 $((last + 5))
if taken; then exit 1; fi
check 'one has it' says /tmp/said "it runs as container $(podman inspect -f '{{.Id}}' c3) on $(hostname)"
touch -d '1 hour ago' $place/job/lease-*
refused() { # WANT ARG...
    local want=$1 && shift
    if pod run -d --name no "$@" "${plain[@]}" > /tmp/said 2>&1; then return 1; fi
    podman rm -f -t 0 no > /dev/null 2>&1 || true
    check "refused: $want" grep -qF -- "$want" /tmp/said
}
refused 'when that container is deleted' "${newest[@]}" "${start[@]}" "${stops[@]}"
if cryopod-runtime delete "$(podman inspect -f '{{.Id}}' c3)" 2> /dev/null; then exit 1; fi
refused 'when that container is deleted' "${newest[@]}" "${start[@]}" "${stops[@]}"
refused 'variable = true' "${newest[@]}" -e CRYOPOD_NAME=job
touch -d '1 hour ago' $place/job/lease-*
if taken; then exit 1; fi
check 'a clock that jumps frees no lease that is renewed' says /tmp/said 'or did so [0-9]+ s ago; others'
pkill -KILL -f '^cryopod-lease ' # with its host
touch -d '1 hour ago' $place/job/lease-*
check 'a lease of a lost host is taken over' taken
podman stop -t 0 c4 > /dev/null 2>&1
podman stop -t 2 c3 > /dev/null 2>&1 &
check 'who lost it saves nothing' wait_for grep -q 'has taken the lease of job over' $log
wait $!
check 'there is no third checkpoint' test "$(numbers $place/job)" = '000001 000002'
podman rm -f -t 0 c3 c4 > /dev/null
rm $place/job/lease-* # of the host `far`
check 'nothing is left' wait_for nothing_runs
# It runs for longer than its lease counts, which is renewed, until its host is lost.
short=("${newest[@]}" "${start[@]}" --annotation=dev.cryopod.name=held --annotation=dev.cryopod.lease_s=15)
pod run -d --name c5 "${short[@]}" "${plain[@]}" > /dev/null 2>&1
renewed() { local lease=($place/held/lease-*) && [ "${lease##*-}" -ge 4 ]; }
on_failure() { ls -la $place/held; ps aux | grep -e lease; tail -n 3 $log; }
wait_for renewed
elsewhere() { far run -d --name c6 "${short[@]}" "${plain[@]}" || { podman rm -f -t 0 c6 > /dev/null 2>&1; return 1; }; }
if elsewhere; then exit 1; fi
check 'a lease is renewed while its container exists' says /tmp/said "it runs as container $(podman inspect -f '{{.Id}}' c5) on $(hostname)"
pkill -KILL -f '^cryopod-lease '
check 'that of a lost host runs out' wait_for elsewhere
podman rm -f -t 0 c5 c6 > /dev/null

# ---- what is no checkpoint ----
# shellcheck disable=SC2016
handles=(--network none localhost/busybox sh -c 'trap "exit 7" TERM; trap "exit 5" INT; i=0; while :; do echo $i; i=$((i + 1)); sleep 0.1; done')
mapfile -t stops < <(to $place handles)
pod run -d --name int "${stops[@]}" "${handles[@]}" > /dev/null
wait_for counted int 2
podman kill -s INT int > /dev/null
podman wait int > /dev/null
check 'INT passes' test "$(exit_code int) $(there $place/handles)" = "5 "
mount -t tmpfs -o size=64k,mode=700 full /srv/full
mapfile -t stops < <(to /srv/full handles)
pod run -d --name full "${stops[@]}" "${handles[@]}" > /dev/null
wait_for counted full 2
check 'a stop into a full place' stopped -t 60 full
check 'is one by TERM' test "$(exit_code full) $(there /srv/full/handles)" = "7 "
check 'and the log says why' says $log 'full: free space|No space left|disk is full|is full'
# shellcheck disable=SC2016
pod run -d --name twice "${stops[@]}" --network none localhost/busybox \
    sh -c 'trap "echo ok; end=1" TERM; echo ok; while [ ! "$end" ] || [ ! -e /end ]; do sleep 0.1; done; exit 7' > /dev/null
wait_for ticked twice 1
podman kill -s TERM twice > /dev/null
wait_for ticked twice 2
wait_for nothing_runs
wait_for umount /srv/full
podman kill -s TERM twice > /dev/null
podman exec twice touch /end || true # the container ends by it, perhaps before `touch` does
podman wait twice > /dev/null
check 'a container that ends already is not checkpointed' test "$(exit_code twice) $(there /srv/full/handles)" = "7 "
mapfile -t stops < <(to /etc job)
refused 'add its directory to `checkpoint.allow`' "${stops[@]}"
mapfile -t stops < <(to $place/../etc job)
refused 'no absolute path' "${stops[@]}"
mapfile -t stops < <(to $place ../job)
refused 'is not a name' "${stops[@]}"
refused 'variable = true' -e CRYOPOD_ON_STOP=checkpoint -e CRYOPOD_CHECKPOINT_TO=$place
refused 'needs dev.cryopod.checkpoint.to' --annotation dev.cryopod.on-stop=checkpoint

# ---- with a GPU ----
job() { # NAME ARG...: holds GPU memory, and handles TERM
    # shellcheck disable=SC2016
    pod run -d --name "$1" --network none "${nodes[@]/#/--device=}" "${binds[@]/#/--volume=}" -e LD_LIBRARY_PATH=/cusim "${@:2}" \
        localhost/busybox sh -c 'trap "kill $!; exit 7" TERM; /cusim/cusim-client & wait' > /tmp/said 2>&1
}
slow() { /opt/build/cusim-ctl --socket "$sim" set slow-checkpoint="${1:-4000}:1" > /dev/null; } # [MILLISECONDS]
mapfile -t stops < <(to $place gpu)
job g1 "${stops[@]}"
wait_for ticked g1 3
check 'a stop with a GPU' stopped -t 60 g1
check 'with the exit code of TERM' test "$(exit_code g1)" = 143
tick=$(logs g1 | tail -n 1 | cut -d' ' -f1) sum=$(sum g1)
check 'a job from it' job g2 "${newest[@]}" "${stops[@]}"
check 'its sums are right' goes_on g2
check 'it goes on where it was' test "$(logs g2 | head -n 1 | cut -d' ' -f1,2)" = "$((tick + 1)) $sum"
slow 30000 # its process is killed, and nobody waits for it
check 'KILL in the middle' stopped -t 1 g2
check 'is not held up' test "$(exit_code g2)" = 137
check 'nothing is left' wait_for nothing_left
check 'nothing half made' test "$(numbers $place/gpu)" = 000001
check 'the job again' job g3 "${newest[@]}" "${stops[@]}" --annotation dev.cryopod.grace_s=2
wait_for ticked g3 3
slow
check 'too short a time' stopped -t 60 g3
check 'is a stop by TERM' test "$(exit_code g3)" = 7
check 'and the log says why' says $log 'it took longer than 1 s|interrupted by SIGTERM'
check 'nothing is left' wait_for nothing_left
check 'nothing half made' test "$(numbers $place/gpu)" = 000001

# ---- damaged GPU memory ----
wait_for nothing_left
job g4 "${newest[@]}" "${stops[@]}"
wait_for ticked g4 3
check 'a second stop' stopped -t 60 g4
wait_for nothing_left
printf 'changed' | dd of="$(ls $place/gpu/000002/vram-*.img | grep -v index | head -n 1)" bs=1 seek=100 conv=notrunc status=none
check 'a job from the one before' job g5 "${newest[@]}" "${stops[@]}"
check 'its sums are right' goes_on g5
check 'it goes on where that was' test "$(logs g5 | grep '^[0-9]' | head -n 1 | cut -d' ' -f1,2)" = "$((tick + 1)) $sum"
check 'the damaged one is kept' test -e $place/gpu/.damaged-000002

# ---- killed in the middle of its checkpoint, and started again: the next one has not had the TERM ----
cat > /usr/local/sbin/criu << 'END'
#!/bin/bash
PATH=/usr/sbin:/usr/bin
if [ "$1" = swrk ] && mkdir /tmp/slow; then sleep 4; fi
exec criu "$@"
END
mapfile -t again < <(to $place again)
pod run -d --name again "${again[@]}" --network none localhost/busybox sh -c 'trap "echo TERM" TERM; echo ready; while sleep 0.1; do :; done' > /dev/null
ready() { [ "$(printed again | grep -c ready)" = "$1" ]; }
wait_for ready 1
chmod +x /usr/local/sbin/criu
check 'a restart' podman restart -t 1 again
wait_for ready 2
check 'the stop has ended' wait_for sh -c '! pgrep -f "^cryopod-on-stop " > /dev/null'
rm /usr/local/sbin/criu
sleep 0.5 # it would say so
check 'the next one had no TERM' test "$(printed again | grep -c TERM)" = 0
podman rm -f -t 0 again > /dev/null
