/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * mock_kfd: AMD GPUs that answer and do not exist. /dev/kfd with the memory, queue, event and CRIU calls of the kernel's
 * interface, render nodes whose buffers are host memory, and the topology in sysfs that a description file gives.
 *
 * main.c: the device and its calls. process.c: buffers, queues and events of a process. criu.c: checkpoint and restore.
 * topology.c: the description and sysfs. gpu.c: render nodes.
 */
#ifndef MOCK_KFD_H
#define MOCK_KFD_H

#include <drm/drm_device.h>
#include <drm/drm_file.h>
#include <drm/drm_gem.h>
#include <linux/fs.h>
#include <linux/kobject.h>
#include <linux/kref.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/platform_device.h>
#include <linux/wait.h>
#include <uapi/linux/kfd_ioctl.h>

#define MAX_NODES 64
#define MAX_GPUS 16

struct gpu {
	struct drm_device *drm;
	struct platform_device *parent;
	u32 gpu_id;
	u64 vram, used; /* bytes; `used` under the lock of all processes */
};

extern struct gpu gpus[MAX_GPUS];
extern int gpu_count;
extern char *fail_checkpoint, *fail_restore;

/* A buffer, queue or event; `id` names it to the process. */
struct object {
	struct list_head list;
	u32 kind, id;
	struct drm_gem_object *gem; /* a buffer's */
	u32 gem_handle;
	int gpu;
	u64 addr, size, mapped;
	u32 flags;
	u64 state[10]; /* what the process gave a queue or event; opaque */
};

enum { BUFFER, QUEUE, EVENT };

struct process {
	struct list_head list;
	struct kref ref;
	struct mm_struct *mm; /* compared, never used */
	struct task_struct *leader;
	struct pid *pid;
	struct list_head objects;
	u32 next_id;
	struct file *vm[MAX_GPUS];   /* the render node of each GPU that the process works with */
	u32 user_gpu_id[MAX_GPUS];   /* the GPU's id as the process knows it; 0: not the process's */
	bool paused, restored_paused;
	wait_queue_head_t running;
};

extern struct mutex processes_lock; /* and all that is in them */

struct process *process_of_current(void);
struct process *process_of_pid(struct pid *pid);
void process_put(struct process *p);
int process_gpu(struct process *p, u32 user_gpu_id);
int process_acquire_vm(struct process *p, int gpu, int drm_fd);
struct object *process_add(struct process *p, u32 kind, u32 id);
struct object *process_find(struct process *p, u32 kind, u32 id);
int buffer_fill(struct process *p, struct object *o, int gpu, u64 addr, u64 size, u32 flags);
u64 buffer_offset(struct object *o);
void object_free(struct process *p, struct object *o);
long process_call(struct process *p, unsigned int cmd, void *args);

int criu_call(struct process *p, struct kfd_ioctl_criu_args *args);

int gpus_start(void);
void gpus_stop(void);
bool gpu_hidden(int minor);
struct drm_file *gpu_file(struct file *file, int gpu);

int topology_read(const char *path);
int topology_start(struct kobject *kfd);
void topology_stop(void);

#endif
