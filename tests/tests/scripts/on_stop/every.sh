# every.sh LOW: checkpoints of running containers, under podman. Where one is killed, the next start goes on at the last.
low=$1
mkimage
simulate "$low"
place=/srv/place log=/var/log/cryopod-on-stop.log
mkdir -p "$place" /srv/full
printf '[checkpoint]\nallow = ["%s", "/srv/full"]\n[restore]\nallow = ["%s", "/srv/full"]\n' "$place" "$place" >> /etc/cryopod/config.toml
on_failure() { cat /tmp/said "$log"; find "$place" -name '*.log' -exec grep Error {} +; }
to() { printf -- '--annotation=dev.cryopod.%s\n' "checkpoint.to=$1" "name=$2" checkpoint.every_s=1 "restore=latest:$1" restore.otherwise=start; } # PLACE NAME
exit_code() { podman inspect -f '{{.State.ExitCode}}' "$1"; }
nothing_left() { [ -z "$(ls -A /run/cryopod)" ] && [ -z "$("$low" list -q)" ] && nothing_runs; }
nothing_runs() { ! pgrep -f '^cryopod-(on-stop|lease|every) ' > /dev/null; }
newest() { { ls "$place/$1" 2> /dev/null || true; } | grep '^0' | tail -n 1; }
further() { local now && now=$(newest "$1") && [ $((10#${now:-0})) -gt "$2" ]; } # NAME NUMBER
lost() { kill -KILL "$(podman inspect -f '{{.State.Pid}}' "$1")" && podman wait "$1" > /dev/null; } # as by a node that fails
last() { printed "$1" | grep '^[0-9]' | tail -n 1; }
reached() { local n && n=$(last "$1") && [ "${n:--1}" -ge "$2" ]; } # NAME N
stopped() { podman stop "$@" > /tmp/said 2>&1; }

# ---- without a GPU ----
mapfile -t every < <(to $place job)
stops=(--annotation dev.cryopod.on-stop=checkpoint --annotation dev.cryopod.grace_s=60)
pod run -d --name c1 "${every[@]}" "${stops[@]}" --network none localhost/busybox "${counter[@]}" > /tmp/said 2>&1
wait_for further job 0
wait_for last c1 > /dev/null
saved=$(last c1)
wait_for further job $((10#$(newest job) + 1)) # the next one may have begun before
wait_for further job 3
wait_for reached c1 $((saved + 1))
lost c1
check 'it was killed' test "$(exit_code c1)" = 137
check 'nothing is left' wait_for nothing_left
last=$(last c1) printed=$(printed c1 | wc -l)
check 'a start' podman start c1
wait_for reached c1 $((last + 2))
goes_on_at=$(printed c1 | sed 1,"$printed"d | grep '^[0-9]' | sed -n 1p)
check 'it goes on at its last checkpoint' test "$goes_on_at" -gt "$saved" -a "$goes_on_at" -le $((last + 1))
check 'older ones are removed' test "$(find $place/job -name '0*' | wc -l)" -le 3
check 'a stop' stopped -t 60 c1
check 'with the exit code of TERM' test "$(exit_code c1)" = 143
check 'nothing is left' wait_for nothing_left
last=$(last c1) printed=$(printed c1 | wc -l)
check 'a start' podman start c1
wait_for reached c1 $((last + 2))
check 'it goes on where the stop was' test "$(printed c1 | sed 1,"$printed"d | grep '^[0-9]' | head -n 1)" = $((last + 1))

# ---- a stop while a checkpoint has it frozen, which looks as if it were paused ----
cat > /usr/local/sbin/criu << 'END'
#!/bin/bash
PATH=/usr/sbin:/usr/bin
v2=/sys/fs/cgroup$(sed -n 's/^0:://p' "/proc/$(cat /tmp/init)/cgroup")/cgroup.freeze
v1=/sys/fs/cgroup/freezer$(sed -n 's/^[0-9]*:freezer://p' "/proc/$(cat /tmp/init)/cgroup")/freezer.state
freezer() { if [ -e "$v1" ]; then echo "$2" > "$v1"; else echo "$1" > "$v2"; fi; }
if [ "$1" = swrk ] && mkdir /tmp/frozen; then
    freezer 1 FROZEN
    until [ -e /tmp/go-on ]; do sleep 0.05; done
    freezer 0 THAWED
fi
exec criu "$@"
END
podman inspect -f '{{.State.Pid}}' c1 > /tmp/init
chmod +x /usr/local/sbin/criu
wait_for test -e /tmp/frozen
(wait_for grep -q 'giving up: it was interrupted by SIGTERM' $log && sleep 1; touch /tmp/go-on) & # longer than the stop needs to look
check 'a stop of a frozen one' stopped -t 60 c1
check 'is a checkpoint' test "$(exit_code c1)" = 143
rm /usr/local/sbin/criu
podman rm -f -t 0 c1 > /dev/null
check 'nothing is left' wait_for nothing_left

# ---- one that starts without its checkpoint ----
old=$(newest job)
pod run -d --name other --cap-drop KILL "${every[@]}" --network none localhost/busybox "${counter[@]}" > /tmp/said 2>&1
wait_for further job $((10#$old + 3))
check 'its own do not supersede those that it did not restore' test -d "$place/job/$old"
check 'but one another' test "$(find $place/job -name '0*' -newer "$place/job/$old" | wc -l)" -le 3
podman rm -f -t 0 other > /dev/null

# ---- TERM, and the container goes on ----
mapfile -t every < <(to $place stays)
pod run -d --name stays "${every[@]}" --annotation dev.cryopod.grace_s=8 --network none localhost/busybox sh -c 'trap "echo TERM" TERM; while sleep 0.1; do :; done' > /tmp/said 2>&1
wait_for further stays 0
podman kill -s TERM stays > /dev/null
wait_for sh -c 'podman logs stays 2>&1 | grep -q TERM'
old=$(newest stays)
sleep 2 # it might be ending, for twice that period
check 'not in its grace period' test $((10#$(newest stays))) -le $((10#$old + 1))
check 'then it is checkpointed again' wait_for further stays $((10#$old + 1))
podman rm -f -t 0 stays > /dev/null
check 'nothing is left' wait_for nothing_left

# ---- pauses are no stops: long before the grace period is over ----
mapfile -t every < <(to $place pauses)
pod run -d --name pauses "${every[@]}" --annotation dev.cryopod.grace_s=600 --network none localhost/busybox "${counter[@]}" > /tmp/said 2>&1
wait_for further pauses 0
for _ in 1 2; do
    check 'a pause' podman pause pauses
    check 'an unpause' podman unpause pauses
done
check 'it is checkpointed again' wait_for further pauses $((10#$(newest pauses) + 1))
podman rm -f -t 0 pauses > /dev/null
check 'nothing is left' wait_for nothing_left

# ---- a checkpoint that fails ----
mount -t tmpfs -o size=64k,mode=700 full /srv/full
mapfile -t every < <(to /srv/full full)
pod run -d --name full "${every[@]}" --network none localhost/busybox "${counter[@]}" > /tmp/said 2>&1
check 'the log says that it failed' wait_for says $log "$(pod inspect -f '{{.Id}}' full): no checkpoint while it runs"
wait_for umount /srv/full # a try may be under way
wait_for last full > /dev/null
last=$(last full)
check 'the container goes on' wait_for reached full $((last + 3))
podman rm -f -t 0 full > /dev/null

# ---- with a GPU ----
mapfile -t every < <(to $place gpu)
pod run -d --name g1 --network none "${nodes[@]/#/--device=}" "${binds[@]/#/--volume=}" -e LD_LIBRARY_PATH=/cusim \
    "${every[@]}" "${stops[@]}" localhost/busybox /cusim/cusim-client > /tmp/said 2>&1
wait_for further gpu 1
check 'its sums are right' goes_on g1
lost g1
check 'nothing is left' wait_for nothing_left
check 'a start' podman start g1
check 'its sums are right' goes_on g1
/opt/build/cusim-ctl --socket "$sim" set slow-checkpoint=4000:1 > /dev/null
wait_for sh -c '[ -e /srv/place/gpu/.partial-* ]'
check 'a stop in the middle' stopped -t 60 g1
check 'is a checkpoint of its own' test "$(exit_code g1)" = 143
check 'nothing is left' wait_for nothing_left
check 'a start' podman start g1
check 'its sums are right' goes_on g1
/opt/build/cusim-ctl --socket "$sim" set slow-checkpoint=4000:1 > /dev/null
wait_for sh -c '[ -e /srv/place/gpu/.partial-* ]'
podman kill -s KILL g1 > /dev/null
podman wait g1 > /dev/null
check 'KILL is not held up' test "$(exit_code g1)" = 137
check 'nothing is left' wait_for nothing_left
check 'a start' podman start g1
check 'its sums are right' goes_on g1
/opt/build/cusim-ctl --socket "$sim" set slow-checkpoint=4000:1 > /dev/null
wait_for sh -c '[ -e /srv/place/gpu/.partial-* ]'
check 'a pause in the middle' podman pause g1
sleep 1 # the checkpoint would resume it
check 'it is paused' sh -c "$low state $(podman inspect -f '{{.Id}}' g1) | grep -q '\"paused\"'"
check 'an unpause' podman unpause g1
check 'its sums are right' goes_on g1
podman rm -f -t 0 g1 > /dev/null
check 'nothing is left' wait_for nothing_left
check 'nothing half made' test -z "$(find $place -name '.partial-*')"
