# bundles.sh LOW: containers with a GPU node, run without an engine: a mount whose destination passes through a link of the
# root, and a user namespace. Checkpoint, delete, restore, and each goes on.
low=$1
low_level "$low"
fake_gpu_nodes
mkdir -p /srv/a /srv/b
echo a > /srv/a/file
echo b > /srv/b/file
cr() { cryopod-runtime --root /run/bundles "$@"; }

make() { # NAME JQ: a bundle that counts, and shows what is mounted
    bundle "/tmp/$1" sh /count
    cat > "/tmp/$1/rootfs/count" <<'COUNT'
i=0
while :; do i=$((i + 1)); echo "$i $(cat /run/secrets/token/file 2> /dev/null)"; sleep 0.1; done
COUNT
    jq '.linux.devices += [{path: "/dev/nvidia0", type: "c", major: 195, minor: 0, fileMode: 438, uid: 0, gid: 0}]
        | .linux.cgroupsPath = "/bundles/'"$1"'" | '"$2" "/tmp/$1/config.json" > "/tmp/$1/new"
    mv "/tmp/$1/new" "/tmp/$1/config.json"
}
link() { # NAME TARGET: /var/run of the root leads to TARGET
    mkdir -p "/tmp/$1/rootfs/var" "/tmp/$1/rootfs/run"
    rm -rf "/tmp/$1/rootfs/var/run"
    ln -s "$2" "/tmp/$1/rootfs/var/run"
}
count() { tail -n 1 "/tmp/$1.out" | cut -d' ' -f1; }
counted() { [ "$(count "$1" || true)" -ge "$2" ] 2> /dev/null; }
goes_through() { # NAME LABEL [WANT]: WANT is what the mount shows in the end
    local name=$1 last
    cr run --detach --bundle "/tmp/$name" "$name" < /dev/null > >(cat > "/tmp/$name.out") 2> >(cat > "/tmp/$name.err")
    wait_for counted "$name" 3 || { cat "/tmp/$name.err" && exit 1; }
    mkdir -p "/tmp/$name.work"
    cr checkpoint --image-path "/tmp/$name.images" --work-path "/tmp/$name.work" "$name" > /tmp/said 2>&1 ||
        { cat /tmp/said && exit 1; }
    cr delete --force "$name" > /dev/null 2>&1 || true
    last=$(count "$name")
    if [ -n "${between:-}" ]; then "$between" "/tmp/$name"; fi
    chmod 700 "/tmp/$name.images"
    rm "/tmp/$name.out" # what the first one's cat still writes is not of the restored one
    cr restore --detach --bundle "/tmp/$name" --image-path "/tmp/$name.images" --work-path "/tmp/$name.work" "$name" \
        < /dev/null > >(cat > "/tmp/$name.out") 2> >(cat > "/tmp/$name.err") ||
        { cat "/tmp/$name.err"; grep 'Error (' "/tmp/$name.work/restore.log"; exit 1; }
    wait_for counted "$name" $((last + 3))
    [ "$(tail -n 1 "/tmp/$name.out" | cut -d' ' -f2)" = "${3:-}" ] || { tail -n 2 "/tmp/$name.out" && exit 1; }
    [ "$(stat -c %a "/tmp/$name.images")" = 700 ] && [ -z "$(ls -A /run/cryopod)" ]
    cr delete --force "$name"
    echo "ok: $2"
}
secret='.mounts += [{destination: "/var/run/secrets/token", type: "bind", source: "/srv/a", options: ["rbind", "ro"]}]'
make absolute "$secret" && link absolute /run
goes_through absolute 'a destination through an absolute link' a
make relative "$secret" && link relative ../run
goes_through relative 'a destination through a relative link' a
make changed "$secret" && link changed /run
other_source() { sed -i 's|/srv/a|/srv/b|' "$1/config.json"; }
between=other_source
goes_through changed 'another source behind the link at the restore' b
between=
make user '.linux.namespaces += [{type: "user"}]
    | .linux.uidMappings = [{containerID: 0, hostID: 100000, size: 65536}] | .linux.gidMappings = .linux.uidMappings'
chown -R 100000:100000 /tmp/user/rootfs
chmod 755 /tmp/user
goes_through user 'a user namespace'
