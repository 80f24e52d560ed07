# faults.sh LOW ROUNDS SEED [objects]: starts and stops of one name under podman, each with a random fault. After each either
# one container runs, or the next start goes on at the newest checkpoint: none is lost, and none runs twice. `objects`: the place
# is in object storage.
# shellcheck shell=bash disable=SC2154
low=$1 rounds=$2 seed=$3 kind=${4:-}
RANDOM=$seed
mkimage
low_level "$low"
place=/srv/place disk=/srv/place there=lease begun=
[ -z "$kind" ] || { place=s3://jobs/team disk=/var/lib/cryopod/places there=storage && begun=$there && server_up; }
mkdir -p $disk
mount -t tmpfs -o size=1g,mode=700 place $disk
printf '[checkpoint]\nallow = ["%s"]\n[restore]\nallow = ["%s"]\n' $place $place >> /etc/cryopod/config.toml
log=/var/log/cryopod-on-stop.log
on_failure() { echo "round $round, seed $seed: $fault"; cat /tmp/said /tmp/faults; tail -n 20 "$log"; podman ps -a; [ -n "$kind" ] && marks job; ls -A $disk/*; "$low" list; find /run/cryopod -ls; ps -eo pid,ppid,stat,etimes,args --forest; }
wish=(--annotation={dev.cryopod.on-stop=checkpoint,dev.cryopod.checkpoint.to=$place,dev.cryopod.name=job,dev.cryopod.grace_s=5,dev.cryopod.restore=latest:$place})
begin() { pod run -d --name "$1" "${wish[@]}" "${@:2}" --network none localhost/busybox "${counter[@]}" > "/tmp/said-$1" 2>&1; }
numbers() { printed "$1" 2> /dev/null | grep '^[0-9]'; }
running() { "$low" list | grep -c ' running ' || true; }
reached() { local n && n=$(numbers "$1" | tail -n 1) && [ "${n:--1}" -ge "$2" ]; } # NAME N
newest() {
    if [ -z "$kind" ]; then { find $place/job -maxdepth 1 -name '0*' 2> /dev/null || true; } | sort | tail -n 1; else
        marks job | tr ' ' '\n' | sed -n "s|^complete-|$place/job/|p" | sort | tail -n 1
    fi
}
hangs() { kill -STOP $server && sleep "$1.$((RANDOM % 10))" && kill -CONT $server; } # SECONDS: the storage does, a little longer
quiet() { ! pgrep -f '^cryopod-(on-stop|lease|guard) ' > /dev/null && ! pgrep -x 'criu|crun|runc|cryopod-runtime' > /dev/null; }
# A process that is killed after its container's end leaves its directory to the next operation.
sweep() { cryopod-runtime delete none > /dev/null 2>&1 || true; }
none_left() { podman rm -f -t 0 --all > /dev/null 2>&1 && [ -z "$("$low" list -q)" ] && quiet && sweep && [ -z "$(ls -A /run/cryopod)" ]; }
later() { # COMMAND...: does something at a random moment of the next 700 ms
    local wait=0.$((RANDOM % 7))$((RANDOM % 10))
    { sleep "$wait" && "$@" || true; } > /dev/null 2>&1 &
}
kill_all() { pgrep "$@" | xargs -r kill -KILL; }
kill_conmon() { local pid && pid=$(podman inspect -f '{{.State.ConmonPid}}' "$1") && [ "$pid" -gt 1 ] && kill -KILL "$pid"; }
any() { local all=("$@") && echo "${all[RANDOM % $#]}"; }

is_there() { if [ -z "$kind" ]; then [ -e "$1/cryopod.json" ]; else get "job/${1##*/}/cryopod.json" > /dev/null; fi; }

fault=none round=0
: > /tmp/said > /tmp/faults
begin first --annotation=dev.cryopod.restore.otherwise=start --annotation=dev.cryopod.grace_s=60 # this one must not fail
wait_for reached first 3
podman stop -t 60 first > /dev/null
floor=$(($(numbers first | tail -n 1) + 1))
wait_for none_left
while [ $((round += 1)) -le "$rounds" ]; do
    # A start: `floor` is the number at which the newest checkpoint goes on, at least.
    fault=$(any none two criu low wrapper $there)
    echo "$round start $fault" >> /tmp/faults
    case $fault in
        two) begin b & ;;
        criu) later kill_all -x criu ;;
        low) later kill_all -x "$low" ;;
        wrapper) later kill_all -x cryopod-runtime ;;
        storage) later hangs "$(any 0 1 3)" ;;
        lease) touch -d "$(any '1 day ago' '1 day')" /srv/place/job/lease-* ;; # a clock that jumps
    esac
    begin a || true
    wait
    check_once() { [ "$(running)" -le 1 ]; }
    check "$round, $fault: at most one runs" check_once
    job=a
    if [ "$fault" = two ] && [ "$(podman inspect -f '{{.State.Running}}' a 2> /dev/null)" != true ]; then job=b; fi
    if ! within 10 reached $job "$floor"; then
        wait_for none_left
        job=a
        check "$round, $fault: the next start succeeds" begin a
    fi
    check "$round, $fault: it goes on" wait_for reached $job $((floor + 1))
    first=$(numbers $job | sed -n 1p)
    check "$round, $fault: at the checkpoint" test "$first" -ge "$floor"
    floor=$first
    # A stop.
    fault=$(any none on-stop criu low conmon full kill two $begun)
    echo "$round stop $fault" >> /tmp/faults
    grace=7 id=$(podman inspect -f '{{.Id}}' $job)
    case $fault in
        on-stop) later kill_all -f '^cryopod-on-stop ' ;;
        criu) later kill_all -x criu ;;
        low) later kill_all -x "$low" ;;
        conmon) later kill_conmon $job ;;
        full) mount -o remount,size=$(($(df --output=used -k $disk | tail -n 1) + RANDOM % 600))k $disk ;;
        storage) later hangs "$(any 0 1 3 5)" ;;
        kill) grace=0 && later podman kill $job ;;
        two) later podman stop -t 7 $job ;;
    esac
    [ "$grace" = 0 ] && (podman kill -s TERM $job || true) > /dev/null 2>&1
    timeout 100 podman stop -t "$grace" $job > /tmp/said 2>&1 || true
    wait
    mount -o remount,size=1g $disk
    wait_for quiet
    check "$round, $fault: at most one runs" check_once
    last=$(numbers $job | tail -n 1)
    # It ran no further than its checkpoint. A newer one can also be what a killed stop had left.
    ! grep -q "$id: checkpointed into $(newest)\"" "$log" || floor=$((last + 1))
    wait_for none_left
    check "$round, $fault: there is a checkpoint" is_there "$(newest)"
done
echo "faults: $(grep -vc none /tmp/faults)"
