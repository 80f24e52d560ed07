# lib.sh: containers that work against cryopod while it checkpoints, suspends and restores them. What becomes of each
# operation is not of interest; the host's files are, and what is in the archives.
# shellcheck shell=bash

secret=$(od -An -tx1 -N16 /dev/urandom | tr -d ' \n')
echo "$secret" > /etc/canary
echo "$secret" > /srv/canary

# What runs beside the workload: names that change what they are, names and processes that speak to terminals, mounts over
# the root, an overlay whose upper directory is called /etc.
# shellcheck disable=SC2016
attack='
w=/w; mkdir -p $w
turn() {
    ln -sfn /etc/canary $w/x; ln -sfn /etc $w/d; rm -f $w/x $w/d
    mkfifo $w/x; mkdir $w/d; rm -f $w/x; rmdir $w/d
    echo mine > $w/x; echo mine > "$w/$(printf "\033]0;owned\007\033[2J")"; rm -f $w/x
    printf "\033[2Jowned" > /proc/self/comm
    touch $w/.wh..wh..opq $w/.wh.x
} 2> /dev/null
over() {
    mount -t tmpfs t /t && mkdir -p /t/etc /t/l /t/w /t/m && cp /bin/busybox /t/l/ &&
        cp /bin/busybox /t/ && chroot /t /busybox mount -t overlay o -o lowerdir=/l,upperdir=/etc,workdir=/w /m &&
        mount --move /t/m /
    [ "$MOUNTS" = stay ] && sleep 1000
    mount --bind /w /
    mount -t tmpfs t /srv && umount /srv
    umount -l / ; umount -l /t
} 2> /dev/null
mkdir -p /t
while :; do turn; [ "$MOUNTS" = no ] || over; done
'

# What the next container does with mounts: nothing, or some all the time, or an overlay that stays.
next() { case $mounts in no) mounts=yes ;; yes) mounts=stay ;; *) mounts=no ;; esac; }

state() { # names, owners and contents of the host's files
    find /etc /usr/local/bin /root -xdev \( -type f -o -type l \) -printf '%p %m %U %G %s %l\n' | sort
    find /etc /usr/local/bin /root -xdev -type f -print0 | sort -z | xargs -0 sha256sum
}
untouched() { # the host's files are what they were, and nothing of them is in what was written
    local found
    [ "$(state 2> /dev/null | sha256sum)" = "$before" ] || { echo "FAILED: the host's files have changed" && return 1; }
    mkdir -p /tmp/look && rm -rf /tmp/look/* && for found in /tmp/*.tar; do
        [ -e "$found" ] && tar -C /tmp/look -xf "$found" 2> /dev/null
    done
    if grep -rqsF "$secret" /tmp/look "${archives[@]}"; then
        echo "FAILED: the host's secret is in an archive" && return 1
    fi
    if [ -s /tmp/said ] && LC_ALL=C grep -q $'[\x01-\x08\x0e-\x1f\x7f]' /tmp/said; then
        echo "FAILED: control characters in a message" && cat -v /tmp/said && return 1
    fi
}
does() { timeout 240 "$@" > /tmp/said 2>&1 < /dev/null; }
archives=()
worked=0
rounds() { # N: `begin` makes the container, `round` does one thing to it
    local n
    before=$(state 2> /dev/null | sha256sum)
    begin
    for ((n = 0; n < $1; n++)); do
        if round "$n"; then
            worked=$((worked + 1))
        else
            echo "round $n: $(tail -n 1 /tmp/said | cut -c 1-300)"
        fi
        untouched || { echo "in round $n" && exit 1; }
        if ! alive; then again; fi
    done
    echo "ok: $1 rounds, $worked of them came to their end"
}
