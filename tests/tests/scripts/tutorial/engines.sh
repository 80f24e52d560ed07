# engines.sh: the tutorial's parts for podman and docker.
# A container on a busy machine may print nothing for seconds: the page's pauses end when each has printed three numbers more.
cat >> /tmp/first.sh << 'SH'
printed_more() { [ "$("$1" logs "$2" 2> /dev/null | wc -l)" -ge "$3" ]; } # ENGINE CONTAINER LINES
sleep() {
    command sleep "$@"
    local engine container lines
    for engine in podman docker; do
        for container in $($engine ps -q 2> /dev/null); do
            lines=$($engine logs "$container" 2> /dev/null | wc -l)
            until printed_more $engine "$container" $((lines + 3)); do command sleep 0.2; done
        done
    done
}
SH
mkimage
podman tag localhost/busybox docker.io/library/busybox
once
cp /etc/containers/containers.conf /tmp/before
check 'podman: all commands' tutorial podman
check 'podman: all is well' says /tmp/tutorial.said '^A container can be checkpointed'
# The last number before the checkpoint, one a second after the restore, the first three of a copy.
mapfile -t n < <(numbers)
check 'podman: it counts on' test "${n[1]}" -gt "${n[0]}"
check 'podman: copies begin after the checkpoint' test "${n[2]} ${n[3]}" = "$((n[0] + 1)) $((n[0] + 2))"
check 'podman: undone' cmp /etc/containers/containers.conf /tmp/before

rm -r /srv/checkpoints
once runc
docker_daemons
docker import /usr/local/share/testbed/busybox.tar busybox > /dev/null
cp /etc/docker/daemon.json /tmp/before
check 'docker: all commands' tutorial docker
mapfile -t n < <(numbers)
check 'docker: it counts on' test "${n[1]}" -gt "${n[0]}"
check 'docker: undone' cmp /etc/docker/daemon.json /tmp/before
