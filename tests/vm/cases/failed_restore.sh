# failed_restore.sh LOW: what tests/tests/scripts/containers/failed_restore.sh does, with a firewall in the kernel: CRIU locks the
# network with it, and a restore that fails leaves none of its rules. (Under runc CRIU makes none here: it is told to leave the
# network namespace out.)
# runtimes: crun
fake_gpu_nodes() { mknod -m 666 /dev/nvidia0 c 195 0; }
trap 'rm -f /dev/nvidia0' EXIT
iptables-save > /dev/null && nft list ruleset > /dev/null
. /src/tests/tests/scripts/containers/failed_restore.sh
[ -z "$network" ] # or CRIU was told to leave the firewall alone
grep -qE '(iptables|nft)' /tmp/i/dump.log || { echo "CRIU has not locked the network"; grep -i lock /tmp/i/dump.log; exit 1; }
