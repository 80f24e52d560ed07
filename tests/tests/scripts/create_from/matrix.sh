# matrix.sh: a checkpoint of each engine, and a copy of it under each engine, all with stock shims. podman has crun
# underneath, the others runc: what users have. containerd's CRI takes part where it has checkpoints.
from=/srv/checkpoints
mkdir -p "$from" /tmp/logs /etc/cryopod /etc/containers/containers.conf.d
echo -e '[engine]\nruntime_supports_json = ["crun", "runc", "cryopod-runtime"]' > /etc/containers/containers.conf.d/json.conf
# A network namespace with nothing in it but a mark, for podman's copies and for pods.
ip netns add copies
nsenter --net=/run/netns/copies sh -c 'echo 77 > /proc/sys/net/ipv4/ip_default_ttl'
if containerd --version | grep -Eq ' v?1\.'; then with_cri=(); else
    with_cri=(cri)
    registry
    cri_configure
    cat >> /etc/containerd/config.toml << 'T'
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.stock]
  runtime_type = 'io.containerd.runc.v2'
  pod_annotations = ['dev.cryopod.restore']
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.stock.options]
    BinaryName = '/usr/local/bin/cryopod-runtime'
T
    mkdir -p /etc/cni/net.d /opt/cni/bin
    echo '{"cniVersion": "1.0.0", "name": "mark", "plugins": [{"type": "mark"}]}' > /etc/cni/net.d/mark.conflist
    cat > /opt/cni/bin/mark << 'T'
#!/bin/bash
case $CNI_COMMAND in
    ADD)
        nsenter --net="$CNI_NETNS" sh -c 'echo 77 > /proc/sys/net/ipv4/ip_default_ttl'
        echo '{"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "sandbox": "/x"}], "ips": [{"address": "10.9.0.2/24", "interface": 0}]}'
        ;;
    VERSION) echo '{"cniVersion": "1.0.0", "supportedVersions": ["0.3.1", "0.4.0", "1.0.0"]}' ;;
esac
T
    chmod +x /opt/cni/bin/mark
    cp /opt/cni/bin/mark /opt/cni/bin/loopback
fi
containerd_up
images
dockerd --containerd /run/containerd/containerd.sock --experimental --iptables=false --ip6tables=false \
    --bip 172.30.0.1/24 --add-runtime cryopod=/usr/local/bin/cryopod-runtime > /tmp/dockerd.log 2>&1 &
