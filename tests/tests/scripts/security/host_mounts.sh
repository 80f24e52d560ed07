# host_mounts.sh LOW: what the host has mounted below a volume's source is there after a restore in place, an import and a
# copy, with a GPU and without; a volume with rslave still gets what the host mounts later.
low=$1
mkimage
simulate "$low"
from=/srv/checkpoints
mkdir -p "$from" /srv/data/sub /srv/slave/later /srv/whole/part
printf '[restore]\nallow = ["%s"]\n' "$from" >> /etc/cryopod/config.toml
mount -t tmpfs host /srv/data/sub
touch /srv/data/sub/file
on_failure() { cat /tmp/said; grep /srv /proc/self/mountinfo; find /var/lib/containers/storage/overlay-containers -name restore.log -exec grep Error {} +; }
host_is_whole() { [ -e /srv/data/sub/file ] && [ "$(grep -c ' /srv/data' /proc/self/mountinfo)" = 1 ]; }
no_runtime_mounts() { ! grep -E 'criu-root|/run/cryopod' /proc/self/mountinfo; }
arrives() { # CONTAINER: what the host mounts later
    mount -t tmpfs later /srv/slave/later && touch "/srv/slave/later/$1" &&
        podman exec "$1" test -e "/slave/later/$1" && umount /srv/slave/later
}
# CRIU mounts the second as a copy of a part of the first, and it came back writable.
volumes=(-v /srv/data:/data -v /srv/slave:/slave:rslave -v /srv/whole:/whole:ro -v /srv/whole/part:/part:ro)
read_only() { podman exec "$1" sh -c '! touch /whole/x && ! touch /part/x' 2> /dev/null; }
saved() { # CONTAINER: its images, and the container removed
    pod container checkpoint --keep "$1" > /dev/null
    cp -r "$(podman inspect -f '{{.StaticDir}}' "$1")/checkpoint" "$from/$1"
    podman rm -f -t 0 "$1" > /dev/null
}
rounds() { # NAME ARG...
    local name=$1 && shift
    start() { pod run -d --name "$@" > /dev/null 2> /tmp/said; }
    check "$name" start "$name" --network none "${volumes[@]}" "$@"
    wait_for lines "$name" 3
    check 'mounts arrive' arrives "$name"
    check 'checkpoint' pod container checkpoint "$name"
    check 'restore in place' pod container restore "$name"
    check 'volumes are read-only' read_only "$name"
    check 'the host is whole' host_is_whole
    check 'nothing of the runtime is mounted' no_runtime_mounts
    check 'mounts arrive after the restore' arrives "$name"
    check 'checkpoint and export' pod container checkpoint --export /tmp/c.tar "$name"
    podman rm -f -t 0 "$name" > /dev/null
    check 'import' pod container restore --import /tmp/c.tar
    check 'volumes are read-only after the import' read_only "$name"
    check 'the host is whole after the import' host_is_whole
    saved "$name"
    check 'copy' start "$name-copy" --network none "${volumes[@]}" --annotation "dev.cryopod.restore=$from/$name" "$@"
    check 'volumes of the copy are read-only' read_only "$name-copy"
    check 'the host is whole after the copy' host_is_whole
    check 'mounts arrive in the copy' arrives "$name-copy"
    podman rm -f -t 0 "$name-copy" > /dev/null
}
lines() { [ "$(printed "$1" | wc -l)" -ge "$2" ]; }
rounds plain localhost/busybox "${counter[@]}"
rounds gpu "${nodes[@]/#/--device=}" "${binds[@]/#/--volume=}" -e LD_LIBRARY_PATH=/cusim localhost/busybox /cusim/cusim-client
