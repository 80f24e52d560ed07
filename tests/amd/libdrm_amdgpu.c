/*
 * libdrm_amdgpu of the tests: what CRIU's amdgpu plugin calls of it. Buffers are the mock KFD's, mapped; addresses are
 * given out one after the other; submitted SDMA packets are executed here, as copies in memory. So the plugin's own
 * packets, in its own order, move the data. The mock KFD's parameter `sdma` makes them fail or hang.
 */
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <libdrm/amdgpu.h>
#include <libdrm/amdgpu_drm.h>

enum { MAX_RANGES = 64, SDMA_NOP = 0, SDMA_COPY = 1 };

struct amdgpu_bo {
	void *memory;
	uint64_t size;
	enum { OURS, MAPPED, USERS } kind;
};

struct amdgpu_va {
	uint64_t address;
};

struct amdgpu_context {
	amdgpu_device_handle device;
};

struct amdgpu_device {
	pthread_mutex_t lock;
	uint64_t next;
	struct {
		uint64_t address, size;
		struct amdgpu_bo *bo;
	} ranges[MAX_RANGES];
};

/* The plugin uses one device a thread, but gives most calls no device. */
static __thread struct amdgpu_device *current;

int amdgpu_device_initialize(int fd, uint32_t *major, uint32_t *minor, amdgpu_device_handle *device)
{
	struct amdgpu_device *d = calloc(1, sizeof(*d));

	if (!d)
		return -ENOMEM;
	pthread_mutex_init(&d->lock, NULL);
	d->next = 1ULL << 40;
	*major = 3;
	*minor = 61;
	*device = current = d;
	return fd < 0 ? -EBADF : 0;
}

int amdgpu_device_deinitialize(amdgpu_device_handle device)
{
	free(device);
	return 0;
}

int amdgpu_query_gpu_info(amdgpu_device_handle device, struct amdgpu_gpu_info *info)
{
	(void)device;
	memset(info, 0, sizeof(*info));
	info->family_id = AMDGPU_FAMILY_AI;
	return 0;
}

static int new_bo(void *memory, uint64_t size, int kind, amdgpu_bo_handle *handle)
{
	struct amdgpu_bo *bo = memory == MAP_FAILED ? NULL : malloc(sizeof(*bo));

	if (!bo)
		return -ENOMEM;
	*bo = (struct amdgpu_bo){ .memory = memory, .size = size, .kind = kind };
	*handle = bo;
	return 0;
}

int amdgpu_bo_alloc(amdgpu_device_handle device, struct amdgpu_bo_alloc_request *request, amdgpu_bo_handle *bo)
{
	uint64_t size = (request->alloc_size + 4095) & ~4095ULL;

	(void)device;
	return new_bo(mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), size, OURS, bo);
}

int amdgpu_create_bo_from_user_mem(amdgpu_device_handle device, void *memory, uint64_t size, amdgpu_bo_handle *bo)
{
	(void)device;
	return new_bo(memory, size, USERS, bo);
}

int amdgpu_bo_import(amdgpu_device_handle device, enum amdgpu_bo_handle_type type, uint32_t fd,
		     struct amdgpu_bo_import_result *result)
{
	off_t size = lseek(fd, 0, SEEK_END);

	(void)device;
	if (type != amdgpu_bo_handle_type_dma_buf_fd || size <= 0)
		return -EINVAL;
	result->alloc_size = size;
	return new_bo(mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), size, MAPPED, &result->buf_handle);
}

int amdgpu_bo_cpu_map(amdgpu_bo_handle bo, void **memory)
{
	*memory = bo->memory;
	return 0;
}

int amdgpu_bo_cpu_unmap(amdgpu_bo_handle bo)
{
	(void)bo;
	return 0;
}

int amdgpu_bo_free(amdgpu_bo_handle bo)
{
	if (bo->kind != USERS)
		munmap(bo->memory, bo->size);
	free(bo);
	return 0;
}

int amdgpu_va_range_alloc(amdgpu_device_handle device, enum amdgpu_gpu_va_range type, uint64_t size,
			  uint64_t alignment, uint64_t required, uint64_t *address, amdgpu_va_handle *handle,
			  uint64_t flags)
{
	struct amdgpu_va *va = malloc(sizeof(*va));

	(void)type, (void)alignment, (void)required, (void)flags;
	if (!va)
		return -ENOMEM;
	pthread_mutex_lock(&device->lock);
	va->address = *address = device->next;
	device->next += ((size + 4095) & ~4095ULL) + 4096;
	pthread_mutex_unlock(&device->lock);
	*handle = va;
	return 0;
}

