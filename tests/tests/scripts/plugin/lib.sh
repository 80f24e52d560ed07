# lib.sh: CRIU alone with the plugin, an operation's directory written by hand, and the simulated driver.
# shellcheck shell=bash disable=SC2154
# A script ends with `done_all`; `check` names what was shown.

SIM=/run/cusim/server.sock
GPU0=GPU-c0da0000-5130-4d00-8000-000000000000
GPU1=GPU-c0da0000-5130-4d00-8000-000000000001
client_pid=
agent_pid=

simulate() { # cusim-server ARG...: the driver, its nodes, its server
    mkdir -p /run/cusim /img
    /opt/build/cusim-ctl --socket "$SIM" install /opt/cusim > /dev/null
    /opt/build/cusim-server --socket "$SIM" --dev-root /dev --gpus 2 --memory-mib 4096 "$@" > /tmp/server.log 2>&1 &
    wait_for ctl status 2> /dev/null # the socket is there before anybody listens
}
ctl() { /opt/build/cusim-ctl --socket "$SIM" "$@" > /dev/null; }
step() { LD_LIBRARY_PATH=/opt/cusim /opt/build/cusim-step "$@"; }

ticks() { grep -cs ok /tmp/out || true; }
ticked() { local n && n=$(ticks) && [ "${n:-0}" -ge "$1" ]; }
goes_on() { # the sum comes again, and was never wrong
    local now && now=$(ticks)
    wait_for ticked $((now + 3)) && ! grep CORRUPT /tmp/out
}
freed() { /opt/build/cusim-ctl --socket "$SIM" status | jq -e '[.gpus[].pids[]] == []' > /dev/null; }
# criu_is_from VERSION: CRIU is of that version or newer.
criu_is_from() { printf '%s\n' "$1" "$(criu --version | sed -n 's/^Version: //p')" | sort -CV; }
# From 4.3 on CRIU tells a plugin that a post-dump script failed; before, the plugin has ended, and the agent is left.
after_post_dump() { if criu_is_from 4.3; then echo clean; else echo rolled-back; fi; }
gone() { ! pgrep -x cusim-client > /dev/null; }

start() { # cusim-client ARG...
    rm -rf /tmp/out /img/*
    # Nothing of this script's may be open in the process: CRIU would have to know it.
    LD_LIBRARY_PATH=/opt/cusim setsid /opt/build/cusim-client "$@" < /dev/null > /tmp/out 2>&1 \
        3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 10>&- 11>&- 12>&- 13>&- 14>&- 15>&- &
    client_pid=$!
    disown
    wait_for ticked 3 || { tail -n 3 /tmp/out >&2 && return 1; }
}
stop() {
    pkill -KILL -x cusim-client || true
    wait_for gone
    ctl clear
    wait_for freed
}

operation() { # DIRECTORY KIND JSON: the directory of one operation, and its agent
    rm -rf "$1" && mkdir -p "$1/plugins"
    ln -s "${PLUGIN:-/opt/build/libcryopod_nvidia.so}" "$1/plugins/cryopod_nvidia.so"
    jq -n --arg dir "$1" --arg kind "$2" --argjson more "${3:-{\}}" '{version: 1, operation: $kind,
        socket: "\($dir)/driver.sock", abort_file: "\($dir)/abort", report: "\($dir)/plugin-report.json"} + $more' \
        > "$1/plugins/cryopod_nvidia.json"
    mkfifo "$1/stdin"
    /opt/build/cryopod-cuda-agent --socket "$1/driver.sock" --libcuda /opt/cusim/libcuda.so.1 \
        --report "$1/agent-report.json" < "$1/stdin" > "$1/ready" 2> "$1/agent.log" &
    agent_pid=$!
    exec 7> "$1/stdin"
    echo >&7
    wait_for test -s "$1/ready"
    jq -e .ready "$1/ready" > /dev/null
}
end_operation() { # as the wrapper does; the agent's exit status
    exec 7>&-
    wait "$agent_pid"
}
show_logs() {
    grep -hE 'cryopod: |Error' /img/*.log | grep -v RLIMIT_NOFILE || true
    cat /run/op/*/agent.log || true
}

try_dump() { # JSON CRIU-ARG...: succeeds as CRIU does; 7 is the agent's stdin, not for CRIU
    local code=0 json=${1:-} && shift $(($# > 0))
    operation /run/op/dump checkpoint "$json"
    if [ -n "${before_criu:-}" ]; then eval "$before_criu"; fi
    criu dump -t "$client_pid" -D /img -o dump.log -v4 -L /run/op/dump/plugins --network-lock skip "$@" 7>&- || code=$?
    agent_code=0
    end_operation || agent_code=$?
    return "$code"
}
try_restore() { # JSON CRIU-ARG...
    local code=0 json=${1:-} && shift $(($# > 0))
    operation /run/op/restore restore "$json"
    criu restore -d -D /img -o restore.log -v4 -L /run/op/restore/plugins "$@" 7>&- || code=$?
    end_operation || true
    return "$code"
}
dump() { try_dump "$@" || { echo "the dump failed" && show_logs && exit 1; }; }
restore() { try_restore "$@" || { echo "the restore failed" && show_logs && exit 1; }; }
dump_fails() { ! try_dump "$@" 2> /dev/null || { echo "the dump should have failed" && show_logs && exit 1; }; }
restore_fails() { ! try_restore "$@" 2> /dev/null || { echo "the restore should have failed" && show_logs && exit 1; }; }

says() { # FILE JQ-CONDITION
    jq -e "$2" "$1" > /dev/null || { echo "$1: not $2" && cat "$1" && show_logs && exit 1; }
}
plugin_says() { says /run/op/dump/plugin-report.json "$1"; }
agent_says() { says /run/op/dump/agent-report.json "$1"; }
on_failure() { show_logs; tail -n 3 /tmp/out; }
