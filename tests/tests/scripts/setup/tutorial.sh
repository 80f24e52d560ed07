# tutorial.sh: the commands of docs/tutorial.md, in the order of the page.
page=/src/docs/tutorial.md
blocks() { # HEADING: the blocks of its section
    awk -v heading="## $1" '/^## / {on = $0 == heading} /^```/ {if (code) print ""; code = on && $0 == "```sh"; next} code' $page
}
blocks podman > /tmp/podman.sh
blocks docker > /tmp/docker.sh
check 'the page has commands' test "$(cat /tmp/podman.sh /tmp/docker.sh | wc -l)" -ge 25
on_failure() { tail -n 20 /tmp/tutorial.said /tmp/dockerd.log /tmp/containerd.log 2> /dev/null; }
numbers() { grep -E '^[0-9]+$' /tmp/tutorial.said; }
# tutorial ENGINE: what its blocks print is in /tmp/tutorial.said.
tutorial() { bash -xeuo pipefail "/tmp/$1.sh" > /tmp/tutorial.said 2>&1; }

mkimage
podman tag localhost/busybox docker.io/library/busybox
mkdir -p /etc/cryopod # the packages bring it
cp /etc/containers/containers.conf /tmp/before
check 'podman: all commands' tutorial podman
check 'podman: all is well' says /tmp/tutorial.said '^A container can be checkpointed'
# The last number before the checkpoint, one a second after the restore, the first three of a copy.
mapfile -t n < <(numbers)
check 'podman: it counts on' test "${n[1]}" -gt "${n[0]}"
check 'podman: copies begin after the checkpoint' test "${n[2]} ${n[3]}" = "$((n[0] + 1)) $((n[0] + 2))"
check 'podman: undone' cmp /etc/containers/containers.conf /tmp/before

rm -f /etc/cryopod/config.toml
low_level runc
docker_daemons
docker import /usr/local/share/testbed/busybox.tar busybox > /dev/null
cp /etc/docker/daemon.json /tmp/before
check 'docker: all commands' tutorial docker
mapfile -t n < <(numbers)
check 'docker: it counts on' test "${n[1]}" -gt "${n[0]}"
check 'docker: undone' cmp /etc/docker/daemon.json /tmp/before
