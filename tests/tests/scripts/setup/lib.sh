# lib.sh: docker's and containerd's daemons, which read daemon.json, and a systemctl that restarts them.
# shellcheck shell=bash
mkdir -p /etc/docker
printf '{\n  "iptables": false,\n  "ip6tables": false,\n  "bridge": "none",\n  "containerd": "/run/containerd/containerd.sock"\n}\n' \
    > /etc/docker/daemon.json
dockerd_up() {
    dockerd > /tmp/dockerd.log 2>&1 &
    echo $! > /tmp/dockerd.pid
    wait_for docker version > /dev/null 2>&1
}
# What systemd would do.
cat > /usr/local/bin/systemctl << 'SH'
#!/bin/sh
end() { kill "$1"; while kill -0 "$1" 2> /dev/null; do sleep 0.1; done; }
case $* in
    "cat containerd" | "cat docker") ;;
    "is-active --quiet containerd") pgrep -x containerd > /dev/null ;;
    "restart containerd")
        end "$(pgrep -o -x containerd)" # not a child that has yet to become a shim
        containerd >> /tmp/containerd.log 2>&1 &
        until ctr version > /dev/null 2>&1; do sleep 0.1; done
        ;;
    "restart docker")
        end "$(cat /tmp/dockerd.pid)"
        dockerd > /tmp/dockerd.log 2>&1 &
        echo $! > /tmp/dockerd.pid
        until docker version > /dev/null 2>&1; do sleep 0.1; done
        ;;
    *) exit 1 ;;
esac
SH
chmod +x /usr/local/bin/systemctl
# Whoever asks may have another root; services start with systemd's own.
systemd_outside() {
    mv /usr/local/bin/systemctl /tmp/restarts
    mkfifo /run/ask /run/answer
    while read -r words < /run/ask; do
        # shellcheck disable=SC2086
        /tmp/restarts $words && echo 0 > /run/answer || echo 1 > /run/answer
    done &
    printf '#!/bin/sh\necho "$*" > /run/ask\nread -r code < /run/answer\nexit $code\n' > /usr/local/bin/systemctl
    chmod +x /usr/local/bin/systemctl
}
docker_daemons() {
    containerd_up
    dockerd_up
}
