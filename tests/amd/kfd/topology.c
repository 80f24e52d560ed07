// SPDX-License-Identifier: GPL-2.0 OR MIT
/* Reads the description of a machine (tests/amd/machines) and shows it in sysfs as the KFD does. */
#include "mock_kfd.h"
#include <linux/kernel_read_file.h>
#include <linux/slab.h>
#include <linux/vmalloc.h>

#define MAX_TEXT 4096
#define MAX_DIRS 2048

struct node {
	u32 id, gpu_id;
	int gpu; /* index, or -1 */
	char properties[MAX_TEXT];
	u64 heap, bank;
	int links;
	u32 link_type[MAX_NODES], link_to[MAX_NODES];
};

static struct node *nodes;
static int node_count;

/* ---- the description ---- */

static void set_property(char *text, const char *name, u64 value)
{
	char *line = text, line_start[64];
	size_t length;
	static char rest[MAX_TEXT]; /* one thread loads the module */

	snprintf(line_start, sizeof(line_start), "%s ", name);
	length = strlen(line_start);
	while (*line && strncmp(line, line_start, length)) {
		line = strchr(line, '\n');
		if (!line)
			return;
		line++;
	}
	rest[0] = 0;
	if (*line) { /* it is there already: replaced in its place */
		char *end = strchr(line, '\n');

		strscpy(rest, end + 1, sizeof(rest));
	}
	snprintf(line, MAX_TEXT - (line - text), "%s%llu\n%s", line_start, value, rest);
}

static int take_properties(char *text, char *words)
{
	char *word;

	while ((word = strsep(&words, " "))) {
		char *value = strchr(word, '=');
		u64 number;

		if (!*word)
			continue;
		if (!value)
			return -EINVAL;
		*value++ = 0;
		if (kstrtou64(value, 10, &number))
			return -EINVAL;
		set_property(text, word, number);
	}
	return 0;
}

static int take_node(char *words, const char *cpus, const char *gpu_properties)
{
	struct node *node = &nodes[node_count];
	int used;

	if (node_count == MAX_NODES || sscanf(words, "%u %u%n", &node->id, &node->gpu_id, &used) != 2)
		return -EINVAL;
	node_count++;
	node->gpu = -1;
	strscpy(node->properties, node->gpu_id ? gpu_properties : cpus, MAX_TEXT);
	if (node->gpu_id) {
		if (gpu_count == MAX_GPUS)
			return -E2BIG;
		node->gpu = gpu_count++;
		gpus[node->gpu].gpu_id = node->gpu_id;
	}
	return take_properties(node->properties, words + used);
}

static int take_links(struct node *node, char *words)
{
	char *word;

	while ((word = strsep(&words, " ")))
		if (*word) {
			if (node->links == MAX_NODES ||
			    sscanf(word, "%u:%u", &node->link_type[node->links], &node->link_to[node->links]) != 2)
				return -EINVAL;
			node->links++;
		}
	return 0;
}

static int take_line(char *line, char *cpus, char *gpu_properties)
{
	struct node *last = node_count ? &nodes[node_count - 1] : NULL;
	char *words = line, *kind = strsep(&words, " ");

	if (!*kind || *kind == '#')
		return 0;
	if (!words)
		return -EINVAL;
	if (!strcmp(kind, "cpus"))
		return take_properties(cpus, words);
	if (!strcmp(kind, "gpus"))
		return take_properties(gpu_properties, words);
	if (!strcmp(kind, "node"))
		return take_node(words, cpus, gpu_properties);
	if (!last)
		return -EINVAL;
	if (!strcmp(kind, "bank")) {
		if (sscanf(words, "%llu %llu", &last->heap, &last->bank) != 2)
			return -EINVAL;
		if (last->gpu >= 0)
			gpus[last->gpu].vram = last->bank;
		return 0;
	}
	return strcmp(kind, "links") ? -EINVAL : take_links(last, words);
}

int topology_read(const char *path)
{
	void *text = NULL;
	char *cursor, *line, *cpus = kzalloc(2 * MAX_TEXT, GFP_KERNEL);
	ssize_t size;
	int ret = -ENOMEM;

	nodes = vzalloc(MAX_NODES * sizeof(*nodes));
	if (!nodes || !cpus)
		goto out;
	size = kernel_read_file_from_path(path, 0, &text, 1 << 20, NULL, READING_FIRMWARE);
	ret = size < 0 ? size : 0;
	if (ret)
		goto out;
	text = kvrealloc(text, size + 1, GFP_KERNEL);
	if (!text) {
		ret = -ENOMEM;
		goto out;
	}
	((char *)text)[size] = 0;
	cursor = text;
	while (!ret && (line = strsep(&cursor, "\n")))
		ret = take_line(line, cpus, cpus + MAX_TEXT);
	if (ret)
		pr_err("mock_kfd: %s: cannot use \"%s\"\n", path, line);
out:
	kvfree(text);
	kfree(cpus);
	return ret;
}

