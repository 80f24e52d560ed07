glibc_image
run_rootfs --mib 60 --procs 2 --gpus 0,1
look() { for p in $(pgrep -x cusim-client); do readlink /proc/$p/ns/mnt; grep ' / / ' /proc/$p/mountinfo; done; }
look
check 'two: checkpoint' does pod container checkpoint --keep job
ls $(pod inspect -f '{{.StaticDir}}' job)/checkpoint/mountpoints*
check 'two: restore' does pod container restore --keep job
look
pod container checkpoint --leave-running --export /tmp/job.tar job > /tmp/said 2>&1
tar tf /tmp/job.tar | grep mountp
mkdir /tmp/x; tar -C /tmp/x -xf /tmp/job.tar
cd /tmp/x/checkpoint; for f in mountpoints-*.img; do python3 -c "
import pycriu,sys
d=pycriu.images.load(open('$f','rb'))
for e in d['entries']:
    if e['mountpoint'] in ('./','/'): print('$f', e)
"; done
look
