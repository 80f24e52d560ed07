# ways.sh LOW: the other ways in which a node comes into a container. X is 10:229, Y is 1:11 (kmsg).
low=$1
mkimage
configure() { # [MAP]
    low_level "$low"
    [ $# = 0 ] || printf '[gpu]\nmap = "%s"\n' "$1" >> /etc/cryopod/config.toml
}
node() { rm -f "$1" && mkdir -p "${1%/*}" && mknod -m 660 "$1" c "$2" "$3"; }
is() { # PATH MAJOR:MINOR in hex, inside
    local got && got=$(pod exec c1 stat -L -c %t:%T "$1")
    [ "$got" = "$2" ] || { echo "$1 is $got, not $2"; exit 1; }
}
moved() { # MAP [COMMAND...]: the container c1 once round, with this map, and the command between
    wait_for counted c1 3
    pod container checkpoint --export /tmp/c1.tar c1 > /dev/null
    before=$(count c1)
    pod rm -f -t 0 c1 > /dev/null
    configure "$1"
    "${@:2}"
    pod container restore --import /tmp/c1.tar > /tmp/said 2>&1 || { cat /tmp/said; exit 1; }
    wait_for counted c1 $((before + 3))
    configure
    [ -z "$(ls -A /run/cryopod)" ]
}
configure

# A bind-mounted node: another source, and the native name beside it.
node /dev/nvidia0 10 229
node /dev/nvidia1 1 11
chown 0:5 /dev/nvidia1
pod run -d --name c1 --network none --cap-add SYSLOG -v /dev/nvidia0:/dev/nvidia0 --device-cgroup-rule 'c 10:229 rwm' \
    localhost/busybox "${counter[@]}" > /dev/null
moved /dev/nvidia0=/dev/nvidia1
is /dev/nvidia0 1:b
is /dev/nvidia1 1:b
[ "$(pod exec c1 stat -c %a:%g /dev/nvidia1)" = 660:5 ]
pod exec c1 sh -c 'exec 3<> /dev/nvidia1 4<> /dev/nvidia0'
echo 'ok: a bind-mounted node'
pod rm -f -t 0 c1 > /dev/null
