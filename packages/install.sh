#!/bin/sh
# install.sh: installs cryopod from this directory, on hosts for which there is no package. It shows what it will do, and
# asks before it does it.
#
#   ./install.sh [--without-criu] [--dry-run] [--yes]
#   /usr/lib/cryopod/install.sh --uninstall [--purge] [--dry-run] [--yes]
#
#       --without-criu   leave out the CRIU that comes along: use the host's, if it is 4.1 or newer
#       --uninstall      undo the setup of engines, and remove what was installed
#       --purge          also remove the configuration, and what cryopod made by itself (cache, backups)
#       --dry-run        only show it
#       --yes            do not ask
#
# /usr/lib/cryopod/installed lists what was installed. With DESTDIR everything goes below that directory.
set -eu
umask 022

here=$(cd "$(dirname "$(readlink -f "$0")")" && pwd)
root=${DESTDIR:-}
own=usr/lib/cryopod
list=$own/installed
config=etc/cryopod/config.toml
what=install criu=yes dry='' yes='' purge=''

die() { echo "install.sh: $*" >&2 && exit 1; }

while [ $# -gt 0 ]; do
    case $1 in
        --uninstall) what=uninstall ;;
        --purge) purge=yes ;;
        --without-criu) criu='' ;;
        --dry-run) dry=yes ;;
        -y | --yes) yes=yes ;;
        -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" && exit ;;
        *) die "unknown option $1; see install.sh --help" ;;
    esac
    shift
done

agreed() {
    [ -z "$dry" ] || exit 0
    [ -z "$yes" ] || return 0
    [ -t 0 ] || die "nobody can answer here whether to do this: give --yes"
    printf 'Do this? [y/N] '
    read -r answer
    case $answer in
        y | Y | yes) ;;
        *) echo "Nothing was changed." && exit 1 ;;
    esac
}

# The files to install, as SOURCE TARGET.
files() {
    for part in cryopod ${criu:+cryopod-criu}; do
        if [ -d "$here/$part" ]; then (cd "$here/$part" && find . -type f -o -type l | sed "s|^\./\(.*\)|$part/\1 \1|"); fi
    done
    for file in install.sh prerm postrm; do echo "$file $own/$file"; done
}

# remove_listed LIST KEPT: removes the files that LIST names and KEPT does not, and directories that are empty then.
remove_listed() {
    while read -r file; do
        case $file in
            '' | /* | *..*) continue ;;
            "$config") [ -n "$purge" ] || continue ;;
        esac
        if grep -Fqx "$file" "$2"; then continue; fi
        rm -f "$root/$file"
        dir=${file%/*}
        while [ "$dir" != "${dir%/*}" ] && rmdir "$root/$dir" 2> /dev/null; do dir=${dir%/*}; done
    done < "$1"
}

install_all() {
    if { dpkg-query --show --showformat '${db:Status-Status}' cryopod | grep -qx installed || rpm --quiet -q cryopod; } 2> /dev/null; then
        die "the package cryopod is installed: remove it first, or install the newer package"
    fi
    "$here/cryopod/usr/bin/cryopod" --version > /dev/null 2> "$work/said" ||
        die "cryopod does not run on this machine. It needs $(cat "$here/architecture") and glibc $(cat "$here/glibc") or newer (2.34 is that of RHEL 9, 2.35 of Ubuntu 22.04, 2.36 of Debian 12). The machine says: $(head -n 1 "$work/said")"
    files > "$work/files"
    echo "$("$here/cryopod/usr/bin/cryopod" --version) will be installed in ${root:-/}:"
    sed 's|^[^ ]* ||; s|\(usr/share/[^/]*\)/.*|\1|; t; s|\(usr/lib/cryopod/criu\)/.*|\1|; t; s|/[^/]*$||' "$work/files" | sort | uniq -c |
        sed "s|^ *\([0-9]*\) \(.*\)|  $root/\2 (\1 files)|"
    if [ -e "$root/$config" ]; then echo "$root/$config stays as it is."; fi
    echo "No engine is changed: \`cryopod setup podman\` (docker, kubernetes) does that afterwards."
    agreed

    cut -d ' ' -f 2- "$work/files" > "$work/listed"
    echo "$list" >> "$work/listed"
    # The list first: --uninstall then also removes what an interrupted run leaves.
    mkdir -p "$root/$own"
    if [ -e "$root/$list" ]; then cp "$root/$list" "$work/old"; else : > "$work/old"; fi
    sort -u "$work/old" "$work/listed" > "$root/$list"
    while read -r from file; do
        if [ "$file" = "$config" ] && [ -e "$root/$file" ]; then continue; fi
        mkdir -p "$root/${file%/*}"
        # By rename: a program that runs keeps its file.
        cp -P "$here/$from" "$root/$file.new"
        mv "$root/$file.new" "$root/$file"
    done < "$work/files"
    remove_listed "$work/old" "$work/listed"
    sort "$work/listed" > "$root/$list.new"
    mv "$root/$list.new" "$root/$list"
    echo "Installed. Next: cryopod check. To undo it: $root/$own/install.sh --uninstall"
}

uninstall_all() {
    [ -e "$root/$list" ] || die "$root/$list is not here: install.sh has installed nothing"
    # What a second run needs goes last, for one that is interrupted.
    needed="$own/prerm $own/postrm $own/install.sh $list"
    printf '%s\n' $needed > "$work/needed"
    { grep -Fvx -f "$work/needed" "$root/$list" && cat "$work/needed"; } > "$work/listed"
    echo "cryopod's setup of engines will be undone, and $(grep -c . "$work/listed") files removed. Archives, and stores, stay."
    if [ -n "$purge" ]; then
        echo "So will $root/$config and what cryopod made in /var/lib/cryopod and /var/cache/cryopod."
    else
        echo "$root/$config stays; --purge removes it."
    fi
    agreed
    # Without the program, an interrupted run has undone it.
    if [ -z "$root" ] && [ -e "/usr/bin/cryopod" ]; then sh "$here/prerm" remove; fi
    cp "$here/postrm" "$work/postrm"
    : > "$work/none"
    remove_listed "$work/listed" "$work/none"
    if [ -n "$purge" ] && [ -z "$root" ]; then sh "$work/postrm" purge; fi
    echo "Removed."
}

[ -n "$root" ] || [ -n "$dry" ] || [ "$(id -u)" = 0 ] || die "run it as root"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${what}_all"
