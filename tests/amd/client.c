/*
 * kfd-client [-m MIB] [-b BUFFERS] [-p PROCESSES] [-n]: works with the KFD until something is wrong. Each process opens
 * the KFD and every GPU that it sees, allocates BUFFERS of MIB on each, a queue and an event, and fills the buffers. Then
 * it goes round ten times a second: each queue must run, each buffer hold what it held, and one word of each changes.
 * The first process prints a number a round: 0, 1, 2, ... if all is well in every process, else why not. Half of a
 * buffer is noise, and half is zero. -n: no queue; one as simple as this only the mock KFD takes.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <signal.h>
#include <unistd.h>
#include <linux/kfd_ioctl.h>

enum { MAX_GPUS = 64, MAX_BUFFERS = 64 };
#define NODES "/sys/class/kfd/kfd/topology/nodes"

static struct gpu {
	uint32_t id, minor, queue, event;
	uint64_t *buffers[MAX_BUFFERS];
	uint64_t sums[MAX_BUFFERS];
} gpus[MAX_GPUS];
static int gpu_count, kfd, buffers = 2, processes = 1, queues = 1;
static uint64_t size = 1 << 20;

/* Shared by all processes: rounds done by each. */
static _Atomic int64_t *rounds;
static int self;

static void fail(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	printf("WRONG in process %d: ", self);
	vprintf(format, args);
	printf(": %s\n", strerror(errno));
	exit(1);
}

static void call(unsigned long request, void *args, const char *what, uint32_t gpu)
{
	int ret;

	do
		ret = ioctl(kfd, request, args);
	while (ret && errno == EINTR);
	if (ret)
		fail("%s on GPU %#x", what, gpu);
}

static uint64_t property(const char *node, const char *file, const char *name)
{
	char path[300], line[300], key[100];
	uint64_t value = 0, found = 0;
	FILE *f;

	snprintf(path, sizeof(path), NODES "/%s/%s", node, file);
	f = fopen(path, "r");
	if (!f)
		return 0;
	while (fgets(line, sizeof(line), f))
		if (!name ? sscanf(line, "%" SCNu64, &value) == 1 :
			    sscanf(line, "%99s %" SCNu64, key, &value) == 2 && !strcmp(key, name))
			found = value;
	fclose(f);
	return found;
}

static void find_gpus(void)
{
	DIR *dir = opendir(NODES);
	struct dirent *entry;

	if (!dir)
		fail("no topology");
	while ((entry = readdir(dir)) && gpu_count < MAX_GPUS) {
		uint32_t id = entry->d_name[0] == '.' ? 0 : property(entry->d_name, "gpu_id", NULL);

		if (id) {
			gpus[gpu_count].id = id;
			gpus[gpu_count++].minor = property(entry->d_name, "properties", "drm_render_minor");
		}
	}
	closedir(dir);
	if (!gpu_count)
		fail("no GPU");
}

static uint64_t sum(const uint64_t *words)
{
	uint64_t a = 0, b = 0;

	for (uint64_t i = 0; i < size / 8; i++)
		b += a += words[i];
	return a ^ b << 1;
}

static uint64_t *buffer(struct gpu *gpu, int render, uint64_t seed)
{
	struct kfd_ioctl_alloc_memory_of_gpu_args alloc = {
		.size = size,
		.gpu_id = gpu->id,
		.flags = KFD_IOC_ALLOC_MEM_FLAGS_VRAM | KFD_IOC_ALLOC_MEM_FLAGS_WRITABLE | KFD_IOC_ALLOC_MEM_FLAGS_PUBLIC,
	};
	struct kfd_ioctl_map_memory_to_gpu_args map = { .device_ids_array_ptr = (uintptr_t)&gpu->id, .n_devices = 1 };
	/* ROCm maps a buffer where the GPU has it; CRIU's plugin recognises it by that. */
	void *at = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint64_t *words;

	alloc.va_addr = (uintptr_t)at;
	call(AMDKFD_IOC_ALLOC_MEMORY_OF_GPU, &alloc, "allocate", gpu->id);
	map.handle = alloc.handle;
	call(AMDKFD_IOC_MAP_MEMORY_TO_GPU, &map, "map", gpu->id);
	words = mmap(at, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, render, alloc.mmap_offset);
	if (words == MAP_FAILED)
		fail("map a buffer");
	for (uint64_t i = 0; i < size / 16; i++) {
		seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
		words[i] = seed;
	}
	return words;
}

