# upgrade.sh: checkpoints that the package of an earlier commit made are restored after an upgrade.
# shellcheck shell=bash
. /src/tests/packages/lib.sh
mkimage
export RUNTIME=/usr/bin/cryopod-runtime # an earlier commit may have no `cryopod setup`
install=(apt-get install -q=2 -y --no-install-recommends -o Dpkg::Options::=--force-confold)
"${install[@]}" /packages/old/cryopod_*.deb /packages/new/cryopod-criu_*.deb > /tmp/installed
version() { dpkg-query --show --showformat '${Version}' cryopod; }
old=$(version)
end_of_the_driver() { kill %?cusim-server && wait %?cusim-server 2> /dev/null || true; }
for low in "$crun" runc; do
    simulate "$low"
    run_job
    pod container checkpoint --export "/tmp/${low##*/}.tar.zst" job > /dev/null
    podman rm job > /dev/null
    end_of_the_driver
done
pod run -d --name still --network none localhost/busybox "${counter[@]}" > /dev/null
wait_for counted still 3
"${install[@]}" /packages/new/cryopod_*.deb > /tmp/installed
check 'a newer version' dpkg --compare-versions "$(version)" gt "$old"
check 'the configuration stays' grep -q 'low_level = "runc"' /etc/cryopod/config.toml
last=$(count still)
check 'a container runs on' wait_for counted still $((last + 5))
podman rm --force --time 0 still > /dev/null
for low in "$crun" runc; do
    simulate "$low"
    check "$low: the archive of $old is whole" cryopod verify -q "/tmp/${low##*/}.tar.zst"
    pod container restore --import "/tmp/${low##*/}.tar.zst" > /dev/null
    check "$low: it is restored with $(version)" goes_on job
    podman rm --force --time 0 job > /dev/null
    end_of_the_driver
done
