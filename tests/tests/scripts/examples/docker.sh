low_level runc
# With containerd's own shim docker 26 refuses a start in the second of the checkpoint (docs/containerd.md).
mkdir /place
ln -s /usr/local/bin/containerd-shim-cryopod-v2 /place/containerd-shim-runc-v2
PATH=/place:$PATH containerd_up
dockerd --containerd /run/containerd/containerd.sock --experimental --iptables=false --ip6tables=false --bridge=none \
    --add-runtime cryopod=/usr/local/bin/cryopod-runtime > /tmp/dockerd.log 2>&1 &
wait_for docker version > /dev/null 2>&1
docker import /usr/local/share/testbed/busybox.tar busybox > /dev/null
bash /src/examples/docker/suspend.sh --network none
