# failed.sh LOW: a restore by the low-level runtime's own command line: the bundle is edited when it works, and is what it was
# when it fails; the image directory is never changed.
low=$1
configure() { # [MAP]
    low_level "$low"
    [ $# = 0 ] || printf '[gpu]\nmap = "%s"\n' "$1" >> /etc/cryopod/config.toml
}
node() { rm -f "$1" && mkdir -p "${1%/*}" && mknod -m 660 "$1" c "$2" "$3"; }
configure
node /dev/nvidia0 10 229
node /dev/nvidia1 1 11
# Without a work path CRIU's log lies beside the images, as ever.
bundle /tmp/b sleep 1000
jq '.linux.devices += [{path: "/dev/nvidia0", type: "c", major: 10, minor: 229, fileMode: 432, uid: 0, gid: 0}]
    | .linux.resources.devices += [{allow: true, type: "c", major: 10, minor: 229, access: "rw"}]
    | .linux.namespaces |= map(select(.type != "network" and .type != "cgroup"))
    | .unknown = {kept: true}' /tmp/b/config.json > /tmp/b/new
mv /tmp/b/new /tmp/b/config.json
cd /tmp/b
images=images
[ "$low" = runc ] || images=/tmp/b/images # crun takes a relative path as one below the bundle: the same here
cryopod-runtime run -d --bundle /tmp/b raw > /dev/null 2>&1 < /dev/null
in_its_program() { grep -q sleep "/proc/$("$low" state raw | jq .pid)/comm"; }
wait_for in_its_program # `run` returns before runc's init has become the container's program
cryopod-runtime checkpoint --image-path "$images" raw > /tmp/said 2>&1 || { cat /tmp/said; tail -n 5 images/dump.log; exit 1; }
hash() { find images -name '*.img' -o -name '*.json' | sort | xargs sha256sum | sha256sum; }
images_before=$(hash)
spec_before=$(sha256sum < config.json)
configure /dev/nvidia0=/dev/nvidia1
mkdir /tmp/kept && mv images/pages-1.img /tmp/kept/
if cryopod-runtime restore -d --bundle /tmp/b --image-path "$images" raw > /tmp/said 2>&1 < /dev/null; then echo 'restored what is damaged'; exit 1; fi
grep -q 'the checkpoint is untouched' /tmp/said || { cat /tmp/said; exit 1; }
cp /tmp/kept/pages-1.img images/
[ "$(sha256sum < config.json)" = "$spec_before" ] && [ -z "$(ls -A /run/cryopod)" ] && [ -s images/restore.log ]
cryopod-runtime delete -f raw > /dev/null 2>&1 || true
rm images/restore.log
cryopod-runtime restore -d --bundle /tmp/b --image-path "$images" raw > /tmp/said 2>&1 < /dev/null ||
    { cat /tmp/said; tail -n 20 images/restore.log; exit 1; }
[ -s images/restore.log ]
[ "$(hash)" = "$images_before" ] && [ -z "$(ls -A /run/cryopod)" ]
jq -e '.unknown.kept and ([.linux.devices[] | [.path, .major, .minor, .fileMode]] == [["/dev/nvidia0", 1, 11, 432], ["/dev/nvidia1", 1, 11, 432]])
    and (.linux.resources.devices[-1] == {allow: true, type: "c", major: 1, minor: 11, access: "rw"})' config.json > /dev/null ||
    { jq -c .linux.devices,.linux.resources.devices config.json; exit 1; }
echo 'ok: by hand'
cryopod-runtime delete -f raw
