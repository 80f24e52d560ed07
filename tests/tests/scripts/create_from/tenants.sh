# tenants.sh LOW: two tenants of one host, each with a repository and a directory. Neither can name, find or time the
# other's checkpoint in the cache. Tenants are namespaces of containerd and of Kubernetes.
low=$1
mkimage
low_level "$low"
registry
from=/srv/checkpoints cache=/var/cache/cryopod at=127.0.0.1:5000
mkdir -p "$from/a" "$from/b"
cat > /etc/cryopod/config.toml << T
[runtime]
low_level = "$low"
[restore]
allow = [
  { from = "docker://$at/a", containerd = ["a"] },
  { from = "docker://$at/b", containerd = ["b"], kubernetes = ["b"] },
  { from = "docker://$at/p", variable = true },
  { from = "$from/a", containerd = ["a"], variable = true },
  { from = "$from/b", users = [1000], kubernetes = ["b"] },
  "$from/plain",
]
[cache]
insecure_registries = ["$at"]
T
on_failure() { cat /tmp/said; head -n 40 /tmp/own /tmp/there /tmp/none; cryopod cache ls; tail -n 5 /tmp/registry.log; }

pod run -d --name c1 --network none localhost/busybox "${counter[@]}" > /dev/null
wait_for counted c1 5
pod container checkpoint -e "$from/c1.tar" c1 > /dev/null
podman rm -f -t 0 c1 > /dev/null
cryopod pack "$from/c1.tar" -o "oci:$from/b/layout" -q
cryopod pack "$from/c1.tar" -o "oci-archive:$from/plain" -q
chmod -R go-w "$from"
cryopod push "oci:$from/b/layout" "$at/b/job:1" --tls-verify=false -q
cryopod push "oci:$from/b/layout" "$at/p/job:1" --tls-verify=false -q
digest=$(jq -r '.manifests[0].digest' "$from/b/layout/index.json")

# The command line of containerd's shim: its namespace is in the state's directory and in the bundle's.
root=$(podman image mount localhost/busybox)
n=0
as() { # NAMESPACE CHECKPOINT [jq FILTER]: a create that is refused before anything is made says why
    local bundle=/run/containerd/io.containerd.runtime.v2.task/$1/t$((n += 1))
    mkdir -p "$bundle"
    jq -n --arg root "$root" --arg from "$2" '{ociVersion: "1.0.2", root: {path: $root, readonly: true},
        process: {args: ["true"], cwd: "/", user: {uid: 0, gid: 0}, env: []}, linux: {namespaces: [{type: "mount"}, {type: "pid"}]},
        mounts: [{destination: "/proc", type: "proc", source: "proc"}], annotations: {"dev.cryopod.restore": $from}}' | jq "${3:-.}" > "$bundle/config.json"
    ${traced:+"${strace[@]}"} cryopod-runtime --root "/run/containerd/runc/$1" create --bundle "$bundle" "t$n" > /tmp/said 2>&1 < /dev/null
    local rc=$?
    cryopod-runtime --root "/run/containerd/runc/$1" delete --force "t$n" > /dev/null 2>&1 || true
    return $rc
}
not_allowed() { # NAME WANTED-RULE NAMESPACE CHECKPOINT [FILTER]
    if as "${@:3}"; then echo "$1: started" && exit 1; fi
    check "$1: not allowed" grep -qF 'that is not allowed' /tmp/said
    check "$1: with the rule that would allow it" grep -qF -- "$2" /tmp/said
}
# It gets past restore.allow; the bundle here is too poor for the restore itself.
allowed() { # NAME NAMESPACE CHECKPOINT [FILTER]
    as "${@:2}" || true
    if grep -qF 'that is not allowed' /tmp/said; then cat /tmp/said && echo "$1" && exit 1; fi
}
fetched() { grep -c '"GET /v2/[a-z/]*/\(manifests\|blobs\)/' /tmp/registry.log || true; }
entries() { cryopod cache ls | wc -l; }

pod_of() { printf '.annotations["io.kubernetes.cri.sandbox-namespace"] = "%s"' "$1"; }
by_variable='.process.env = ["CRYOPOD_RESTORE=" + .annotations["dev.cryopod.restore"]] | .annotations = {}'

before=$(fetched)
not_allowed 'the other repository' 'containerd = ["a"]' a "docker://$at/b/job@$digest"
not_allowed 'the other directory' 'containerd = ["a"]' a "oci:$from/b/layout"
not_allowed 'a pod of another namespace' 'kubernetes = ["a"]' k8s.io "docker://$at/b/job@$digest" "$(pod_of a)"
not_allowed 'a pod and the list without names' 'kubernetes = ["b"]' k8s.io "$from/plain" "$(pod_of b)"
not_allowed 'a pod without a namespace' 'kubernetes = ["NAMESPACE"]' k8s.io "docker://$at/b/job@$digest"
not_allowed 'who only says to be a pod' 'kubernetes = ["NAMESPACE"]' default "docker://$at/b/job@$digest" "$(pod_of b)"
not_allowed 'an unknown namespace and the list without names' 'containerd = ["c"]' c "$from/plain"
not_allowed 'a variable, which the image may have set' 'variable = true' b "docker://$at/b/job@$digest" "$by_variable"
check 'nobody asked the registry' test "$(fetched)" = "$before"
check 'the cache is empty' test "$(entries)" = 0
allowed 'a namespace of containerd' b "docker://$at/b/job@$digest"
check 'it was pulled' test "$(entries)" = 1
allowed 'a pod' k8s.io "docker://$at/b/job@$digest" "$(pod_of b)"
check 'it was there' test "$(entries)" = 1

