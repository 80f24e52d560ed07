# podman.sh: archives of a GPU container under podman: every kind of them, restored by podman, read by others.
mkimage
simulate crun
run_job --mib 40 --procs 2 --gpus 0,1
before=$(sum job)

# podman's own export, as an image
pod container checkpoint --export /tmp/job.tar.zst job > /dev/null
pod rm -f -t 0 job > /dev/null
check 'podman -> layout' cryopod pack -q /tmp/job.tar.zst -o oci:/tmp/layout
check 'podman -> archive' cryopod pack -q /tmp/job.tar.zst -o oci-archive:/tmp/job.oci.tar --name localhost/job:1
check 'verify: the layout' cryopod verify -q oci:/tmp/layout
check 'verify: the archive' cryopod verify -q oci-archive:/tmp/job.oci.tar

id=$(podman pull -q oci:/tmp/layout | tail -n 1)
pod container restore "$id" > /dev/null
check 'podman pull oci: and restore: the sum goes on' goes_on job
check 'podman pull oci: and restore: the same sum' test "$(sum job)" = "$before"
pod rm -f -t 0 job > /dev/null

podman load -q -i /tmp/job.oci.tar > /tmp/said
check 'podman load: by its name' says /tmp/said localhost/job:1
pod container restore localhost/job:1 > /dev/null
check 'podman load and restore: the sum goes on' goes_on job
pod rm -f -t 0 job > /dev/null
podman rmi -f localhost/job:1 "$id" > /dev/null 2>&1 || true

# and back: podman imports what comes of our image
check 'layout -> podman' cryopod pack -q oci:/tmp/layout -o /tmp/back.tar.zst
pod container restore --import /tmp/back.tar.zst > /dev/null
check 'layout -> podman: the sum goes on' goes_on job
check 'layout -> podman: the same sum' test "$(sum job)" = "$before"

# export and import by our own command
check 'export: to a layout' cryopod export job -e podman -o oci:/tmp/exported --leave-running -q
check 'export --leave-running: the sum goes on' goes_on job
check 'export: verified' cryopod verify -q oci:/tmp/exported
find "$(podman inspect -f '{{.StaticDir}}' job)" -name '.cryopod-*' -o -name cryopod-away > /tmp/left
check 'export: nothing is left in the bundle' sh -c 'cat /tmp/left; test ! -s /tmp/left'
cryopod export job -e podman -o /tmp/exported.tar.zst -q --timings > /tmp/said
check 'export: to a file' cryopod verify -q /tmp/exported.tar.zst
check 'export: the large files did not go through podman' says /tmp/said "podman's file, without the large files"
pod container restore job > /dev/null
check "export: podman's own checkpoint is whole, too" goes_on job
# podman fails after the checkpoint, when the container is gone.
mkdir -p /tmp/broken
touch /tmp/broken/once
printf '#!/bin/sh\ncase "$*" in *" delete "*|"delete "*) rm /tmp/broken/once 2> /dev/null && exit 1 ;; esac\nexec /opt/build/cryopod-runtime "$@"\n' > /tmp/broken/runtime
chmod 755 /tmp/broken/runtime
mount --bind /tmp/broken/runtime /usr/local/bin/cryopod-runtime
if cryopod export job -e podman -o /tmp/never.tar.zst -q > /tmp/said 2>&1; then echo 'exported without the delete' && exit 1; fi
# The clean-up by the container's monitor may run it. It is what makes the container one that can be restored.
wait_for umount /usr/local/bin/cryopod-runtime
exited() { [ "$(podman inspect -f '{{.State.Status}}' job)" = exited ]; }
wait_for exited
check 'export: podman fails when the container is gone: the way on is told' says /tmp/said 'go on with: podman container restore job'
pod container restore job > /dev/null
check 'export: and it comes back' goes_on job
cryopod export job -e podman -o /tmp/exported.tar.zst --replace -q
pod rm -f -t 0 job > /dev/null
if cryopod export job -e podman -o /tmp/never.tar.zst > /tmp/said 2>&1; then echo 'exported what is not there' && exit 1; fi
check 'export: podman says what is wrong' says /tmp/said 'podman container inspect.*no such container .?job'
check 'export: nothing is left' test -z "$(find /tmp -maxdepth 1 -name 'never*' -o -maxdepth 1 -name '.cryopod-*')"

