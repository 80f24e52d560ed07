#!/bin/bash
# old-root.sh SUITE MIRROR DIR: builds a bare Debian root in DIR, which must be empty: one whose C library is too old for
# cryopod. `testbed up` runs it, with TESTBED_ROOT_SCRIPT.
set -euo pipefail

suite=$1 mirror=$2 root=$3
script=/usr/share/debootstrap/scripts/$suite
[ -e "$script" ] || script=/usr/share/debootstrap/scripts/sid
debootstrap --variant=minbase --include=iproute2 --keyring=/usr/share/keyrings/debian-archive-keyring.gpg \
    "$suite" "$root" "$mirror" "$script"
rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/*
mkdir -p "$root/src"