/* ---- sysfs ---- */

struct node_file {
	struct attribute attr;
	const char *text;
	int minor; /* readers whose device cgroup denies this render node get EPERM; -1: all may read */
};

struct dir {
	struct kobject kobj;
	struct node_file files[3];
	char *text; /* freed with it */
};

static struct dir *dirs[MAX_DIRS];
static int dir_count;

static ssize_t show(struct kobject *kobj, struct attribute *attr, char *buf)
{
	struct node_file *file = container_of(attr, struct node_file, attr);

	if (file->minor >= 0 && gpu_hidden(file->minor))
		return -EPERM;
	return sysfs_emit(buf, "%s", file->text);
}

static void release(struct kobject *kobj)
{
	struct dir *dir = container_of(kobj, struct dir, kobj);

	kfree(dir->text);
	kfree(dir);
}

static const struct sysfs_ops ops = { .show = show };
static const struct kobj_type type = { .release = release, .sysfs_ops = &ops };

static struct dir *make_dir(struct kobject *parent, const char *name)
{
	struct dir *dir = kzalloc(sizeof(*dir), GFP_KERNEL);

	if (!dir || dir_count == MAX_DIRS) {
		kfree(dir);
		return NULL;
	}
	if (kobject_init_and_add(&dir->kobj, &type, parent, "%s", name)) {
		kobject_put(&dir->kobj);
		return NULL;
	}
	return dirs[dir_count++] = dir;
}

static struct dir *make_numbered(struct dir *parent, u32 number)
{
	char name[12];

	snprintf(name, sizeof(name), "%u", number);
	return parent ? make_dir(&parent->kobj, name) : NULL;
}

static int make_file(struct dir *dir, int at, const char *name, const char *text, int minor)
{
	struct node_file *file = &dir->files[at];

	if (!text)
		return -ENOMEM;
	sysfs_attr_init(&file->attr);
	file->attr.name = name;
	file->attr.mode = 0444;
	file->text = text;
	file->minor = minor;
	return sysfs_create_file(&dir->kobj, &file->attr);
}

static int make_bank(struct node *node, struct dir *banks, int minor)
{
	struct dir *bank = make_numbered(banks, 0);

	if (!bank)
		return -ENOMEM;
	bank->text = kasprintf(GFP_KERNEL, "heap_type %llu\nsize_in_bytes %llu\nflags 0\nwidth 4096\nmem_clk_max 1600\n",
			       node->heap, node->bank);
	return make_file(bank, 0, "properties", bank->text, minor);
}

static int make_links(struct node *node, struct dir *links, int minor)
{
	for (int i = 0; i < node->links; i++) {
		struct dir *link = make_numbered(links, i);
		int ret;

		if (!link)
			return -ENOMEM;
		link->text = kasprintf(GFP_KERNEL, "type %u\nversion_major 0\nversion_minor 0\nnode_from %u\nnode_to %u\nweight 20\n",
				       node->link_type[i], node->id, node->link_to[i]);
		ret = make_file(link, 0, "properties", link->text, minor);
		if (ret)
			return ret;
	}
	return 0;
}

static int make_node(struct node *node, struct dir *all)
{
	struct dir *dir = make_numbered(all, node->id), *banks, *links;
	int minor = node->gpu < 0 ? -1 : gpus[node->gpu].drm->render->index;
	int ret;

	if (!dir)
		return -ENOMEM;
	if (minor >= 0) /* the node that the kernel has given it, whatever the description says */
		set_property(node->properties, "drm_render_minor", minor);
	dir->text = kasprintf(GFP_KERNEL, "%u\n", node->gpu_id);
	ret = make_file(dir, 0, "gpu_id", dir->text, minor) ?:
	      make_file(dir, 1, "properties", node->properties, minor) ?:
	      make_file(dir, 2, "name", node->gpu_id ? "mock\n" : "", minor);
	if (ret)
		return ret;
	banks = make_dir(&dir->kobj, "mem_banks");
	links = make_dir(&dir->kobj, "io_links");
	if (!banks || !links || !make_dir(&dir->kobj, "caches") || !make_dir(&dir->kobj, "p2p_links"))
		return -ENOMEM;
	if (node->bank)
		ret = make_bank(node, banks, minor);
	return ret ?: make_links(node, links, minor);
}

int topology_start(struct kobject *kfd)
{
	struct dir *topology = make_dir(kfd, "topology"), *all;
	int ret;

	if (!topology)
		return -ENOMEM;
	ret = make_file(topology, 0, "generation_id", "1\n", -1);
	all = make_dir(&topology->kobj, "nodes");
	if (ret || !all)
		return ret ?: -ENOMEM;
	for (int i = 0; !ret && i < node_count; i++)
		ret = make_node(&nodes[i], all);
	return ret;
}

void topology_stop(void)
{
	while (dir_count--)
		kobject_put(&dirs[dir_count]->kobj);
	vfree(nodes);
}
