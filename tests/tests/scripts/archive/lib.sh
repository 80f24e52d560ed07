# lib.sh: GPU containers on the simulated driver, and archives of them.
# shellcheck shell=bash disable=SC2154
nodes=(/dev/nvidiactl /dev/nvidia-uvm /dev/nvidia0 /dev/nvidia1)
# SOURCE:TARGET of what a client needs that busybox has not
binds=(/run/cusim:/run/cusim /opt/cusim:/cusim /usr/lib/x86_64-linux-gnu:/lib/x86_64-linux-gnu /usr/lib64:/lib64)

run_job() { # cusim-client ARG...: under podman
    pod run -d --name job --network none "${nodes[@]/#/--device=}" "${binds[@]/#/--volume=}" \
        -e LD_LIBRARY_PATH=/cusim localhost/busybox /cusim/cusim-client "$@" > /dev/null
    wait_for ticked job 3
}
logs() { printed "$1"; }
ticks() { logs "$1" | grep -c ok || true; }
ticked() { [ "$(ticks "$1")" -ge "$2" ]; }
sum() { logs "$1" | tail -n 1 | cut -d' ' -f2; }
goes_on() { # CONTAINER: the sum comes again, and was never wrong
    local now && now=$(ticks "$1")
    wait_for ticked "$1" $((now + 3)) && ! logs "$1" | grep CORRUPT
}
at_tick() { # CONTAINER N: the last line has a number of at least N; the first has 0
    local n && n=$(logs "$1" | tail -n 1 | cut -d' ' -f1) && [ "${n:--1}" -ge "$2" ]
}
cri_restores() { # does the CRI make a container of a checkpoint? containerd 2.4 does not any more
    ! containerd --version | grep -Eq ' v?(2\.([4-9]|[1-9][0-9])|[3-9]\.)' || { echo 'no restore by the CRI' && return 1; }
}
registry() { # [ADDRESS]: a registry at port 5000, its blobs below /tmp/registry
    printf 'version: 0.1\nstorage: {filesystem: {rootdirectory: /tmp/registry}, delete: {enabled: true}}\nhttp: {addr: "%s:5000"}\n' \
        "${1:-127.0.0.1}" > /tmp/registry.yml
    docker-registry serve /tmp/registry.yml > /tmp/registry.log 2>&1 &
    wait_for curl -sf "http://${1:-127.0.0.1}:5000/v2/" -o /dev/null
}

# A call to containerd's CRI, by curl, as Debian has no crictl.
cri() { # METHOD JSON
    local service=Runtime
    if [ "$1" = PullImage ]; then service=Image; fi
    /src/tests/testbed/grpc.sh "${cri_socket:-/run/containerd/containerd.sock}" "runtime.v1.${service}Service/$1" "$2" ||
        { grep -iE 'error|restor|checkpoint' /tmp/containerd.log | tail -n 8 >&2 && return 1; }
}
cri_quiet() { cri "$@" > /dev/null 2>&1; }
cri_configure() { # containerd's configuration, and an image that the CRI can run, in the registry
    # The CRI runs an image's own command, and pulls the image again at a restore.
    podman import -q --change 'CMD ["/bin/sleep", "100000"]' /usr/local/share/testbed/busybox.tar localhost/busybox > /dev/null
    podman push -q --tls-verify=false localhost/busybox docker://localhost:5000/busybox:1
    cat > /etc/containerd/config.toml << 'T'
version = 3
[plugins.'io.containerd.cri.v1.images']
  snapshotter = 'overlayfs'
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = 'localhost:5000/busybox:1'
[plugins.'io.containerd.cri.v1.runtime']
  enable_selinux = false
  disable_apparmor = true
  restrict_oom_score_adj = true
  enable_experimental_restore_via_create = true # from 2.3.4 on
T
}
cri_network() { # each pod gets a network namespace with the loopback device
    mkdir -p /etc/cni/net.d /opt/cni/bin
    echo '{"cniVersion": "1.0.0", "name": "pod", "plugins": [{"type": "pod"}]}' > /etc/cni/net.d/pod.conflist
    cat > /opt/cni/bin/pod << 'T'
#!/bin/sh
case $CNI_COMMAND in
    ADD)
        nsenter --net="$CNI_NETNS" ip link set lo up
        echo '{"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "sandbox": "/x"}], "ips": [{"address": "10.9.0.2/24", "interface": 0}]}'
        ;;
    VERSION) echo '{"cniVersion": "1.0.0", "supportedVersions": ["0.3.1", "0.4.0", "1.0.0"]}' ;;
esac
T
    chmod +x /opt/cni/bin/pod
    cp /opt/cni/bin/pod /opt/cni/bin/loopback
}
