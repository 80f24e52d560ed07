# not_copied.sh: of a container that goes on, only those chunks leave the GPU that the parent checkpoint does not have. After
# job.sh.
# shellcheck shell=bash disable=SC2154,SC2034
glibc_image
extra=(--annotation dev.cryopod.parent=auto)
run_rootfs --mib 200 --chunk-mib 20 --gpus 0,1 --train-mib 10
id=$(pod inspect -f '{{.Id}}' job)
static=$(pod inspect -f '{{.StaticDir}}' job)
# podman's wait may return before podman knows that it has ended.
has_ended() { [ "$(podman inspect -f '{{.State.Status}}' job)" = exited ]; }
killed() { podman kill job > /dev/null && podman wait job > /dev/null && wait_for has_ended; }
take() { # NAME
    check "$1: checkpoint" does cryopod-runtime checkpoint --leave-running --image-path "/tmp/$1" --work-path /tmp "$id"
    check "$1: it goes on" goes_on
    check "$1: verified" does cryopod verify "/tmp/$1"
}
facts() { jq -e ".gpu.vram | $2" "/tmp/$1/cryopod.json"; }
take first
check 'first: all is copied' facts first '(.not_copied // 0) < .chunks / 4 and .parent == 0'
take second
check 'second: most stays on the GPU' facts second '.not_copied == .zero + .parent and .not_copied > .chunks * 3 / 4'
take third
check 'third: most stays on the GPU' facts third '.not_copied == .zero + .parent and .not_copied > .chunks * 3 / 4'
# What cannot be told is copied: the GPU makes no digests, or the writer does not say in time what it needs.
/opt/build/cusim-ctl --socket "$sim" set fail-launch > /dev/null
take fourth
/opt/build/cusim-ctl --socket "$sim" clear > /dev/null
check 'fourth: all is copied' facts fourth '(.not_copied // 0) == 0 and .parent > .chunks / 2'
# Ten seconds are the writer's, from when the GPU has made the digests.
writer='^/proc/self/exe --vram-worker'
set_switch hang-launch:1
(wait_for hangs_at hang-launch && wait_for pkill -STOP -f "$writer"; clear_switches; sleep 14; pkill -CONT -f "$writer") & late=$!
take fifth
wait $late
check 'fifth: all is copied' facts fifth '.parent > .chunks / 2'
killed
for name in fifth fourth third second first; do
    rm -rf "$static/checkpoint" && ln -s "/tmp/$name" "$static/checkpoint"
    check "$name: restore" does pod container restore --keep job
    check "$name: it goes on with the right sums" goes_on
    killed
done
rm "$static/checkpoint"
end
