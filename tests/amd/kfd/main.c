// SPDX-License-Identifier: GPL-2.0 OR MIT
/* /dev/kfd: who may call, and which call it is. */
#include "mock_kfd.h"
#include <linux/cdev.h>
#include <linux/device.h>
#include <linux/module.h>
#include <linux/ptrace.h>
#include <linux/version.h>

static char *topology = "";
module_param(topology, charp, 0444);
MODULE_PARM_DESC(topology, "file with the description of the machine");
static unsigned long vram_mib;
module_param(vram_mib, ulong, 0644);
MODULE_PARM_DESC(vram_mib, "memory that each GPU has to give, where that is to be less than it says");
char *fail_checkpoint;
module_param(fail_checkpoint, charp, 0644);
MODULE_PARM_DESC(fail_checkpoint, "N:ERRNO: CHECKPOINT fails at its Nth buffer");
char *fail_restore;
module_param(fail_restore, charp, 0644);
MODULE_PARM_DESC(fail_restore, "N:ERRNO: RESTORE fails at its Nth buffer");
static char *sdma;
module_param(sdma, charp, 0644);
MODULE_PARM_DESC(sdma, "for tests/amd/libdrm_amdgpu.c, which reads it: \"fails\" or \"hangs\": copies do");

static int major;
static struct device *device;

static int kfd_open(struct inode *inode, struct file *file)
{
	struct process *p;

	mutex_lock(&processes_lock);
	p = process_of_current();
	mutex_unlock(&processes_lock);
	if (IS_ERR(p))
		return PTR_ERR(p);
	file->private_data = p;
	return 0;
}

static int kfd_release(struct inode *inode, struct file *file)
{
	mutex_lock(&processes_lock);
	process_put(file->private_data);
	mutex_unlock(&processes_lock);
	return 0;
}

/* Only the process that opened the KFD may call, and for CRIU's operations whoever traces it and has the capability. */
static int permitted(struct process *p, bool criu)
{
	bool traced;

	rcu_read_lock();
	traced = criu && ptrace_parent(p->leader) == current;
	rcu_read_unlock();
	if (p->leader != current->group_leader && !traced)
		return -EBADF;
	if (criu && !capable(CAP_CHECKPOINT_RESTORE) && !capable(CAP_SYS_ADMIN))
		return -EACCES;
	return 0;
}

static long kfd_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
{
	struct process *p = file->private_data;
	char args[128] = {};
	size_t size = _IOC_SIZE(cmd);
	long ret = permitted(p, cmd == AMDKFD_IOC_CRIU_OP);

	if (ret)
		return ret;
	if (size > sizeof(args))
		return -EINVAL;
	if ((_IOC_DIR(cmd) & _IOC_WRITE) && copy_from_user(args, (void __user *)arg, size))
		return -EFAULT;
	if (cmd == AMDKFD_IOC_GET_VERSION) {
		struct kfd_ioctl_get_version_args *version = (void *)args;

		version->major_version = KFD_IOCTL_MAJOR_VERSION;
		version->minor_version = KFD_IOCTL_MINOR_VERSION;
	} else {
		mutex_lock(&processes_lock);
		if (cmd == AMDKFD_IOC_CRIU_OP)
			ret = criu_call(p, (void *)args);
		else
			ret = process_call(p, cmd, args);
		mutex_unlock(&processes_lock);
	}
	if (!ret && (_IOC_DIR(cmd) & _IOC_READ) && copy_to_user((void __user *)arg, args, size))
		ret = -EFAULT;
	return ret;
}

static const struct file_operations kfd_fops = {
	.owner = THIS_MODULE,
	.open = kfd_open,
	.release = kfd_release,
	.unlocked_ioctl = kfd_ioctl,
};

static const struct class kfd_class = { .name = "kfd" };

static int __init start(void)
{
	int ret = topology_read(topology);

	if (ret)
		return ret;
	for (int i = 0; vram_mib && i < gpu_count; i++)
		gpus[i].vram = vram_mib << 20;
	ret = gpus_start();
	if (ret)
		return ret;
	ret = class_register(&kfd_class);
	if (ret)
		goto no_class;
	major = register_chrdev(0, "kfd", &kfd_fops);
	if (major < 0) {
		ret = major;
		goto no_major;
	}
	device = device_create(&kfd_class, NULL, MKDEV(major, 0), NULL, "kfd");
	if (IS_ERR(device)) {
		ret = PTR_ERR(device);
		goto no_device;
	}
	ret = topology_start(&device->kobj);
	if (!ret)
		return 0;
	topology_stop();
	device_destroy(&kfd_class, MKDEV(major, 0));
no_device:
	unregister_chrdev(major, "kfd");
no_major:
	class_unregister(&kfd_class);
no_class:
	gpus_stop();
	return ret;
}

static void __exit stop(void)
{
	topology_stop();
	device_destroy(&kfd_class, MKDEV(major, 0));
	unregister_chrdev(major, "kfd");
	class_unregister(&kfd_class);
	gpus_stop();
}

module_init(start);
module_exit(stop);
MODULE_LICENSE("Dual MIT/GPL");
MODULE_DESCRIPTION("AMD GPUs that answer and do not exist, for tests");
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 13, 0)
MODULE_IMPORT_NS(DMA_BUF);
#else
MODULE_IMPORT_NS("DMA_BUF");
#endif
