// SPDX-License-Identifier: GPL-2.0 OR MIT
/* The CRIU operations. Sizes, order and refusals are the kernel's; the private data is ours. */
#include "mock_kfd.h"
#include <linux/dma-buf.h>
#include <linux/fdtable.h>
#include <linux/file.h>
#include <linux/pid_namespace.h>
#include <linux/slab.h>
#include <drm/drm_prime.h>

/* What the private data holds of each object, buffers first. */
struct saved {
	u32 kind, id, gpu_id, pad;
	u64 mapped, state[10]; /* mapped: bits over the process's GPUs, in the order of the device buckets */
};

static int count(struct process *p, u32 kind)
{
	struct object *o;
	int n = 0;

	list_for_each_entry(o, &p->objects, list)
		n += o->kind == kind;
	return n;
}

static int device_count(struct process *p)
{
	int n = 0;

	for (int i = 0; i < gpu_count; i++)
		n += p->user_gpu_id[i] != 0;
	return n;
}

static void sizes(struct process *p, struct kfd_ioctl_criu_args *args)
{
	args->num_devices = device_count(p);
	args->num_bos = count(p, BUFFER);
	args->num_objects = count(p, QUEUE) + count(p, EVENT);
	args->priv_data_size = (args->num_bos + args->num_objects) * sizeof(struct saved);
}

static void pause(struct process *p, bool paused)
{
	WRITE_ONCE(p->paused, paused);
	wake_up_all(&p->running);
}

static int process_info(struct process *p, struct kfd_ioctl_criu_args *args)
{
	pause(p, true);
	sizes(p, args);
	args->pid = task_pid_nr_ns(p->leader, task_active_pid_ns(p->leader));
	return 0;
}

static int export(struct object *o, u32 *fd)
{
	struct dma_buf *buf;
	int ret;

	*fd = KFD_INVALID_FD;
	if (!(o->flags & (KFD_IOC_ALLOC_MEM_FLAGS_VRAM | KFD_IOC_ALLOC_MEM_FLAGS_GTT)))
		return 0;
	buf = drm_gem_prime_export(o->gem, DRM_CLOEXEC | DRM_RDWR);
	if (IS_ERR(buf))
		return PTR_ERR(buf);
	ret = dma_buf_fd(buf, O_CLOEXEC);
	if (ret < 0) {
		dma_buf_put(buf);
		return ret;
	}
	*fd = ret;
	return 0;
}

/* "N:ERRNO" in a module parameter: this operation fails with it at its Nth buffer. */
static int told_to_fail(const char *when, int at)
{
	int n, error;

	return when && sscanf(when, "%d:%d", &n, &error) == 2 && n == at ? -error : 0;
}

static u64 pack_mapped(struct process *p, u64 mapped)
{
	u64 packed = 0;

	for (int i = 0, at = 0; i < gpu_count; i++)
		if (p->user_gpu_id[i])
			packed |= (u64)!!(mapped & BIT(i)) << at++;
	return packed;
}

static int save(struct process *p, struct kfd_criu_device_bucket *devices, struct kfd_criu_bo_bucket *bos,
		struct saved *saved)
{
	struct object *o;
	int at = 0, ret;

	for (int i = 0; i < gpu_count; i++)
		if (p->user_gpu_id[i]) {
			devices->user_gpu_id = p->user_gpu_id[i];
			devices->actual_gpu_id = gpus[i].gpu_id;
			devices++;
		}
	for (u32 kind = BUFFER; kind <= EVENT; kind++)
		list_for_each_entry(o, &p->objects, list) {
			if (o->kind != kind)
				continue;
			*saved = (struct saved){ .kind = kind, .id = o->id, .gpu_id = p->user_gpu_id[o->gpu] };
			memcpy(saved->state, o->state, sizeof(saved->state));
			saved->mapped = pack_mapped(p, o->mapped);
			saved++;
			if (kind != BUFFER)
				continue;
			bos[at] = (struct kfd_criu_bo_bucket){
				.addr = o->addr,
				.size = o->size,
				.offset = buffer_offset(o),
				.gpu_id = p->user_gpu_id[o->gpu],
				.alloc_flags = o->flags,
				.dmabuf_fd = KFD_INVALID_FD,
			};
			ret = told_to_fail(fail_checkpoint, at) ?: export(o, &bos[at].dmabuf_fd);
			if (ret)
				return ret;
			at++;
		}
	return 0;
}

