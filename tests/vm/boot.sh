#!/bin/bash
# boot.sh MEMORY CASE...: in the test bed, starts the virtual machine at /vm and passes on what it prints, and its exit code.
set -euo pipefail
memory=$1 && shift

lib=/vm/tools/usr/lib/x86_64-linux-gnu
export LD_LIBRARY_PATH=$lib QEMU_MODULE_DIR=$lib/qemu
qemu=(
    /vm/tools/usr/bin/qemu-system-x86_64 -L /vm/tools/usr/share/seabios -L /vm/tools/usr/share/qemu
    -nodefaults -no-user-config -display none -no-reboot
    -machine q35 -accel tcg,thread=multi -cpu max,la57=off -smp 2 -m "$memory"
    -kernel /vm/vmlinuz -initrd /vm/initrd
    # What follows -- are init's arguments.
    -append "console=ttyS0 loglevel=7 printk.time=1 panic=-1 mitigations=off drm_kms_helper.fbdev_emulation=0 -- $*"
    -drive file=/vm/disk.img,format=raw,if=virtio,readonly=on
    -virtfs local,path=/src,mount_tag=src,security_model=none,readonly=on
    -virtfs local,path=/opt/build,mount_tag=build,security_model=none,readonly=on
    -device virtio-serial
    -chardev file,id=out,path=/tmp/out -device virtserialport,chardev=out,name=out
    -chardev file,id=code,path=/tmp/code -device virtserialport,chardev=code,name=code
    -serial file:/tmp/console
    -device ati-vga,model=rv100 # a second render node, of an AMD device; it has no command processor
)
if [ -d /amd ]; then qemu+=(-virtfs local,path=/amd,mount_tag=amd,security_model=none,readonly=on); fi
mkfifo /tmp/out # not qemu's standard output: a file it would truncate, a socket it cannot open
cat /tmp/out &
code=0
"${qemu[@]}" < /dev/null || code=$?
if [ ! -s /tmp/code ]; then
    echo "vm: the machine ended before it could say how; qemu's exit code was $code, the console's last lines were" >&2
    tail -n 40 /tmp/console >&2
    exit 1
fi
wait
exit "$(cat /tmp/code)"
