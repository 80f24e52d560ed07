# check.sh: `cryopod check` where a checkpoint can work, and where this and that is missing.
status() { jq -r --arg n "$1" '.checks[] | select(.name == $n) | .status' /tmp/check.json; }
expect() { # CODE NAME STATUS [REMEDY]
    local code=0
    cryopod check --json > /tmp/check.json || code=$?
    [ "$code" = "$1" ] || { echo "exit code $code"; cat /tmp/check.json; exit 1; }
    [ "$(jq .ok /tmp/check.json)" = "$([ "$1" = 0 ] && echo true || echo false)" ]
    [ "$(status "$2")" = "$3" ] || { echo "$2: not $3"; cat /tmp/check.json; exit 1; }
    [ -z "${4:-}" ] || jq -r --arg n "$2" '.checks[] | select(.name == $n) | .remedy' /tmp/check.json | grep -qF -- "$4"
}
low_level crun
expect 0 criu ok
for name in user configuration kernel 'low-level runtime' libcriu cryopod-runtime engines; do expect 0 "$name" ok; done
expect 0 'NVIDIA driver' note
cryopod check > /tmp/table
grep -q '^ok *criu *4\.' /tmp/table
grep -q 'A container can be checkpointed on this host.' /tmp/table

mv /usr/sbin/criu /usr/sbin/criu.away
expect 1 criu missing 'install the criu package'
mv /usr/sbin/criu.away /usr/sbin/criu

library=$(ls /usr/lib/*/libcriu.so.2)
real=$(readlink -f "$library")
mv "$real" /tmp/libcriu.away && ldconfig
expect 1 libcriu missing libcriu2
low_level runc
expect 0 'low-level runtime' ok
mv /tmp/libcriu.away "$real" && ldconfig

low_level no-such-runtime
expect 1 'low-level runtime' missing
echo 'low_levle = 1' > /etc/cryopod/config.toml
expect 1 configuration missing
rm /etc/cryopod/config.toml
expect 0 configuration ok
code=0
setpriv --reuid 65534 --clear-groups cryopod check > /tmp/table || code=$?
[ $code = 1 ]
grep -q '^missing *user *not root' /tmp/table
echo checked
