// SPDX-License-Identifier: GPL-2.0 OR MIT
/* What a process has of the KFD: render nodes, buffers, queues, events. All under processes_lock. */
#include "mock_kfd.h"
#include <drm/drm_gem_shmem_helper.h>
#include <linux/file.h>
#include <linux/sched/mm.h>
#include <linux/sched/task.h>
#include <linux/slab.h>

DEFINE_MUTEX(processes_lock);
static LIST_HEAD(processes);

struct process *process_of_current(void)
{
	struct process *p;

	list_for_each_entry(p, &processes, list)
		if (p->mm == current->mm && p->leader == current->group_leader) {
			kref_get(&p->ref);
			return p;
		}
	p = kzalloc(sizeof(*p), GFP_KERNEL);
	if (!p)
		return ERR_PTR(-ENOMEM);
	kref_init(&p->ref);
	p->mm = current->mm;
	mmgrab(p->mm); /* so that no other process gets its address */
	p->leader = get_task_struct(current->group_leader);
	p->pid = get_pid(task_tgid(current));
	INIT_LIST_HEAD(&p->objects);
	init_waitqueue_head(&p->running);
	p->next_id = 1;
	for (int i = 0; i < gpu_count; i++)
		if (!gpu_hidden(gpus[i].drm->render->index))
			p->user_gpu_id[i] = gpus[i].gpu_id;
	list_add(&p->list, &processes);
	return p;
}

struct process *process_of_pid(struct pid *pid)
{
	struct process *p;

	list_for_each_entry(p, &processes, list)
		if (p->pid == pid)
			return p;
	return NULL;
}

static void process_free(struct kref *ref)
{
	struct process *p = container_of(ref, struct process, ref);
	struct object *o, *next;

	list_for_each_entry_safe(o, next, &p->objects, list)
		object_free(p, o);
	for (int i = 0; i < gpu_count; i++)
		if (p->vm[i])
			fput(p->vm[i]);
	list_del(&p->list);
	put_task_struct(p->leader);
	put_pid(p->pid);
	mmdrop(p->mm);
	kfree(p);
}

void process_put(struct process *p)
{
	kref_put(&p->ref, process_free);
}

int process_gpu(struct process *p, u32 user_gpu_id)
{
	for (int i = 0; user_gpu_id && i < gpu_count; i++)
		if (p->user_gpu_id[i] == user_gpu_id)
			return i;
	return -EINVAL;
}

int process_acquire_vm(struct process *p, int gpu, int drm_fd)
{
	struct file *file = fget(drm_fd);

	if (!file)
		return -EBADF;
	if (!gpu_file(file, gpu) || p->vm[gpu]) {
		fput(file);
		return p->vm[gpu] ? -EBUSY : -EINVAL;
	}
	p->vm[gpu] = file;
	return 0;
}

struct object *process_find(struct process *p, u32 kind, u32 id)
{
	struct object *o;

	list_for_each_entry(o, &p->objects, list)
		if (o->kind == kind && o->id == id)
			return o;
	return NULL;
}

/* `id` 0: the next one. */
struct object *process_add(struct process *p, u32 kind, u32 id)
{
	struct object *o;

	if (id && process_find(p, kind, id))
		return ERR_PTR(-EEXIST);
	o = kzalloc(sizeof(*o), GFP_KERNEL);
	if (!o)
		return ERR_PTR(-ENOMEM);
	o->kind = kind;
	o->id = id ?: p->next_id;
	p->next_id = max(p->next_id, o->id + 1);
	list_add_tail(&o->list, &p->objects);
	return o;
}

void object_free(struct process *p, struct object *o)
{
	if (o->gem) {
		gpus[o->gpu].used -= o->size;
		drm_gem_shmem_unpin(to_drm_gem_shmem_obj(o->gem));
		drm_gem_handle_delete(gpu_file(p->vm[o->gpu], o->gpu), o->gem_handle);
		drm_gem_object_put(o->gem);
	}
	list_del(&o->list);
	kfree(o);
}

int buffer_fill(struct process *p, struct object *o, int gpu, u64 addr, u64 size, u32 flags)
{
	struct drm_gem_shmem_object *shmem;
	int ret;

	if (!p->vm[gpu] || !size || size % PAGE_SIZE)
		return -EINVAL;
	if (gpus[gpu].used + size > gpus[gpu].vram)
		return -ENOMEM;
	shmem = drm_gem_shmem_create(gpus[gpu].drm, size);
	if (IS_ERR(shmem))
		return PTR_ERR(shmem);
	/* As long as the buffer exists: pages that nobody maps would be clean to the kernel, which drops them. */
	ret = drm_gem_shmem_pin(shmem);
	if (ret)
		goto no_pages;
	ret = drm_gem_handle_create(gpu_file(p->vm[gpu], gpu), &shmem->base, &o->gem_handle);
	if (ret)
		goto no_handle;
	o->gem = &shmem->base;
	o->gpu = gpu;
	o->addr = addr;
	o->size = size;
	o->flags = flags;
	gpus[gpu].used += size;
	return 0;

no_handle:
	drm_gem_shmem_unpin(shmem);
no_pages:
	drm_gem_object_put(&shmem->base);
	return ret;
}

