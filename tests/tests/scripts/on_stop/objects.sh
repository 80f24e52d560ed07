# objects.sh LOW: stops that are checkpoints in object storage, under podman; with the simulated driver's GPU and without.
# shellcheck shell=bash disable=SC2154
low=$1
mkimage
simulate "$low"
place=s3://jobs/team log=/var/log/cryopod-on-stop.log copies=/var/lib/cryopod/places
printf '[checkpoint]\nallow = ["s3://jobs"]\n[restore]\nallow = ["%s"]\n' "$place" >> /etc/cryopod/config.toml
on_failure() { cat /tmp/said "$log"; objects | grep -v '\.img'; tail -n 5 /tmp/moto.log; }
plain=(--network none localhost/busybox "${counter[@]}")
to() { printf -- '--annotation=%s\n' dev.cryopod.on-stop=checkpoint dev.cryopod.grace_s=60 "dev.cryopod.checkpoint.to=$place" "dev.cryopod.name=$1"; } # NAME
newest=(--annotation "dev.cryopod.restore=latest:$place")
start=(--annotation dev.cryopod.restore.otherwise=start)
exit_code() { podman inspect -f '{{.State.ExitCode}}' "$1"; }
stopped() { podman stop "$@" > /tmp/said 2>&1; }
nothing_runs() { ! pgrep -f '^cryopod-(on-stop|lease) ' > /dev/null; }
elsewhere() { rm -rf "${copies:?}"; } # the next container is on another host, which has no copies

server_up

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

# ---- a lost host ----
short=("${newest[@]}" "${start[@]}" --annotation=dev.cryopod.name=held --annotation=dev.cryopod.lease_s=4)
pod run -d --name c6 "${short[@]}" "${plain[@]}" > /dev/null 2>&1
elsewhere_too() { far run -d --name c7 "${short[@]}" "${plain[@]}" || { podman rm -f -t 0 c7 > /dev/null 2>&1; return 1; }; }
sleep 5
if elsewhere_too; then exit 1; fi
check 'a lease is renewed while its container exists' says /tmp/said "it runs as container $(podman inspect -f '{{.Id}}' c6) on $(hostname)"
pkill -KILL -f '^cryopod-lease ' # with its host
check 'a lease of a lost host is taken over' wait_for elsewhere_too
podman rm -f -t 0 c6 c7 > /dev/null

# ---- checkpoints while it runs ----
pod run -d --name c8 --annotation dev.cryopod.checkpoint.every_s=1 --annotation "dev.cryopod.checkpoint.to=$place" \
    --annotation dev.cryopod.name=often "${plain[@]}" > /dev/null
often() { objects often/ | grep -q 'complete-00000[3-9]'; }
check 'again and again' wait_for often
podman rm -f -t 0 c8 > /dev/null
check 'two stay' test "$(marks often | tr ' ' '\n' | grep -c complete)" -le 3

