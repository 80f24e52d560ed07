# helpers.sh LOW: the programs that CRIU runs. One that a container needs and that is missing or unfit is told before the
# freeze, and the container goes on; one that it does not need is not missed. A restore looks at them, too.
low=$1
mkimage
simulate "$low"
rm /etc/criu/default.conf # which switches the network's lock off
ip netns add apart
anew() { # the engine's network, as engines make one for each container; the checkpoint has left its lock in the old one
    local ip && ip=$(command -v ip || echo /usr/bin/ip.away)
    "$ip" netns del apart && "$ip" netns add apart
}

hide() { # PROGRAM...
    local name path
    for name in "$@"; do
        for path in $(type -ap "$name"); do if [ -e "$path" ] || [ -L "$path" ]; then mv "$path" "$path.away"; fi; done
    done
    hash -r
}
show() {
    local path
    find /bin/ /sbin/ /usr/local/bin /usr/local/sbin -name '*.away' | while read -r path; do mv -f "$path" "${path%.away}"; done
    hash -r
}
iptables=(iptables ip6tables iptables-restore ip6tables-restore)
no_nftables() { # a CRIU that was built without libnftables
    mv /usr/sbin/criu /usr/sbin/criu.away
    cat > /usr/sbin/criu <<'SH'
#!/bin/sh
case "$*" in *network_lock_nftables*) echo 'Warn: Nftables based locking requires libnftables' >&2; exit 1 ;; esac
exec /usr/sbin/criu.away "$@"
SH
    chmod +x /usr/sbin/criu
}
start() { # NETWORK ARG...
    local network=$1 && shift
    pod run -d --name job --network "$network" "${nodes[@]/#/--device=}" "${binds[@]/#/--volume=}" \
        -e LD_LIBRARY_PATH=/cusim "$@" localhost/busybox /cusim/cusim-client --mib 16 > /dev/null
    wait_for ticked job 3
}
remove() { pod rm -f -t 0 job > /dev/null; }
refused() { # NAME WANT...: the checkpoint, ahead of CRIU
    local name=$1 want && shift
    rm -f /tmp/job.tar
    if pod container checkpoint --export /tmp/job.tar job > /tmp/said 2>&1; then echo "$name: checkpointed" && exit 1; fi
    for want in 'was refused and the container goes on running' "$@"; do
        grep -qF -- "$want" /tmp/said || { echo "$name: not told: $want" && cat /tmp/said && exit 1; }
    done
    [ ! -s "$(podman inspect -f '{{.StaticDir}}' job)/dump.log" ] || { echo "$name: CRIU has run" && exit 1; }
    check "$name" goes_on job
}
checkpointed() {
    rm -f /tmp/job.tar
    pod container checkpoint --export /tmp/job.tar job > /tmp/said 2>&1 || { cat /tmp/said && exit 1; }
    remove
    rm -rf /tmp/metadata && mkdir /tmp/metadata && tar --zstd -xf /tmp/job.tar -C /tmp/metadata checkpoint/cryopod.json
}
restored() { # NAME
    pod container restore --import /tmp/job.tar > /tmp/said 2>&1 || { cat /tmp/said && exit 1; }
    check "$1" goes_on job
}
not_restored() { # NAME WANT
    local sum && sum=$(sha256sum < /tmp/job.tar)
    if pod container restore --import /tmp/job.tar > /tmp/said 2>&1; then echo "$1: restored" && exit 1; fi
    check "$1" says /tmp/said "$2"
    cryopod check /tmp/job.tar > /tmp/said && exit 1
    check "$1: the check says it before" says /tmp/said "refused .*$2"
    [ "$(sha256sum < /tmp/job.tar)" = "$sum" ]
    remove 2> /dev/null || true
}
recorded() { [ "$(jq -c .criu.helpers /tmp/metadata/checkpoint/cryopod.json)" = "$1" ] || { jq -c .criu /tmp/metadata/checkpoint/cryopod.json && return 1; }; }
host_says() { # LINE STATUS WANT: `cryopod check` of the host
    cryopod check --json > /tmp/check.json || true
    jq -e --arg n "$1" --arg s "$2" --arg w "$3" '.checks[] | select(.name == $n) | .status == $s and ((.found + " " + (.remedy // "")) | contains($w))' \
        /tmp/check.json > /dev/null || { jq --arg n "$1" '.checks[] | select(.name == $n)' /tmp/check.json && return 1; }
}

for line in tar ip 'network lock'; do check "host: $line" host_says "$line" ok ''; done

# A network namespace of the runtime's own.
start none
hide tar
refused 'no tar' 'tar is not on PATH' 'install the packages tar and gzip'
check 'host: no tar' host_says tar missing 'install the packages tar and gzip'
show && hide gzip
refused 'no gzip' 'gzip is not on PATH' 'install the packages tar and gzip'
show && hide tar && ln -s busybox /usr/bin/tar
refused "busybox's tar" '/tar cannot be used for that' 'install the packages tar and gzip'
rm /usr/bin/tar && show
hide ip
case $low in
crun)
    refused 'no ip' 'ip is not on PATH' 'install the package iproute2'
    check 'host: no ip' host_says ip missing 'install the package iproute2'
    ln -s busybox /usr/bin/ip
    refused "busybox's ip" "addr save\` fails (busybox's ip cannot do it): ip: invalid argument 'save'" 'install the package iproute2'
    check "host: busybox's ip" host_says ip missing 'install the package iproute2'
    rm /usr/bin/ip && show
    checkpointed
    check 'crun, its own network: recorded' recorded '["tar","ip","iptables"]'
    hide ip
    not_restored 'restore without ip' 'ip is not on PATH'
    show && hide tar
    not_restored 'restore without tar' 'tar is not on PATH'
    show
    ;;
runc)
    check 'host: no ip, which runc does without' host_says ip note iproute2
    checkpointed
    check 'runc, its own network: recorded' recorded '["tar","iptables"]'
    show && hide "${iptables[@]}"
    not_restored 'restore without iptables' 'iptables-restore is not on PATH'
    show && hide ip
    ;;
esac
restored 'its own network: restored with what it needs'
show
remove

# One of the engine's: nobody saves it, but it is locked.
start ns:/run/netns/apart
no_nftables && hide "${iptables[@]}" ip
refused 'neither iptables nor nftables' 'neither works' 'iptables-restore is not on PATH' 'libnftables' 'install the package iptables'
check 'host: neither iptables nor nftables' host_says 'network lock' missing 'install the package iptables'
show && hide "${iptables[@]}" ip
checkpointed
check 'nftables in place of iptables: recorded' recorded '["tar","nftables"]'
anew
restored 'nftables in place of iptables: restored'
remove
show
start ns:/run/netns/apart --annotation dev.cryopod.criu.network-lock=iptables
hide "${iptables[@]}"
refused 'no iptables, and the container asks for it' 'by iptables, and iptables-restore is not on PATH' 'network-lock = "nftables"'
show && hide ip
checkpointed
check 'iptables: recorded' recorded '["tar","iptables"]'
anew
restored 'iptables: restored'
remove

# The host's: neither saved nor locked.
no_nftables && hide "${iptables[@]}" ip
start host
checkpointed
check "the host's network: recorded" recorded '["tar"]'
restored "the host's network: restored without any of them"
remove