static void close_all(struct kfd_criu_bo_bucket *bos, u32 n)
{
	for (u32 i = 0; i < n; i++)
		if (bos[i].size && bos[i].dmabuf_fd != KFD_INVALID_FD)
			close_fd(bos[i].dmabuf_fd);
}

/* The three arrays of a call. */
struct arrays {
	struct kfd_criu_device_bucket *devices;
	struct kfd_criu_bo_bucket *bos;
	struct saved *saved;
};

static int arrays_alloc(struct arrays *a, struct kfd_ioctl_criu_args *args)
{
	if (args->num_bos > 65536 || args->num_objects > 65536 || args->num_devices > MAX_GPUS)
		return -E2BIG;
	a->devices = kvcalloc(args->num_devices, sizeof(*a->devices), GFP_KERNEL);
	a->bos = kvcalloc(args->num_bos, sizeof(*a->bos), GFP_KERNEL);
	a->saved = kvzalloc(args->priv_data_size, GFP_KERNEL);
	return a->devices && a->bos && a->saved ? 0 : -ENOMEM;
}

static void arrays_free(struct arrays *a)
{
	kvfree(a->devices);
	kvfree(a->bos);
	kvfree(a->saved);
}

static int checkpoint(struct process *p, struct kfd_ioctl_criu_args *args)
{
	struct kfd_ioctl_criu_args now = *args;
	struct arrays a = {};
	int ret;

	if (!args->devices || !args->bos || !args->priv_data || !p->paused)
		return -EINVAL;
	sizes(p, &now);
	if (now.num_devices != args->num_devices || now.num_bos != args->num_bos ||
	    now.num_objects != args->num_objects || now.priv_data_size != args->priv_data_size)
		return -EINVAL;
	ret = arrays_alloc(&a, args) ?: save(p, a.devices, a.bos, a.saved);
	if (!ret && (copy_to_user(u64_to_user_ptr(args->devices), a.devices, args->num_devices * sizeof(*a.devices)) ||
		     copy_to_user(u64_to_user_ptr(args->bos), a.bos, args->num_bos * sizeof(*a.bos)) ||
		     copy_to_user(u64_to_user_ptr(args->priv_data), a.saved, args->priv_data_size)))
		ret = -EFAULT;
	if (ret && a.bos)
		close_all(a.bos, args->num_bos);
	arrays_free(&a);
	return ret;
}

static int restore_devices(struct process *p, struct kfd_criu_device_bucket *devices, u32 n)
{
	memset(p->user_gpu_id, 0, sizeof(p->user_gpu_id));
	for (u32 i = 0; i < n; i++) {
		int gpu = 0, ret;

		while (gpu < gpu_count && gpus[gpu].gpu_id != devices[i].actual_gpu_id)
			gpu++;
		if (gpu == gpu_count || gpu_hidden(gpus[gpu].drm->render->index))
			return -EINVAL;
		p->user_gpu_id[gpu] = devices[i].user_gpu_id;
		ret = process_acquire_vm(p, gpu, devices[i].drm_fd);
		if (ret)
			return ret;
	}
	return 0;
}

static u64 unpack_mapped(struct process *p, struct kfd_criu_device_bucket *devices, u32 n, u64 packed)
{
	u64 mapped = 0;

	for (u32 i = 0; i < n; i++)
		if (packed & BIT_ULL(i))
			mapped |= BIT(process_gpu(p, devices[i].user_gpu_id));
	return mapped;
}

