# objects.sh LOW: stops that are checkpoints in object storage, under podman; with the simulated driver's GPU and without.
# shellcheck shell=bash disable=SC2154
low=$1
mkimage
simulate "$low"
place=s3://jobs/team log=/var/log/cryopod-on-stop.log copies=/var/lib/cryopod/places
printf '[checkpoint]\nallow = ["s3://jobs"]\n[restore]\nallow = ["%s"]\n' "$place" >> /etc/cryopod/config.toml
printf '%s\n' AWS_ENDPOINT=http://127.0.0.1:5555 AWS_ALLOW_HTTP=true AWS_REGION=us-east-1 AWS_ACCESS_KEY_ID=a \
    AWS_SECRET_ACCESS_KEY=b > /etc/cryopod/objects.env
chmod 600 /etc/cryopod/objects.env
server_up() {
    moto_server -H 127.0.0.1 -p 5555 > /tmp/moto.log 2>&1 &
    server=$!
    wait_for s3 http://127.0.0.1:5555/ > /dev/null
}
s3() { curl -sf --aws-sigv4 aws:amz:us-east-1:s3 --user a:b "$@"; }
on_failure() { cat /tmp/said "$log"; objects; tail -n 5 /tmp/moto.log; }
plain=(--network none localhost/busybox "${counter[@]}")
to() { printf -- '--annotation=%s\n' dev.cryopod.on-stop=checkpoint dev.cryopod.grace_s=60 "dev.cryopod.checkpoint.to=$place" "dev.cryopod.name=$1"; } # NAME
newest=(--annotation "dev.cryopod.restore=latest:$place")
start=(--annotation dev.cryopod.restore.otherwise=start)
exit_code() { podman inspect -f '{{.State.ExitCode}}' "$1"; }
stopped() { podman stop "$@" > /tmp/said 2>&1; }
nothing_runs() { ! pgrep -f '^cryopod-(on-stop|lease) ' > /dev/null; }
get() { s3 "http://127.0.0.1:5555/jobs/team/$1"; } # KEY
listed() { s3 "http://127.0.0.1:5555/jobs?list-type=2&prefix=team/$1" | tr '<' '\n'; } # PREFIX
objects() { listed "${1-}" | sed -n 's/^Key>team\///p'; }
stored() { listed "${1-}" | sed -n 's/^Size>//p' | paste -sd+ | bc_; } # all bytes there
bc_() { local sum && read -r sum && echo $((sum)); }
marks() { objects "$1/" | sed -n 's/^[^/]*\/\([^/]*\)$/\1/p' | grep -v lease | xargs; }
elsewhere() { rm -rf "${copies:?}"; } # the next container is on another host, which has no copies

server_up
s3 -X PUT http://127.0.0.1:5555/jobs > /dev/null

# ---- without a GPU ----
mapfile -t stops < <(to job)
job() { pod run -d --name "$1" "${newest[@]}" "${start[@]}" "${stops[@]}" "${@:2}" "${plain[@]}" > /tmp/said 2>&1; }
job c1
wait_for counted c1 5
podman exec c1 sh -c 'echo kept > /root/file'
check 'a stop' stopped -t 60 c1
check 'with the exit code of TERM' test "$(exit_code c1)" = 143
check 'is a checkpoint' test "$(marks job)" = complete-000001
last=$(count c1)
check 'nothing runs' wait_for nothing_runs
elsewhere
job c2
wait_for counted c2 $((last + 3))
check 'it goes on where it was' test "$(printed c2 | head -n 1)" = $((last + 1))
check 'with its files' test "$(podman exec c2 cat /root/file)" = kept
check 'a second stop' stopped -t 60 c2
check 'nothing runs' wait_for nothing_runs
check 'both are there' test "$(marks job)" = 'complete-000001 complete-000002'
last=$(count c2)
job c3
wait_for counted c3 $((last + 3))
check 'on the same host it goes on, too' test "$(printed c3 | head -n 1)" = $((last + 1))
check 'a third stop' stopped -t 60 c3
check 'nothing runs' wait_for nothing_runs
check 'the newest two stay' test "$(marks job)" = 'complete-000002 complete-000003'
check 'with their files alone' test -z "$(objects job/000001)"
last=$(count c3)

# ---- damage ----
copy() { echo "$copies"/*/job/"$1"; }
flip() { printf '\377\376\375' | dd of="$1" bs=1 seek=5000 conv=notrunc status=none; }
flip "$(copy 000003)/pages-1.img"
job c4
wait_for counted c4 $((last + 2))
check 'a damaged copy is fetched again' test "$(printed c4 | head -n 1)" = $((last + 1))
podman kill c4 > /dev/null && podman rm -f c4 > /dev/null 2>&1
get job/000003/pages-1.img > /tmp/pages && flip /tmp/pages
s3 -T /tmp/pages http://127.0.0.1:5555/jobs/team/job/000003/pages-1.img
elsewhere
first=$(count c2)
job c4
wait_for counted c4 $((first + 2))
check 'if it is damaged there, the one before it is taken' test "$(printed c4 | grep -v '^cryopod: ' | head -n 1)" = $((first + 1))
check 'the damaged one is kept' test "$(marks job)" = 'complete-000002 damaged-000003'

# ---- two hosts that want it ----
far() { unshare --uts bash -euc 'hostname far; exec "$@"' - podman --runtime cryopod-runtime "$@" > /tmp/said 2>&1; }
taken() { far run -d --name c5 "${newest[@]}" "${stops[@]}" "$@" "${plain[@]}" || { podman rm -f -t 0 c5 > /dev/null 2>&1; return 1; }; }
if taken; then exit 1; fi
check 'one has it' says /tmp/said "it runs as container $(podman inspect -f '{{.Id}}' c4) on $(hostname)"
check 'and names the lease' says /tmp/said "remove $place/job/lease-[0-9]+"
check 'a stop gives it back' stopped -t 60 c4
check 'nothing runs' wait_for nothing_runs
check 'the number of a damaged one is not used again' test "$(marks job)" = 'complete-000002 complete-000004 damaged-000003'
check 'another host takes it' taken
podman rm -f -t 0 c5 > /dev/null

# ---- the storage does not answer ----
job c6
wait_for counted c6 3
kill -STOP $server
check 'a stop without the storage ends the container' stopped -t 15 c6
check 'by the TERM' test "$(exit_code c6)" = 143
kill -CONT $server
wait_for nothing_runs
check 'it is no checkpoint' test "$(marks job)" = 'complete-000002 complete-000004 damaged-000003'

# ---- not allowed ----
refused() { # WANT ARG...
    local want=$1 && shift
    if pod run -d --name no "$@" "${plain[@]}" > /tmp/said 2>&1; then return 1; fi
    podman rm -f -t 0 no > /dev/null 2>&1 || true
    check "refused: $want" grep -qF -- "$want" /tmp/said
}
on=(--annotation dev.cryopod.on-stop=checkpoint)
refused 's3://other/team: that is not allowed' "${on[@]}" --annotation dev.cryopod.checkpoint.to=s3://other/team
refused 'add its bucket to `restore.allow`' --annotation dev.cryopod.restore=latest:s3://jobs/teams
refused 'not s3://BUCKET[/PREFIX]' "${on[@]}" --annotation dev.cryopod.checkpoint.to=s3://jobs/../a
copied=$(copy 000004)
refused 'add its directory to `restore.allow`' --annotation "dev.cryopod.restore=$copied"
