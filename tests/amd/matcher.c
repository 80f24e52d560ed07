/*
 * matcher: asks the GPU matcher of CRIU's amdgpu plugin, linked in unchanged, for its choice. Reads pairs of
 * topologies as numbers from standard input, writes a line each: "picks SRC:DEST...", "refuses", or "breaks WHY".
 *
 *   pair    = switches, checkpoint, host    switches: bits in the order of `switches` below
 *   system  = number of nodes, nodes
 *   node    = id, gpu_id, cpu_cores_count, the properties in the order of `take`, number of links, links (type, to)
 *
 * The plugin's search crashes on some pairs and never ends on others. A process answers until it is lost to one; the
 * next goes on behind it. The input must be a file.
 */
#include <inttypes.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/list.h"
#include "amdgpu_plugin_util.h"
#include "amdgpu_plugin_topology.h"

enum { BUDGET = 200000, ENDLESS = 3, LIMIT = 500000 /* microseconds of its processor */ };

static unsigned long comparisons;

/* CRIU's log. The plugin says when it compares two nodes. */
void print_on_level(unsigned int level, const char *format, ...)
{
	(void)level;
	if (strstr(format, "Evaluating mapping nodes") && ++comparisons > BUDGET)
		_exit(ENDLESS);
}

static uint64_t number(void)
{
	uint64_t n;

	if (scanf("%" SCNu64, &n) != 1) {
		fputs("matcher: the input ends within a pair\n", stderr);
		exit(2);
	}
	return n;
}

static void take(struct tp_node *n)
{
	n->simd_count = number();
	n->mem_banks_count = number();
	n->caches_count = number();
	n->io_links_count = number();
	n->max_waves_per_simd = number();
	n->lds_size_in_kb = number();
	n->num_gws = number();
	n->wave_front_size = number();
	n->array_count = number();
	n->simd_arrays_per_engine = number();
	n->cu_per_simd_array = number();
	n->simd_per_cu = number();
	n->max_slots_scratch_cu = number();
	n->vendor_id = number();
	n->device_id = number();
	n->domain = number();
	n->drm_render_minor = number();
	n->hive_id = number();
	n->num_sdma_engines = number();
	n->num_sdma_xgmi_engines = number();
	n->num_sdma_queues_per_engine = number();
	n->num_cp_queues = number();
	n->fw_version = number();
	n->capability = number();
	n->sdma_fw_version = number();
	n->vram_public = number();
	n->vram_size = number();
}

static void read_system(struct tp_system *sys)
{
	topology_init(sys);
	for (uint64_t nodes = number(); nodes; nodes--) {
		uint32_t id = number(), gpu_id = number();
		struct tp_node *node = sys_add_node(sys, id, gpu_id);

		node->cpu_cores_count = number();
		take(node);
		for (uint64_t links = number(); links; links--) {
			uint32_t type = number(), to = number();

			node_add_iolink(node, type, to);
		}
	}
}

static void answer(struct tp_system *src, struct tp_system *dest)
{
	struct itimerval limit = { .it_value.tv_usec = LIMIT };
	struct device_maps maps;
	struct tp_node *node;
	bool refused;

	setitimer(ITIMER_VIRTUAL, &limit, NULL);
	comparisons = 0;
	maps_init(&maps);
	refused = set_restore_gpu_maps(src, dest, &maps);
	/* The plugin's restore_devices() looks at what it was given, and refuses then. */
	list_for_each_entry(node, &src->nodes, listm_system)
		if (NODE_IS_GPU(node) && !refused)
			refused = !maps_get_dest_gpu(&maps, node->gpu_id);
	if (refused) {
		puts("refuses");
		return;
	}
	printf("picks");
	list_for_each_entry(node, &src->nodes, listm_system)
		if (NODE_IS_GPU(node))
			printf(" %u:%u", node->gpu_id, maps_get_dest_gpu(&maps, node->gpu_id));
	puts("");
}

/* Answers from the pair at *next on; *next is then where the pair after this one begins. */
static void answer_all(long *next)
{
	bool *switches[] = { &kfd_fw_version_check, &kfd_sdma_fw_version_check, &kfd_caches_count_check,
			     &kfd_num_gws_check,    &kfd_vram_size_check,	&kfd_numa_check,
			     &kfd_capability_check };
	uint64_t on;

	fseek(stdin, *next, SEEK_SET);
	while (scanf("%" SCNu64, &on) == 1) {
		struct tp_system src, dest;

		for (int i = 0; i < 7; i++)
			*switches[i] = on >> i & 1;
		read_system(&src);
		read_system(&dest);
		*next = ftell(stdin);
		answer(&src, &dest);
		fflush(stdout);
	}
}

int main(void)
{
	long *next = mmap(NULL, sizeof(*next), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	for (;;) {
		long before = *next;
		int status;
		pid_t pid = fork();

		if (!pid) {
			answer_all(next);
			_exit(0);
		}
		if (pid < 0 || waitpid(pid, &status, 0) < 0) {
			perror("matcher");
			return 1;
		}
		if (WIFEXITED(status) && !WEXITSTATUS(status))
			return 0;
		if (*next == before)
			return 1;
		if (WIFEXITED(status) && WEXITSTATUS(status) == ENDLESS)
			puts("breaks: it compares for ever");
		else if (WIFSIGNALED(status) && WTERMSIG(status) == SIGVTALRM)
			puts("breaks: it walks a list for ever");
		else
			puts("breaks: it crashes");
		fflush(stdout);
	}
}
