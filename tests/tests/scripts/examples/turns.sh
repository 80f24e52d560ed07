# shellcheck shell=bash disable=SC2154
# turns.sh: the example, with the simulated driver. After job.sh.
glibc_image
printf '[suspend]\nkeep = 4\n' >> /etc/cryopod/config.toml
gpus=(0)
mapfile -t options < <(given)
IMAGE=localhost/glibc COMMAND='/cusim/cusim-client --mib 600 --chunk-mib 20 --gpus 0' TURNS=2 \
    bash /src/examples/podman/turns.sh "${options[@]}" | tee /tmp/turns
check 'each had its turns' test "$(grep -c '^turn .* answers' /tmp/turns)" = 4
# The weights do not change.
last() { sed -nE "s/^$1: suspended .*, (.*) moved$/\1/p" /tmp/turns | tail -n 1; }
for name in one two; do check "$name: little was moved at last" grep -qE '^([0-9]|1[0-9])\.?[0-9]* (MiB|KiB|B)$' <<< "$(last $name)"; done
check 'nothing is left' test -z "$(pod ps -aq)"
