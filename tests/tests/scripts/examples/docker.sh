low_level runc
containerd_up
dockerd --containerd /run/containerd/containerd.sock --experimental --iptables=false --ip6tables=false --bridge=none \
    --add-runtime cryopod=/usr/local/bin/cryopod-runtime > /tmp/dockerd.log 2>&1 &
wait_for docker version > /dev/null 2>&1
docker import /usr/local/share/testbed/busybox.tar busybox > /dev/null
bash /src/examples/docker/suspend.sh --network none
