# preload_later.sh: GPU memory that is copied once its container goes on, or stays where it is. After job.sh.
# shellcheck shell=bash disable=SC2154
glibc_image
# Its memory is copied once it goes on, if the GPU has room for both; else while it works, and what has changed when it has
# stopped.
run_rootfs --mib 100 --chunk-mib 20 --gpus 0,1 --train-mib 30
id=$(pod inspect -f '{{.Id}}' job)
says() { grep -qE "process [0-9]+: $1" /tmp/dump.log; }
copied_later() { says '200 of 200 MiB of GPU memory are copied once it goes on'; }
# Not more than some ticks change; none may come meanwhile.
copied_first() { says '[0-9]{1,2} of 200 MiB of GPU memory are copied$'; }
later() { # WHAT: a checkpoint of the running container
    rm -rf /tmp/later /tmp/dump.log
    check "$1: checkpoint" does cryopod-runtime checkpoint --leave-running --image-path /tmp/later --work-path /tmp "$id"
    check "$1: it goes on" goes_on
    check "$1: verified" does cryopod verify /tmp/later
}
later 'copied later'
check 'copied later: said' copied_later
uuid=GPU-c0da0000-5130-4d00-8000-000000000000
reserve() { /opt/build/cusim-ctl --socket "$sim" reserve $uuid $(($1 << 20)) > /dev/null; }
reserve 3800
later 'no room for both'
check 'no room for both: copied first' copied_first
# The room goes while it has none of its memory, and comes again later.
reserve 0
set_switch slow-checkpoint=3000:1
rm -f /tmp/dump.log
(wait_for copied_later && reserve 3900 && sleep 4 && reserve 0) & room=$!
later 'the room goes'
wait $room
# What comes back from such a checkpoint is one moment of it.
check 'in an archive: checkpoint' does pod container checkpoint --leave-running --export /tmp/job.tar job
end
check 'in an archive: restore' does pod container restore --import /tmp/job.tar
check 'in an archive: it goes on' goes_on
id=$(pod inspect -f '{{.Id}}' job)
# Whoever holds its memory dies, at each step; the other one has it, too.
for who in cryopod-cuda-ag criu; do
    for step in lock checkpoint restore unlock; do
        switch=hang-$step
        if [ $step = lock ]; then switch=hang-lock-forever; fi
        set_switch "$switch:1"
        rm -rf /tmp/killed /tmp/dump.log
        does cryopod-runtime checkpoint --leave-running --image-path /tmp/killed --work-path /tmp "$id" & taking=$!
        wait_for hangs_or_ended "$switch" "$taking"
        pkill -KILL -x "$who" || true
        clear_switches
        wait $taking || true
        # What the driver holds at that moment needs another agent.
        does cryopod resume job || true
        check "$who is killed at $step: it goes on" goes_on
    done
done
# No GPU memory is left when it is to come back: it waits, and comes back when there is some.
check 'suspended, and then no memory is left' does sh -c "cryopod suspend job && /opt/build/cusim-ctl --socket '$sim' reserve $uuid $((4030 << 20)) > /dev/null"
check 'no memory: resume says so' refused 'memory' cryopod resume job
/opt/build/cusim-ctl --socket "$sim" reserve $uuid 0 > /dev/null
check 'memory again: resume' does cryopod resume job
check 'memory again: it goes on' goes_on
# The process dies while its memory is away.
check 'suspend it once more' does cryopod suspend job
check 'killed while suspended' does sh -c 'podman kill job && podman wait job'
check 'nothing is in use' used 'all(. == 0)'
end
check 'no operation is left' test -z "$(find /run/cryopod -mindepth 1 -maxdepth 1 -not -name suspended)"
