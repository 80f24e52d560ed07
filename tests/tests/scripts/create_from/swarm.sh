# swarm.sh: a service whose replicas are copies of one checkpoint in a registry, on a swarm of three nodes.
registry 10.9.0.254
at=10.9.0.254:5000/team/counter
cat > /etc/cryopod/config.toml << 'T'
[runtime]
low_level = "runc"
[restore]
allow = [{ from = "docker://10.9.0.254:5000/team", variable = true }]
[cache]
insecure_registries = ["10.9.0.254:5000"]
T
on_failure() {
    on 1 service ps --no-trunc warm
    on 1 node ls
    grep -hiE 'level=(error|warn)' /tmp/node*.log | tail -n 15
}
swarm

# ---- the one warm container ----
on 1 run -d --name first --network host busybox "${counter[@]}" > /dev/null
number() { on "$1" logs "$2" 2> /dev/null | sed -n "$3p"; } # NODE CONTAINER LINE
beyond() { local last && last=$(number "$1" "$2" '$') && [ "${last:-0}" -gt "$3" ]; }
wait_for beyond 1 first 20
check 'checkpoint' on 1 checkpoint create --checkpoint-dir /var/cache first warm
on 1 rm -f first > /dev/null
check 'pack' inside 1 cryopod pack /var/cache/warm -o oci:/var/cache/layout -q
check 'push' inside 1 cryopod push oci:/var/cache/layout "$at:1" --tls-verify=false -q
oci=application/vnd.oci.image.manifest.v1+json
digest=$(curl -sfI -H "Accept: $oci" "http://${at%%/*}/v2/team/counter/manifests/1" |
    tr -d '\r' | awk 'tolower($1) == "docker-content-digest:" {print $2}')

# ---- a service ----
all_warm() { # NODE...: each copy began where the checkpoint ended, and goes on
    local n copy
    for n; do
        for copy in $(replicas "$n"); do
            wait_for beyond "$n" "$copy" 21
            [ "$(number "$n" "$copy" 1)" -ge 20 ] || { echo "node $n, $copy: began anew" && return 1; }
        done
    done
}
fetched() { grep -c '"GET /v2/[a-z/]*/blobs/' /tmp/registry.log || true; }
check 'a service of 12' on 1 service create -d -q --name warm --network host --no-resolve-image --replicas 12 \
    --restart-delay 1s --env "CRYOPOD_RESTORE=docker://$at@$digest" busybox "${counter[@]}"
check '12 run' wait_for running 12 1 2 3
check 'all are warm' all_warm 1 2 3
for n in 1 2 3; do
    check "node $n has copies" test "$(replicas $n | wc -l)" -ge 2
    check "node $n has the checkpoint once" test "$(inside $n cryopod cache ls | wc -l)" = 1
done
blobs=$(curl -sf -H "Accept: $oci" "http://${at%%/*}/v2/team/counter/manifests/1" | jq '[.config, .layers[]] | length')
once=$((3 * blobs))
fetched_once() { [ "$(fetched)" = $once ]; } # the registry notes a request once it has answered
check 'each node fetched each blob once' wait_for fetched_once
on 1 service scale -d warm=3 > /dev/null
check 'down to 3' wait_for running 3 1 2 3
on 1 service scale -d warm=12 > /dev/null
check 'up to 12' wait_for running 12 1 2 3
check 'all are warm' all_warm 1 2 3
check 'no node fetched it again' test "$(fetched)" = "$once"

kill -KILL "${nodes[3]}"
check 'the others take over' wait_for running 12 1 2
check 'all are warm' all_warm 1 2
check 'the service is removed' on 1 service rm warm
check 'none runs' wait_for running 0 1 2
nothing_left() { [ -z "$(inside "$1" ls -A /run/cryopod)" ] && [ -z "$(inside "$1" runc --root /run/docker/runtime-runc/moby list -q)" ]; }
for n in 1 2; do check "nothing is left on node $n" wait_for nothing_left $n; done
