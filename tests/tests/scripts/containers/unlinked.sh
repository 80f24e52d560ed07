# unlinked.sh LOW: a process has a file of a volume open that has lost the name under which it was opened, and has another.
# CRIU's link to it is for one restore; here each copy of the checkpoint finds it.
low=$1
mkimage
low_level "$low"
fake_gpu_nodes
mkdir -p /srv/checkpoints /srv/volume
printf '[restore]\nallow = ["/srv/checkpoints"]\n' >> /etc/cryopod/config.toml
on_failure() { cat /tmp/said; ls -la /srv/volume; }
# shellcheck disable=SC2016 # for the container's shell
command=(sh -c 'exec 3> /volume/old; ln /volume/old /volume/new; rm /volume/old; i=0; while :; do echo $i; echo $i >&3; i=$((i + 1)); sleep 0.1; done')
start() { # NAME ARG...
    pod run -d --name "$1" --network none --device /dev/nvidia0 -v /srv/volume:/volume "${@:2}" localhost/busybox "${command[@]}" > /dev/null 2> /tmp/said
}
grown() { [ "$(stat -c %s /srv/volume/new)" -gt "$(stat -c %s /tmp/content)" ]; }
start c1
wait_for counted c1 3
if pod container checkpoint --leave-running --export /srv/checkpoints/no.tar c1 > /tmp/said 2>&1; then echo 'FAILED: left running, and CRIU has removed its link' && exit 1; fi
check 'left running: refused' says /tmp/said 'has /volume/old open, which is deleted and has another name'
check 'and it goes on' wait_for counted c1 $(($(count c1) + 3))
pod container checkpoint --export /srv/checkpoints/c1.tar c1 > /dev/null
podman rm -f -t 0 c1 > /dev/null
chmod go-w /srv/checkpoints/c1.tar
for n in 1 2 3; do
    # CRIU compares the size: what one copy has written is taken back before the next.
    cp /srv/volume/new /tmp/content
    check "copy $n" start "copy$n" --annotation dev.cryopod.restore=/srv/checkpoints/c1.tar
    check 'it goes on' wait_for counted "copy$n" 6
    check 'it writes to the file' wait_for grown
    podman rm -f -t 0 "copy$n" > /dev/null
    cat /tmp/content > /srv/volume/new
done
