# image.sh: the image of the Kubernetes installer on a node where nothing of cryopod is installed, as a privileged container of
# containerd with the node's root: it sets the node up, the CRIU that it brings restores, and it takes all back.
# shellcheck shell=bash
. /src/tests/testbed/lib.sh
. /src/tests/tests/scripts/shim/lib.sh
. /src/tests/tests/scripts/setup/lib.sh
systemd_outside
rm -rf /etc/cryopod
containerd_up
ctr images import --index-name localhost/installer:1 /packages/image.tar > /dev/null
# By a file: containerd's restart ends what `ctr` is connected to.
job() { # NAME WORD...
    local name=$1 && shift
    ctr run -d --privileged --log-uri "file:///tmp/$name.log" --mount type=bind,src=/,dst=/host,options=rbind:rw \
        localhost/installer:1 "$name" /opt/cryopod/bin/cryopod "$@"
    wait_for is "$name" STOPPED
    ctr tasks delete "$name" 2> /tmp/said || return 1
    ctr containers delete "$name"
}
on_failure() { tail -n 5 /tmp/*.log; }
state() { find /etc/containerd /opt -exec stat -c '%n %f' {} + | sort && cat /etc/containerd/config.toml; }
state > /tmp/before
check 'the image sets a node up' job install setup kubernetes --node-root /host --yes --restart
check 'with a test' says /tmp/install.log '^Tested: a container without a GPU was checkpointed and restored'
/opt/cryopod/bin/cryopod check > /tmp/said || true
check 'with its own CRIU' says /tmp/said ' at /opt/cryopod/lib/cryopod/criu/criu'
check 'the cache of the node' job cache installer run --node-root=/host -- cache ls
check 'the image takes it back' job remove setup kubernetes --node-root /host --undo --yes --restart
check 'nothing is left' diff /tmp/before <(state)