# ---- storage that makes an object twice ----
cat > /tmp/forgets.py <<'END'
# Passes all requests on to the server, but for one header.
import http.client, http.server
class Proxy(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {k: v for k, v in self.headers.items() if k.lower() not in ("if-none-match", "connection")}
        server = http.client.HTTPConnection("127.0.0.1", 5555)
        server.request(self.command, self.path, body, headers)
        answer = server.getresponse()
        data = answer.read()
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        self.send_header("Content-Length", answer.getheader("Content-Length") if self.command == "HEAD" else len(data))
        self.end_headers()
        self.wfile.write(data)
    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer
http.server.ThreadingHTTPServer(("127.0.0.1", 5556), Proxy).serve_forever()
END
python3 /tmp/forgets.py > /tmp/forgets.log 2>&1 &
forgets=$!
disown
wait_for s3 http://127.0.0.1:5556/ > /dev/null
sed -i s/5555/5556/ /etc/cryopod/objects.env
mapfile -t twice < <(to twice)
if pod run -d --name t1 "${newest[@]}" "${start[@]}" "${twice[@]}" "${plain[@]}" > /tmp/said 2>&1; then exit 1; fi
check 'it holds no leases' says /tmp/said 'this storage ignores `If-None-Match`, so it holds no leases'
pod run -d --name t2 "${twice[@]}" --annotation=dev.cryopod.copies=many --network none localhost/busybox \
    sh -c 'trap "exit 7" TERM; while :; do sleep 0.1; done' > /dev/null
check 'a stop there' stopped -t 60 t2
check 'is the container'"'"'s own' test "$(exit_code t2)" = 7
check 'and says why' says "$log" 'ignores `If-None-Match`: two containers could write one checkpoint'
check 'with nothing left' test "$(objects twice/ | wc -l)" = 0
podman rm -f -t 0 t1 t2 > /dev/null 2>&1
kill "$forgets"
sed -i s/5556/5555/ /etc/cryopod/objects.env

# ---- with a GPU ----
weights() { # CONTAINER NAME ARG...: handles TERM
    pod run -d --name "$1" --network none "${nodes[@]/#/--device=}" "${binds[@]/#/--volume=}" -e LD_LIBRARY_PATH=/cusim \
        --annotation dev.cryopod.on-stop=checkpoint --annotation "dev.cryopod.checkpoint.to=$place" --annotation dev.cryopod.grace_s=60 \
        --annotation "dev.cryopod.name=$2" "${@:3}" localhost/busybox \
        sh -c 'trap "kill $!; exit 7" TERM; /cusim/cusim-client --mib '"${MIB:-256}"' --chunk-mib 64 --train-mib 4 & wait' > /tmp/said 2>&1
}
ended() { # CONTAINER TICKS
    wait_for ticked "$1" "$2"
    check "$1 is stopped" stopped -t 60 "$1"
    check 'by a checkpoint' test "$(exit_code "$1")" = 143
    wait_for nothing_runs
}
weights r1 server-1
ended r1 3
one=$(stored server-1/)
elsewhere
weights again server-1 "${newest[@]}"
ended again 5
both=$(stored server-1/)
check 'of the second checkpoint only what is new is sent' test $((both - one)) -lt $((one / 5))
for n in $(seq 2 "${REPLICAS:-3}"); do
    elsewhere
    weights "r$n" "server-$n"
    ended "r$n" $((3 + n % 3))
done
check 'replicas store little more than one does' test "$(stored server-)" -le $((one * 13 / 10))
echo "one: $one bytes, with its second: $both, all ${REPLICAS:-3}: $(stored server-)"
elsewhere
weights last server-2 "${newest[@]}"
check 'on another host a replica goes on' goes_on last
ended last 8
for n in 2 3; do
    weights "more$n" server-1 "${newest[@]}"
    check "$n: the sums are right" goes_on "more$n"
    ended "more$n" 5
done
check 'what others build upon stays' test "$(marks server-1 | tr ' ' '\n' | grep -c '^complete-000001')" = 1

# ---- the storage does not answer ----
mapfile -t short < <(to down)
short+=(--annotation=dev.cryopod.grace_s=10)
pod run -d --name c9 "${short[@]}" --network none localhost/busybox \
    sh -c 'trap "exit 7" TERM; i=0; while :; do echo $i; i=$((i + 1)); sleep 0.1; done' > /dev/null
wait_for counted c9 3
kill -STOP $server
check 'a stop without the storage' stopped -t 30 c9
check 'is one by TERM' test "$(exit_code c9)" = 7
kill -CONT $server
wait_for nothing_runs
check 'and no checkpoint' test -z "$(marks down)"
hangs_when_sent() { # NAME: the storage stops answering when all is written and nothing sent
    wait_for test -e "$(echo "$copies"/*)/$1/.partial-000001/cryopod.json" && kill -STOP $server
}
weights g1 late --annotation=dev.cryopod.grace_s=10
wait_for ticked g1 3
hangs_when_sent late &
check 'the storage hangs while it is sent' stopped -t 60 g1
check 'the container goes on, and has its TERM' test "$(exit_code g1)" = 7
kill -CONT $server
wait_for nothing_runs
check 'nothing is left here' test -z "$(ls -A "$copies"/*/late | grep -v fetching)"
check 'there only the claim, so that the number is not used again' test "$(marks late)" = writing-000001
weights g1again late
ended g1again 3
check 'the next stop is a checkpoint' test "$(marks late)" = 'complete-000002 writing-000001'
weights g2 killed --annotation=dev.cryopod.grace_s=15
wait_for ticked g2 3
hangs_when_sent killed &
stopped -t 60 g2 &
wait_for test -e "$(echo "$copies"/*)/killed/.partial-000001/cryopod.json"
check 'a KILL meanwhile' podman kill g2 > /dev/null
wait_for nothing_runs
kill -CONT $server
check 'leaves no checkpoint there' test "$(marks killed)" = writing-000001
weights g3 killed "${newest[@]}"
check 'this host still has it' goes_on g3
ended g3 5
check 'and sends the next' test "$(marks killed)" = 'complete-000002 writing-000001'

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