int amdgpu_va_range_free(amdgpu_va_handle va)
{
	free(va);
	return 0;
}

int amdgpu_bo_va_op(amdgpu_bo_handle bo, uint64_t offset, uint64_t size, uint64_t address, uint64_t flags, uint32_t op)
{
	(void)flags;
	for (int i = 0; i < MAX_RANGES; i++) {
		if (op == AMDGPU_VA_OP_MAP && !current->ranges[i].bo) {
			if (offset || size > ((bo->size + 4095) & ~4095ULL))
				return -EINVAL;
			current->ranges[i].address = address;
			current->ranges[i].size = (size + 4095) & ~4095ULL;
			current->ranges[i].bo = bo;
			return 0;
		}
		if (op == AMDGPU_VA_OP_UNMAP && current->ranges[i].bo == bo && current->ranges[i].address == address) {
			current->ranges[i].bo = NULL;
			return 0;
		}
	}
	return -ENOENT;
}

int amdgpu_bo_list_create(amdgpu_device_handle device, uint32_t count, amdgpu_bo_handle *bos, uint8_t *priorities,
			  amdgpu_bo_list_handle *list)
{
	(void)count, (void)bos, (void)priorities;
	*list = (amdgpu_bo_list_handle)device;
	return 0;
}

int amdgpu_bo_list_destroy(amdgpu_bo_list_handle list)
{
	(void)list;
	return 0;
}

int amdgpu_cs_ctx_create(amdgpu_device_handle device, amdgpu_context_handle *context)
{
	*context = malloc(sizeof(**context));
	if (!*context)
		return -ENOMEM;
	(*context)->device = device;
	return 0;
}

int amdgpu_cs_ctx_free(amdgpu_context_handle context)
{
	free(context);
	return 0;
}

/* What is at a GPU address, if all of it is in one mapped buffer. */
static void *memory_at(struct amdgpu_device *device, uint64_t address, uint64_t size)
{
	for (int i = 0; i < MAX_RANGES; i++) {
		uint64_t start = device->ranges[i].address, all = device->ranges[i].size;

		if (device->ranges[i].bo && address >= start && address + size <= start + all)
			return (char *)device->ranges[i].bo->memory + (address - start);
	}
	return NULL;
}

/* What the module's parameter says that copies do; read where the plugin runs, at a restore in the container. */
static bool copies(const char *how)
{
	char said[16] = "";
	FILE *f = fopen("/sys/module/mock_kfd/parameters/sdma", "r");

	if (f) {
		if (!fgets(said, sizeof(said), f))
			said[0] = 0;
		fclose(f);
	}
	return !strncmp(said, how, strlen(how));
}

int amdgpu_cs_submit(amdgpu_context_handle context, uint64_t flags, struct amdgpu_cs_request *requests, uint32_t count)
{
	struct amdgpu_cs_ib_info *ib = requests->ibs;
	uint32_t *words = memory_at(context->device, ib->ib_mc_address, ib->size * 4ULL);

	(void)flags;
	if (copies("fails"))
		return -EIO;
	while (copies("hangs"))
		usleep(100000);
	if (count != 1 || requests->ip_type != AMDGPU_HW_IP_DMA || !words)
		return -EINVAL;
	for (uint32_t i = 0; i < ib->size;) {
		uint64_t size;
		void *from, *to;

		if ((words[i] & 0xff) == SDMA_NOP) {
			i++;
			continue;
		}
		if (words[i] != SDMA_COPY || i + 7 > ib->size)
			return -EINVAL;
		size = words[i + 1];
		from = memory_at(context->device, words[i + 3] | (uint64_t)words[i + 4] << 32, size);
		to = memory_at(context->device, words[i + 5] | (uint64_t)words[i + 6] << 32, size);
		if (!from || !to)
			return -EFAULT;
		memcpy(to, from, size);
		i += 7;
	}
	requests->seq_no = 1;
	return 0;
}

int amdgpu_cs_query_fence_status(struct amdgpu_cs_fence *fence, uint64_t timeout, uint64_t flags, uint32_t *expired)
{
	(void)fence, (void)timeout, (void)flags;
	*expired = 1;
	return 0;
}