# Now the cache has it. The other tenant's words for it: its own repository with that digest.
missing() { # CHECKPOINT: exactly what a digest gets that nobody has
    if as a "$1"; then exit 1; fi
    sed "s|${1##*@}|DIGEST|g; s|t$n|ID|g" /tmp/said
}
before=$(fetched)
check 'the digest in its own repository' test "$(missing "docker://$at/a/job@$digest" | tee /tmp/one)" = "$(missing "docker://$at/a/job@sha256:$(printf %064d 7)")"
check 'says that it is not in the registry' grep -qF 'not in the registry' /tmp/one
# Even a layout of its own whose manifest is a copy.
mkdir -p "$from/a/layout/blobs/sha256"
cp "$from/b/layout/oci-layout" "$from/b/layout/index.json" "$from/a/layout"
for blob in "${digest#*:}" "$(jq -r '.config.digest' "$from/b/layout/blobs/sha256/${digest#*:}" | cut -d : -f 2)"; do
    cp "$from/b/layout/blobs/sha256/$blob" "$from/a/layout/blobs/sha256"
done
if as a "oci:$from/a/layout"; then exit 1; fi
check 'a layout with the manifest alone' grep -qF 'is missing' /tmp/said
check 'the cache has nothing more' test "$(entries)" = 1

# What can be timed: the system calls that look for a checkpoint, in directories, cache, store and registry.
strace=(strace -f -qq -e trace=file,network -e signal=none -o /tmp/trace)
looked() { # NAMESPACE CHECKPOINT [FILTER]: each call and its path, without what differs between any two runs
    traced=1 as "$@" || true
    grep -F -e "$from" -e "$cache" -e /var/lib/cryopod/store -e 'htons(5000)' /tmp/trace |
        sed -E 's/^[0-9]+ +//; s/^connect.*/connect/; s/^([a-z0-9_]+)\([^"]*("[^"]*").*/\1 \2/; s/[0-9a-f]{32,}/HASH/g' || true
}
looked b "docker://$at/b/job@$digest" > /tmp/own
check "what is allowed is looked for" grep -qF "$cache/HASH" /tmp/own
none=sha256:$(printf %064d 7)
for other in "docker://$at/b/job@$digest" "docker://$at/b/job@$none" "oci:$from/b/layout" "oci:$from/b/none" "$from/plain" "$from/none"; do
    check "nobody looks for what is not allowed: $other" test "$(looked a "$other" | wc -l)" = 0
    check "nor for a pod" test "$(looked k8s.io "$other" "$(pod_of a)" | wc -l)" = 0
done
looked a "docker://$at/a/job@$digest" | sort > /tmp/there
looked a "docker://$at/a/job@$none" | sort > /tmp/none
check 'a digest that only the other tenant has is looked for' grep -qx connect /tmp/there
check 'as one that nobody has' diff /tmp/there /tmp/none

# Root's own engines: podman and docker have the list without names, the variable where the rule says so.
copy() { # NAME OPTION...
    pod run -d --name "$1" --network none "${@:2}" localhost/busybox true > /dev/null 2> /tmp/said
}
mkdir -p /etc/containers/containers.conf.d
echo -e '[engine]\nruntime_supports_json = ["crun", "runc", "cryopod-runtime"]' > /etc/containers/containers.conf.d/json.conf
check 'podman' copy mine --annotation "dev.cryopod.restore=$from/plain"
check 'it goes on' wait_for counted mine 6
podman rm -f -t 0 mine > /dev/null
check 'by the variable' copy mine -e "CRYOPOD_RESTORE=docker://$at/p/job@$digest"
podman rm -f -t 0 mine > /dev/null
# An image with a variable of its own.
podman import -q --change "ENV CRYOPOD_RESTORE=$from/plain" /usr/local/share/testbed/busybox.tar localhost/hostile > /dev/null
if pod run -d --name hostile --network none localhost/hostile true > /dev/null 2> /tmp/said; then exit 1; fi
check 'an image cannot ask for it' grep -qF 'variable = true' /tmp/said
podman rm -f -t 0 hostile > /dev/null
for pretend in io.kubernetes.cri.sandbox-namespace=b io.kubernetes.pod.namespace=b io.container.manager=cri-o; do
    if copy pretend --annotation "$pretend" --annotation "dev.cryopod.restore=docker://$at/b/job@$digest"; then exit 1; fi
    check "no pod by $pretend" grep -qF 'that is not allowed' /tmp/said
    podman rm -f -t 0 pretend > /dev/null
done

# A restore by the command line, from a directory that others can write to.
mkdir -p /srv/images && cp -r "$cache"/*/checkpoint/. /srv/images && chmod 777 /srv/images
restored() { cryopod-runtime restore --bundle "/run/containerd/io.containerd.runtime.v2.task/a/t1" --image-path /srv/images --work-path /tmp other > /tmp/said 2>&1; }
if restored; then exit 1; fi
check 'a directory that others can write to' grep -qF "/srv/images is not root's alone" /tmp/said
chmod 755 /srv/images && chmod 666 /srv/images/inventory.img
if restored; then exit 1; fi
check 'a file that others can write to' grep -qF "/srv/images/inventory.img is not root's alone" /tmp/said
chmod 644 /srv/images/inventory.img
restored || true
check "root's own gets further" sh -c "! grep -qF \"not root's alone\" /tmp/said"
