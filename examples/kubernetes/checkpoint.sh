#!/bin/bash
# checkpoint.sh NODE NAMESPACE POD CONTAINER: asks the kubelet, through the API server, to checkpoint a container. The
# container keeps running. The kubelet writes the archive to /var/lib/kubelet/checkpoints on the node and answers with
# its path. The kubelet's feature gate ContainerCheckpoint is on by default since Kubernetes 1.30.
set -euo pipefail
[ $# = 4 ] || { echo "usage: $0 NODE NAMESPACE POD CONTAINER" >&2 && exit 2; }
kubectl create --raw "/api/v1/nodes/$1/proxy/checkpoint/$2/$3/$4" -f /dev/null

# Put the archive into a registry, on the node or wherever the archive is:
#   cryopod pack ARCHIVE -o docker://registry.example/team/server:checkpoint
# Then start as many copies as wanted: deployment.yaml. This works with every containerd.
# containerd 2.1 to 2.3 can also create a pod with that image and the same runtimeClassName, which is one restore.
# 2.3.4 and later 2.3 need enable_experimental_restore_via_create = true for it, as in containerd.toml.