# an import that is killed, and the next one, which finds what it left
left() { find /var/lib/containers/storage -maxdepth 1 -name '.cryopod-*'; }
began() { [ -n "$(left)" ]; }
nobody() { ! grep -aqs 'cryopod-scratc[h]' /proc/[0-9]*/cmdline; }
for _ in 1 2 3 4 5; do
    cryopod import /tmp/exported.tar.zst -e podman --restore -q > /dev/null 2>&1 &
    pid=$!
    until began || ! kill -0 $pid 2> /dev/null; do sleep 0.01; done
    kill -KILL $pid 2> /dev/null || true
    wait $pid 2> /dev/null || true
    wait_for nobody
    pod rm -f -t 0 job > /dev/null 2>&1 || true
    if began; then break; fi # else it was at its end already
done
check 'import: what a killed one has left' test -n "$(left)"
cryopod import /tmp/exported.tar.zst -e podman --restore -q --timings > /tmp/said
check 'import --restore: the sum goes on' goes_on job
check 'import --restore: the large files did not go through podman' sh -c '! grep -q "file" /tmp/said'
check 'import --restore: nothing is left' test -z "$(ls -A /run/cryopod/away)$(find /var/lib/containers/storage -maxdepth 1 -name '.cryopod-*')"
pod rm -f -t 0 job > /dev/null
cryopod import oci:/tmp/exported -e podman --name localhost/imported:1 -q > /dev/null
pod container restore localhost/imported:1 > /dev/null
check 'import: the image is restored' goes_on job
pod rm -f -t 0 job > /dev/null

# CRIU's images alone
cryopod unpack --images-only -q oci:/tmp/layout -o /tmp/images
check 'images alone: verified' cryopod verify -q /tmp/images
check 'images alone: inspect' sh -c 'cryopod inspect --json /tmp/images | jq -e ".gpu.vram_bytes > 80000000"'
check 'images alone -> layout' cryopod pack -q /tmp/images -o oci:/tmp/bare
check 'images alone: the layout is whole' cryopod verify -q oci:/tmp/bare
for source in /tmp/images oci:/tmp/bare; do
    if cryopod pack -q "$source" -o /tmp/never.tar > /tmp/said 2>&1; then echo "made podman's file of images alone" && exit 1; fi
    check "$source -> podman's file: refused, and why" says /tmp/said 'has no config.dump.*unpack --images-only'
    if cryopod import -q "$source" -e podman > /tmp/said 2>&1; then echo "imported images alone" && exit 1; fi
    check "$source -> podman: refused, and why" says /tmp/said 'without config.dump'
done
check 'images alone: nothing is left' test ! -e /tmp/never.tar

# others read it
for source in /tmp/job.tar.zst oci:/tmp/layout oci-archive:/tmp/job.oci.tar /tmp/back.tar.zst; do
    cryopod inspect --json "$source" > /tmp/facts
    check "inspect $source" jq -e '.container.engine == "podman" and .container.name == "job" and .gpu.vram_bytes > 80000000
        and (.gpu.processes | length == 2 and all(.vram_bytes > 40000000)) and (.criu.processes | length >= 3)
        and .criu.dump.frozen_us > 0 and .criu.plugins == ["cryopod_nvidia"] and .metadata.low_level == "crun"' /tmp/facts
done
cryopod inspect oci:/tmp/layout
digest=$(jq -r '.manifests[0].digest' /tmp/layout/index.json)
skopeo copy -q --preserve-digests oci:/tmp/layout dir:/tmp/directory
skopeo copy -q --preserve-digests dir:/tmp/directory oci:/tmp/again:job
check 'skopeo: to a directory and back, the same digest' test "$(jq -r '.manifests[0].digest' /tmp/again/index.json)" = "$digest"
check 'skopeo: the same image' cryopod verify -q oci:/tmp/again:job
for file in /tmp/job.tar.zst /tmp/back.tar.zst /tmp/exported.tar.zst; do
    checkpointctl show "$file" > /tmp/said 2>&1 || { cat /tmp/said; exit 1; }
    check "checkpointctl show $file" says /tmp/said 'job .*busybox.*Podman'
    checkpointctl inspect --ps-tree "$file" > /tmp/said 2>&1 || { cat /tmp/said; exit 1; }
    check "checkpointctl inspect $file: the processes" says /tmp/said '\[2\]  cusim-client$'
    checkpointctl inspect --all "$file" > /tmp/said 2>&1 || { cat /tmp/said; exit 1; }
    check "checkpointctl inspect $file: their files" says /tmp/said '\[REG 0\]  /dev/null$'
    # From CRIU 4.2 on a pagemap has the number of its pages in another field, and checkpointctl 1.3 finds no memory:
    # blanks in place of the command line, in stock podman's files, too.
    line='/cusim/cusim-client --mib 40 --procs 2'
    if criu_from 4.2; then line='^ *$'; fi
    sed -n 's/.*\[1\]  //p' /tmp/said | head -n 1 > /tmp/line
    check "checkpointctl inspect $file: the command line" says /tmp/line "$line"
done
