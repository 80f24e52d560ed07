# compose.sh: stops that are checkpoints, under docker compose: the example, and a service with a GPU beside it.
simulate runc
place=/mnt/place
mkdir -p "$place"
printf '[checkpoint]\nallow = [{ from = "%s", variable = true }]\n[restore]\nallow = [{ from = "%s", variable = true }]\n' \
    "$place" "$place" >> /etc/cryopod/config.toml
containerd_up
dockerd --containerd /run/containerd/containerd.sock --iptables=false --ip6tables=false --bridge=none \
    --add-runtime cryopod=/usr/local/bin/cryopod-runtime > /tmp/dockerd.log 2>&1 &
wait_for docker version > /dev/null 2>&1
docker import /usr/local/share/testbed/busybox.tar busybox > /dev/null
on_failure() { cat /tmp/said /var/log/cryopod-on-stop.log; tail -n 5 /tmp/dockerd.log /tmp/containerd.log; tail -n 5 /tmp/all/*; }

# docker has no network in the bed. The service `gpu` is `job` with another name and program, and with devices.
jq -n --args '{services: ({job: {}, workers: {}, gpu: {extends: {file: "/src/examples/docker/compose.yaml", service: "job"},
        security_opt: ["seccomp=unconfined"], command: ["/cusim/cusim-client"], devices: [$ARGS.positional[] | select(startswith("/dev/"))],
        volumes: [$ARGS.positional[] | select(startswith("/dev/") | not)],
        environment: {LD_LIBRARY_PATH: "/cusim", CRYOPOD_NAME: "${COMPOSE_PROJECT_NAME}.gpu"}}}
    | map_values(. + {network_mode: "none"}))}' "${nodes[@]}" "${binds[@]}" > /tmp/bed.yaml
compose() { docker compose -p example -f /src/examples/docker/compose.yaml -f /tmp/bed.yaml "$@" > /tmp/said 2>&1; }
all=(job gpu workers-1 workers-2)
of() { case $1 in *-*) echo "example-$1" ;; *) echo "example-$1-1" ;; esac; } # SERVICE: its container
mkdir /tmp/all
keep() { local s && for s in "${all[@]}"; do docker logs "$(of "$s")" >> "/tmp/all/$s" 2> /dev/null; done; } # before `down`
logs() { cat "/tmp/all/$1" 2> /dev/null || true && docker logs "$(of "$1")" 2> /dev/null; }
further() { # each has printed 3 lines more than when this began
    local s lines=()
    for s in "${all[@]}"; do lines+=($(($(logs "$s" | wc -l) + 3))); done
    for s in "${!all[@]}"; do wait_for printed_lines "${all[s]}" "${lines[s]}"; done
}
printed_lines() { [ "$(logs "$1" | wc -l)" -ge "$2" ]; }
each_once() { # what each has printed, from 0 on, and the sums
    local s
    for s in "${@:-"${all[@]}"}"; do
        logs "$s" | awk '$1 != NR - 1 { exit 1 }' || { echo "$s:" && logs "$s" && return 1; }
    done
    ! logs gpu | grep CORRUPT
}
ended() { # by checkpoints
    local s && for s in "${all[@]}"; do [ "$(docker inspect -f '{{.State.Status}} {{.State.ExitCode}}' "$(of "$s")")" = 'exited 143' ] || return 1; done
}
checkpoints() { find $place -mindepth 2 -maxdepth 2 -name '0*' | wc -l; }

check 'up' compose up -d
further
check 'stop' compose stop
check 'each ended with the exit code of TERM' ended
check 'each has a checkpoint' test "$(checkpoints)" = 4
ids=$(docker ps -aq | sort)
check 'up again' compose up -d
check 'starts the same containers' test "$(docker ps -q | sort)" = "$ids"
further
check 'each number once' each_once
check 'restart' compose restart
further
check 'each number once' each_once
check 'each has another checkpoint' test "$(checkpoints)" = 8
check 'stop before down' compose stop
keep
check 'down' compose down
check 'removes them' test -z "$(docker ps -aq)"
all=(job gpu) # the workers have no names
check 'up: other containers' compose up -d job gpu
further
check 'of the same names: each number once' each_once
before=$(logs job | tail -n 1) ticks=$(logs gpu | tail -n 1 | cut -d' ' -f1)
check 'down alone' compose down
check 'up' compose up -d job gpu
rm /tmp/all/*
further
check 'job goes on' test "$(logs job | head -n 1)" -gt "$before"
check 'gpu goes on' test "$(logs gpu | head -n 1 | cut -d' ' -f1)" -gt "$ticks"
check 'its sums are right' test -z "$(logs gpu | grep CORRUPT)"
check 'down' compose down
check 'nothing is left' wait_for sh -c '[ -z "$(ls -A /run/cryopod)" ] && [ -z "$(runc --root /run/docker/runtime-runc/moby list -q)" ]'