static int restore_all(struct process *p, struct kfd_ioctl_criu_args *args, struct arrays *a)
{
	u32 total = args->num_bos + args->num_objects;
	int ret = restore_devices(p, a->devices, args->num_devices);

	for (u32 i = 0; !ret && i < total; i++) {
		struct saved *s = &a->saved[i];
		int gpu = s->kind == EVENT ? 0 : process_gpu(p, s->gpu_id);
		struct object *o;

		if (gpu < 0 || s->kind > EVENT || (s->kind == BUFFER) != (i < args->num_bos))
			return -EINVAL;
		o = process_add(p, s->kind, s->id);
		if (IS_ERR(o))
			return PTR_ERR(o);
		o->gpu = gpu;
		memcpy(o->state, s->state, sizeof(o->state));
		if (s->kind != BUFFER)
			continue;
		ret = told_to_fail(fail_restore, i) ?:
		      buffer_fill(p, o, gpu, a->bos[i].addr, a->bos[i].size, a->bos[i].alloc_flags);
		if (ret)
			break;
		o->mapped = unpack_mapped(p, a->devices, args->num_devices, s->mapped);
		a->bos[i].restored_offset = buffer_offset(o);
		ret = export(o, &a->bos[i].dmabuf_fd);
	}
	return ret;
}

static int restore(struct process *p, struct kfd_ioctl_criu_args *args)
{
	struct arrays a = {};
	int ret;

	if (!args->bos || !args->devices || !args->priv_data || !args->priv_data_size || !args->num_devices ||
	    !args->num_bos)
		return -EINVAL;
	/* One for each GPU that the process could see when it opened the KFD. */
	if (args->num_devices != device_count(p))
		return -EINVAL;
	if (!list_empty(&p->objects) ||
	    args->priv_data_size != (args->num_bos + args->num_objects) * sizeof(struct saved))
		return -EINVAL;
	ret = arrays_alloc(&a, args);
	if (!ret &&
	    (copy_from_user(a.devices, u64_to_user_ptr(args->devices), args->num_devices * sizeof(*a.devices)) ||
	     copy_from_user(a.bos, u64_to_user_ptr(args->bos), args->num_bos * sizeof(*a.bos)) ||
	     copy_from_user(a.saved, u64_to_user_ptr(args->priv_data), args->priv_data_size)))
		ret = -EFAULT;
	for (u32 i = 0; !ret && i < args->num_bos; i++)
		a.bos[i].dmabuf_fd = KFD_INVALID_FD;
	pause(p, true);
	ret = ret ?: restore_all(p, args, &a);
	if (!ret && copy_to_user(u64_to_user_ptr(args->bos), a.bos, args->num_bos * sizeof(*a.bos)))
		ret = -EFAULT;
	if (ret && a.bos)
		close_all(a.bos, args->num_bos);
	arrays_free(&a);
	return ret;
}

static int resume(struct kfd_ioctl_criu_args *args)
{
	struct pid *pid = find_get_pid(args->pid);
	struct process *target = pid ? process_of_pid(pid) : NULL;

	put_pid(pid);
	if (!target)
		return -ESRCH;
	pause(target, false);
	return 0;
}

int criu_call(struct process *p, struct kfd_ioctl_criu_args *args)
{
	switch (args->op) {
	case KFD_CRIU_OP_PROCESS_INFO:
		return process_info(p, args);
	case KFD_CRIU_OP_CHECKPOINT:
		return checkpoint(p, args);
	case KFD_CRIU_OP_UNPAUSE:
		if (!p->paused)
			return -EINVAL;
		pause(p, false);
		return 0;
	case KFD_CRIU_OP_RESTORE:
		return restore(p, args);
	case KFD_CRIU_OP_RESUME:
		return resume(args);
	}
	return -EINVAL;
}