u64 buffer_offset(struct object *o)
{
	return drm_vma_node_offset_addr(&o->gem->vma_node);
}

/* ---- the calls of the process itself ---- */

static long alloc(struct process *p, struct kfd_ioctl_alloc_memory_of_gpu_args *args)
{
	int gpu = process_gpu(p, args->gpu_id), ret;
	struct object *o;

	if (gpu < 0)
		return gpu;
	o = process_add(p, BUFFER, 0);
	if (IS_ERR(o))
		return PTR_ERR(o);
	ret = buffer_fill(p, o, gpu, args->va_addr, args->size, args->flags);
	if (ret) {
		object_free(p, o);
		return ret;
	}
	args->handle = o->id;
	args->mmap_offset = buffer_offset(o);
	return 0;
}

static long map(struct process *p, u64 handle, u64 ids, u32 count, bool mapped)
{
	struct object *o = process_find(p, BUFFER, handle);

	if (!o)
		return -EINVAL;
	for (u32 i = 0; i < count; i++) {
		int gpu;
		u32 id;

		if (get_user(id, (u32 __user *)u64_to_user_ptr(ids) + i))
			return -EFAULT;
		gpu = process_gpu(p, id);
		if (gpu < 0)
			return gpu;
		if (mapped)
			o->mapped |= BIT(gpu);
		else
			o->mapped &= ~BIT(gpu);
	}
	return 0;
}

static long create_queue(struct process *p, struct kfd_ioctl_create_queue_args *args)
{
	int gpu = process_gpu(p, args->gpu_id);
	struct object *o;

	if (gpu < 0)
		return gpu;
	o = process_add(p, QUEUE, 0);
	if (IS_ERR(o))
		return PTR_ERR(o);
	o->gpu = gpu;
	o->state[0] = args->ring_base_address;
	o->state[1] = args->ring_size;
	o->state[2] = args->queue_type;
	args->queue_id = o->id;
	return 0;
}

/* The sign that a queue runs: the call waits while it is paused, and fails if the queue is not what it was. */
static long update_queue(struct process *p, struct kfd_ioctl_update_queue_args *args)
{
	struct object *o = process_find(p, QUEUE, args->queue_id);

	if (!o || o->state[0] != args->ring_base_address || o->state[1] != args->ring_size)
		return -EINVAL;
	while (p->paused) {
		int ret;

		mutex_unlock(&processes_lock);
		ret = wait_event_interruptible(p->running, !READ_ONCE(p->paused));
		mutex_lock(&processes_lock);
		if (ret)
			return ret;
	}
	return 0;
}

static long create_event(struct process *p, struct kfd_ioctl_create_event_args *args)
{
	struct object *o = process_add(p, EVENT, 0);

	if (IS_ERR(o))
		return PTR_ERR(o);
	o->state[0] = args->event_type;
	o->state[1] = args->auto_reset;
	args->event_id = o->id;
	args->event_slot_index = o->id;
	return 0;
}

static long destroy(struct process *p, u32 kind, u32 id)
{
	struct object *o = process_find(p, kind, id);

	if (!o)
		return -EINVAL;
	object_free(p, o);
	return 0;
}

long process_call(struct process *p, unsigned int cmd, void *args)
{
	struct kfd_ioctl_acquire_vm_args *vm = args;
	struct kfd_ioctl_map_memory_to_gpu_args *to = args;
	struct kfd_ioctl_unmap_memory_from_gpu_args *from = args;
	int gpu;

	switch (cmd) {
	case AMDKFD_IOC_ACQUIRE_VM:
		gpu = process_gpu(p, vm->gpu_id);
		return gpu < 0 ? gpu : process_acquire_vm(p, gpu, vm->drm_fd);
	case AMDKFD_IOC_ALLOC_MEMORY_OF_GPU:
		return alloc(p, args);
	case AMDKFD_IOC_FREE_MEMORY_OF_GPU:
		return destroy(p, BUFFER, ((struct kfd_ioctl_free_memory_of_gpu_args *)args)->handle);
	case AMDKFD_IOC_MAP_MEMORY_TO_GPU:
		to->n_success = to->n_devices;
		return map(p, to->handle, to->device_ids_array_ptr, to->n_devices, true);
	case AMDKFD_IOC_UNMAP_MEMORY_FROM_GPU:
		from->n_success = from->n_devices;
		return map(p, from->handle, from->device_ids_array_ptr, from->n_devices, false);
	case AMDKFD_IOC_CREATE_QUEUE:
		return create_queue(p, args);
	case AMDKFD_IOC_UPDATE_QUEUE:
		return update_queue(p, args);
	case AMDKFD_IOC_DESTROY_QUEUE:
		return destroy(p, QUEUE, ((struct kfd_ioctl_destroy_queue_args *)args)->queue_id);
	case AMDKFD_IOC_CREATE_EVENT:
		return create_event(p, args);
	case AMDKFD_IOC_DESTROY_EVENT:
		return destroy(p, EVENT, ((struct kfd_ioctl_destroy_event_args *)args)->event_id);
	case AMDKFD_IOC_SET_EVENT:
		return process_find(p, EVENT, ((struct kfd_ioctl_set_event_args *)args)->event_id) ? 0 : -EINVAL;
	}
	return -ENOTTY;
}