wait_for docker version > /dev/null 2>&1
docker import /usr/local/share/testbed/busybox.tar busybox > /dev/null
if [ ${#with_cri[@]} = 1 ]; then
    wait_for cri_quiet Version '[[1,"v1"]]'
    cri PullImage '[[1,[[1,"localhost:5000/busybox:1"]]]]' > /dev/null
    # As the kubelet limits a container: its namespaces, the paths that are masked or read-only.
    limits=$(jq -nc '[[2, [[3, [[1, 0], [2, 1], [3, 1]]]]
        + ("acpi kcore keys latency_stats timer_list scsi" | split(" ") | map([13, "/proc/" + .])) + [[13, "/sys/firmware"]]
        + ("asound bus fs irq sys sysrq-trigger" | split(" ") | map([14, "/proc/" + .]))]]')
    sandbox='[[1,[[1,"pod"],[2,"uid"],[3,"ns"]]],[3,"/tmp/logs"],[8,[[2,[[1,[[1,0],[2,1],[3,1]]]]]]]]'
fi
on_failure() { cat /tmp/said; find /run /var/lib -name restore.log -path '*cryopod-restore*' -exec grep -H Error {} + 2> /dev/null; }
configure() { # ENGINE
    local low=runc
    if [ "$1" = podman ]; then low=crun; fi
    printf '[runtime]\nlow_level = "%s"\n[restore]\nallow = [{ from = "%s", users = [0], kubernetes = ["ns"], variable = true }]\n' $low $from > /etc/cryopod/config.toml
}

# An open file of its own that the image lacks; what the others give in capabilities, docker's default has.
program=(sh -c 'exec 3> /own; i=0; while :; do echo $i; echo $i >&3; i=$((i + 1)); sleep 0.1; done')
caps=(--cap-add AUDIT_WRITE --cap-add MKNOD --cap-add NET_RAW --security-opt seccomp=unconfined)
docker=(--runtime cryopod --network none --security-opt seccomp=unconfined)
starts() { # ENGINE NAME [SOURCE]
    local engine=$1 name=$2 source=${3:-} with=() # the last one: of a copy
    configure "$engine"
    local network=none bind=() mount=() cri='[]'
    if [ -n "$source" ]; then
        with=(-e "CRYOPOD_RESTORE=$source") network=ns:/run/netns/copies bind=(-v $volume:/volume:ro)
        mount=(--mount "type=bind,src=$volume,dst=/volume,options=rbind:ro") cri="[[7, [[1, \"/volume\"], [2, \"$volume\"], [3, 1]]]]"
    fi
    case $engine in
        podman) pod run -d --name "$name" --network $network --hostname "$name" "${caps[@]}" "${bind[@]}" "${with[@]}" localhost/busybox "${program[@]}" ;;
        docker) docker run -d --name "$name" --hostname "$name" "${docker[@]}" "${bind[@]}" "${with[@]}" busybox "${program[@]}" ;;
        ctr) ctr run -d --allow-new-privs --mount type=cgroup,src=cgroup,dst=/sys/fs/cgroup,options=ro:nosuid:noexec:nodev "${mount[@]}" --runtime $STOCK --runc-binary /usr/local/bin/cryopod-runtime --log-uri "file:///tmp/logs/$name" \
            ${source:+--env "CRYOPOD_RESTORE=$source"} $image "$name" "${program[@]}" ;;
        cri)
            # podman's checkpoints by the pod's annotation, the others by the container's variable.
            local variable=$source config
            config=$(jq -nc --argjson of "$sandbox" --arg name "$name" '$of + [[2, $name]]')
            case $source in *podman*)
                variable=''
                config=$(jq -nc --argjson of "$config" --arg from "$source" '$of + [[7, [[1, "dev.cryopod.restore"], [2, $from]]]]')
                ;;
            esac
            pod=$(cri RunPodSandbox "[[1,$config],[2,\"stock\"]]")
            container=$(cri CreateContainer "$(jq -nc --arg from "$variable" --arg pod "$pod" --arg name "$name" --argjson sandbox "$config" \
                '[[1, $pod], [2, [[1, [[1, $name]]], [2, [[1, "localhost:5000/busybox:1"]]]]
                + ($ARGS.positional | map([3, .])) + $mounts + [[6, [[1, "CRYOPOD_RESTORE"], [2, $from]]], [11, ($name + ".log")], [15, $linux]]], [3, $sandbox]]' --argjson linux "$limits" --argjson mounts "$cri" \
                --args -- "${program[@]}")") && cri StartContainer "[[1,\"$container\"]]"
            ;;
    esac > /tmp/said 2>&1
}
output() { # ENGINE NAME
    case $1 in
        podman) printed "$2" ;;
        docker) docker logs "$2" 2> /dev/null ;;
        ctr) cat "/tmp/logs/$2" ;;
        cri) sed 's/^[^ ]* stdout F //' "/tmp/logs/$2.log" ;;
    esac
}
reached() { local n && n=$(output "$1" "$2" | tail -n 1) && [ "${n:--1}" -ge "$3" ]; } # ENGINE NAME N
inside() { # ENGINE NAME COMMAND
    case $1 in
        podman) podman exec "$2" sh -c "$3" ;;
        docker) docker exec "$2" sh -c "$3" ;;
        ctr) ctr tasks exec --exec-id "e$RANDOM" "$2" sh -c "$3" ;;
        cri) cri ExecSync "[[1,\"$container\"],[2,\"sh\"],[2,\"-c\"],[2,\"$3\"]]" ;;
    esac
}
removed() { # ENGINE NAME
    case $1 in
        podman) podman rm -f -t 0 "$2" ;;
        docker) docker rm -f "$2" ;;
        ctr) if is "$2" RUNNING; then ctr tasks kill -s SIGKILL "$2" && wait_for is "$2" STOPPED && ctr tasks rm "$2"; fi && ctr containers rm "$2" ;;
        cri) cri StopPodSandbox "[[1,\"$pod\"]]" && cri RemovePodSandbox "[[1,\"$pod\"]]" && rm "/tmp/logs/$2.log" ;;
    esac > /dev/null
}
checkpointed() { # ENGINE NAME [NAME-OF-CHECKPOINT]
    local to=${3:-$1}
    rm -rf "$from/$to" "$from/$to.tar"
    case $1 in
        podman) pod container checkpoint --export "$from/$to.tar" "$2" ;;
        docker) docker checkpoint create --checkpoint-dir "$from" "$2" "$to" ;;
        ctr)
            { ctr images rm "localhost/checkpoint:$to" || true; } &&
                pausing ctr containers checkpoint --rw --task "$2" "localhost/checkpoint:$to" &&
                ctr images export $(ctr images export --help | grep -o -m 1 -- --local) --skip-manifest-json "$from/$to.tar" "localhost/checkpoint:$to"
            ;;
        cri) cri CheckpointContainer "[[1,\"$container\"],[2,\"$from/$to.tar\"],[3,60]]" ;;
    esac > /tmp/said 2>&1 && chmod -R go-w "$from"
}
source_of() { case $1 in docker) echo "$from/docker" ;; *) echo "$from/$1.tar" ;; esac; }
# What only the copy's container has: its name in /etc, and a volume.
volume=/srv/volume
mkdir $volume
echo data > $volume/file
own() { # ENGINE: of the copy
    local ttl=64
    # podman and the CRI name a network namespace, docker and ctr leave it to the low-level runtime.
    case $1 in podman | cri) ttl=77 ;; esac
    inside "$1" copy "set -e; test \$(tail -n 1 /own) -ge 8; echo x > /dev/shm/x; test \$(cat /proc/sys/net/ipv4/ip_default_ttl) = $ttl; cat /volume/file; if (echo > /volume/file) 2> /dev/null; then exit 1; fi; if [ $ttl = 64 ]; then ping -c 1 -W 100 127.0.0.1; fi" > /tmp/said 2>&1 || return 1
    grep -q data /tmp/said || return 1
    # The CRI gives the pod's namespace by its path, with the pod's name in it.
    case $1 in
        podman | docker) test "$(inside "$1" copy 'cat /etc/hostname; hostname')" = $'copy\ncopy' ;;
        cri) inside cri copy hostname > /tmp/said 2>&1; grep -q copy /tmp/said ;;
    esac
}
for a in podman docker ctr "${with_cri[@]}"; do
    check "$a: starts" starts "$a" first
    wait_for reached "$a" first 5
    check "$a: a checkpoint" checkpointed "$a" first
    removed "$a" first
    for b in podman docker ctr "${with_cri[@]}"; do
        check "$a, a copy under $b" starts "$b" copy "$(source_of "$a")"
        wait_for reached "$b" copy 9 # a number is in /own once the next one is printed
        check 'it goes on' test "$(output "$b" copy | head -n 1)" -ge 4
        check 'what is its own' own "$b"
        if [ "$a $b" = 'podman docker' ]; then
            echo "action-script /bin/false" >> /etc/criu/default.conf
            if checkpointed docker copy again; then echo 'FAILED: checkpointed, whatever the script says' && exit 1; fi
            sed -i '$d' /etc/criu/default.conf
            check 'a checkpoint of it that fails: docker says why' says /tmp/said 'cryopod: checkpoint of .* failed and the container goes on running: CRIU: .*Script /bin/false exited'
        fi
        # What it got from the new engine is there for the next one, too.
        if [ "$a" != "$b" ]; then check 'it is checkpointed' checkpointed "$b" copy again; fi
        removed "$b" copy
    done
done
check 'nothing is left' wait_for sh -c '[ -z "$(ls -A /run/cryopod)" ] && [ -z "$(runc --root /run/docker/runtime-runc/moby list -q)" ] && [ -z "$(crun list -q)" ]'