static void start(void)
{
	kfd = open("/dev/kfd", O_RDWR | O_CLOEXEC);
	if (kfd < 0)
		fail("open /dev/kfd");
	for (int g = 0; g < gpu_count; g++) {
		struct gpu *gpu = &gpus[g];
		struct kfd_ioctl_acquire_vm_args vm = { .gpu_id = gpu->id };
		struct kfd_ioctl_create_queue_args queue = { .gpu_id = gpu->id, .ring_size = 4096,
							     .ring_base_address = 0x1000 * (g + 1) };
		struct kfd_ioctl_create_event_args event = { .event_type = 0 };
		char path[64];
		int render;

		snprintf(path, sizeof(path), "/dev/dri/renderD%u", gpu->minor);
		render = open(path, O_RDWR | O_CLOEXEC);
		if (render < 0)
			fail("open %s", path);
		vm.drm_fd = render;
		call(AMDKFD_IOC_ACQUIRE_VM, &vm, "acquire", gpu->id);
		for (int b = 0; b < buffers; b++) {
			gpu->buffers[b] = buffer(gpu, render, gpu->id + 77 * b + 1000003ULL * (self + 1));
			gpu->sums[b] = sum(gpu->buffers[b]);
		}
		if (queues)
			call(AMDKFD_IOC_CREATE_QUEUE, &queue, "create a queue", gpu->id);
		gpu->queue = queue.queue_id;
		call(AMDKFD_IOC_CREATE_EVENT, &event, "create an event", gpu->id);
		gpu->event = event.event_id;
	}
}

static void round_once(int64_t round)
{
	for (int g = 0; g < gpu_count; g++) {
		struct gpu *gpu = &gpus[g];
		struct kfd_ioctl_update_queue_args run = { .queue_id = gpu->queue, .ring_size = 4096,
							   .ring_base_address = 0x1000 * (g + 1) };
		struct kfd_ioctl_set_event_args event = { .event_id = gpu->event };

		if (queues)
			call(AMDKFD_IOC_UPDATE_QUEUE, &run, "run a queue", gpu->id);
		call(AMDKFD_IOC_SET_EVENT, &event, "set an event", gpu->id);
		for (int b = 0; b < buffers; b++) {
			uint64_t found = sum(gpu->buffers[b]);

			errno = 0;
			if (found != gpu->sums[b])
				fail("buffer %d of GPU %#x: sum %#" PRIx64 ", not %#" PRIx64, b, gpu->id, found, gpu->sums[b]);
			gpu->buffers[b][size / 8 - 1] = round + 1;
			gpu->sums[b] = sum(gpu->buffers[b]);
		}
	}
}

int main(int argc, char **argv)
{
	int option;

	setvbuf(stdout, NULL, _IOLBF, 0);
	while ((option = getopt(argc, argv, "m:b:p:n")) > 0)
		switch (option) {
		case 'm': size = strtoull(optarg, NULL, 0) << 20; break;
		case 'b': buffers = atoi(optarg); break;
		case 'p': processes = atoi(optarg); break;
		case 'n': queues = 0; break;
		default: return 2;
		}
	if (!size || buffers < 1 || buffers > MAX_BUFFERS || processes < 1 || processes > 16)
		return 2;
	find_gpus();
	rounds = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	/* A process of the KFD's is one that opens it: so before. */
	for (int p = 1; p < processes && !self; p++)
		if (!fork()) {
			self = p;
			prctl(PR_SET_PDEATHSIG, SIGKILL);
		}
	start();
	for (int64_t round = 0;; round++) {
		int64_t least = round;

		round_once(round);
		rounds[self] = round + 1;
		/* Nobody is more than a few rounds ahead of the slowest. */
		for (;;) {
			least = round + 1;
			for (int p = 0; p < processes; p++)
				if (rounds[p] < least)
					least = rounds[p];
			if (least > round - 3)
				break;
			usleep(20000);
		}
		if (!self)
			printf("%" PRId64 "\n", round);
		if (!self && waitpid(-1, NULL, WNOHANG) > 0) {
			errno = 0;
			fail("another process has ended");
		}
		usleep(100000);
	}
}
