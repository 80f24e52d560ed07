# upgrade.sh LOW: a package upgrade replaces cryopod's program while an operation is under way. A program in CRIU's place does
# so whenever it is called, the first time for CRIU's version.
low=$1
mkimage
low_level "$low"
fake_gpu_nodes
mkdir -p /opt/old /opt/upgrade
cat > /opt/upgrade/criu << 'CRIU'
#!/bin/bash
{ # CRIU's own root at a restore has none of it
    cp /usr/local/bin/cryopod-runtime /opt/old/new.$$ && mv /opt/old/new.$$ /opt/old/cryopod-runtime # it may be called twice at once
    echo x >> /opt/upgrade/replaced
} 2> /dev/null
exec /usr/sbin/criu "$@"
CRIU
chmod 755 /opt/upgrade/criu
printf '[criu]\nprogram = "/opt/upgrade/criu"\n' >> /etc/cryopod/config.toml
on_failure() { cat /tmp/said; }
replaced() { [ "$(wc -l < /opt/upgrade/replaced)" -ge "$1" ] && rm /opt/upgrade/replaced; }
export RUNTIME=/opt/old/cryopod-runtime
cp /usr/local/bin/cryopod-runtime /opt/old/
pod run -d --name c1 --network none --device /dev/nvidia0 localhost/busybox "${counter[@]}" > /dev/null
wait_for counted c1 3
quiet() { "$@" > /tmp/said 2>&1; }
check 'checkpoint' quiet pod container checkpoint --export /tmp/c.tar c1
check 'it was replaced meanwhile' replaced 1
podman rm -f -t 0 c1 > /dev/null
check 'restore' quiet pod container restore --import /tmp/c.tar
check 'it was replaced meanwhile' replaced 1
wait_for counted c1 6
