# lib.sh: the commands of docs/tutorial.md. `tutorial HEADING` runs the blocks of a section in the order of the page. What they
# print is in /tmp/tutorial.said.
# shellcheck shell=bash
page=/src/docs/tutorial.md
blocks() { # HEADING: the blocks of its section
    awk -v heading="## $1" '/^## / {on = $0 == heading} /^```/ {if (code) print ""; code = on && $0 == "```sh"; next} code' $page
}
on_failure() { find /var/lib/containers -name dump.log -exec grep -B3 Error {} +; tail -n 20 /tmp/tutorial.said /tmp/dockerd.log /tmp/containerd.log 2> /dev/null; }
numbers() { grep -E '^[0-9]+$' /tmp/tutorial.said; }
# What all blocks begin with. podman's monitors and containerd's shims end some time after their containers, on a busy machine
# later than `setup --undo` waits.
cat > /tmp/first.sh << 'SH'
of_containers() { pgrep -x 'conmon|containerd-shim' || pgrep -f '^[^ ]*podman .*container cleanup'; }
cryopod() {
    case "$*" in *--undo*) while of_containers > /dev/null; do command sleep 0.2; done ;; esac
    command cryopod "$@"
}
SH
tutorial() {
    blocks "$1" > /tmp/blocks.sh
    if [ "$(wc -l < /tmp/blocks.sh)" -lt 2 ]; then echo "the page has no commands below $1" && return 1; fi
    cat /tmp/first.sh /tmp/blocks.sh > /tmp/commands.sh
    timeout 900 bash -xeuo pipefail /tmp/commands.sh > /tmp/tutorial.said 2>&1
}
# What a part begins with: a configuration as the packages bring it, and what the page asks for once.
once() { # [LOW]
    mkdir -p /etc/cryopod
    rm -f /etc/cryopod/config.toml
    if [ $# = 1 ]; then low_level "$1"; fi
    check 'once' tutorial Once
}
