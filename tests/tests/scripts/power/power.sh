# power.sh LOW SEED CUTS [OPERATION]: power cuts at random points; power.py tells what must hold after each. /power/empty.img is an empty ext4.
# shellcheck disable=SC2154
low=$1 seed=$2 cuts=$3 && shift 3
mkdir -p /srv/out /cut
mkimage
simulate "$low" --proc-root /run/simulated
mount --bind /run/simulated/driver /proc/driver
cat >> /etc/cryopod/config.toml << 'END'
[restore]
allow = [{ from = "/cut", variable = true }]
[store]
path = "/cut/store"
use = "on"
clean = true
grace_s = 0
used_in = ["/cut"]
[cache]
path = "/cut/cache"
END
mkdir -p /etc/containers/containers.conf.d
echo -e '[engine]\nruntime_supports_json = ["crun", "runc", "cryopod-runtime"]' > /etc/containers/containers.conf.d/json.conf
mknod /dev/loop-control c 10 237 2> /dev/null || true
for n in 0 1 2 3 4 5 6 7; do mknod /dev/loop$n b 7 $n 2> /dev/null || true; done
python3 /src/tests/tests/scripts/power/power.py "$seed" "$cuts" "$@"
