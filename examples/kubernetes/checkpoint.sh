#!/bin/bash
# checkpoint.sh NODE NAMESPACE POD CONTAINER: has the kubelet checkpoint a container, through the API server. The
# container goes on running. The archive is on the node, in /var/lib/kubelet/checkpoints; the path is printed.
# The kubelet's feature gate ContainerCheckpoint is on by default since Kubernetes 1.30.
set -euo pipefail
[ $# = 4 ] || { echo "usage: $0 NODE NAMESPACE POD CONTAINER" >&2 && exit 2; }
kubectl create --raw "/api/v1/nodes/$1/proxy/checkpoint/$2/$3/$4" -f /dev/null

# To restore, make an image of it, on the node or wherever the archive is:
#   cryopod convert ARCHIVE -o docker://registry.example/train:checkpoint
# and create a pod with that image and the same runtimeClassName (containerd 2.1 to 2.3;
# from 2.3.4 on with enable_experimental_restore_via_create = true, as in containerd.toml).
