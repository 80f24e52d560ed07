/*
 * A stand-in for one of CRIU's GPU plugins: it loads like the real one, and records its start, its environment and the
 * hooks that are called in /run/standin/log. An open /dev/kfd is dumped as the file that /run/standin/kfd.img holds, and
 * opened again at a restore. While /run/standin/loop is there, the restore of a file does not end, as CRIU's own amdgpu
 * plugin does not for some topologies.
 *
 * cc -shared -fPIC -DNAME='"amdgpu_plugin"' [-DVERSION=0x300] [-DHOOKS=99] [-DWANTS=symbol] plugin.c
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#ifndef VERSION
#define VERSION 0x200
#endif
#ifndef HOOKS
#define HOOKS 12
#endif
#define RUN "/run/standin/"

extern char **environ;
extern int criu_get_image_dir(void);
extern int add_inventory_plugin(const char *) __attribute__((weak));
extern _Bool check_and_remove_inventory_plugin(const char *, size_t) __attribute__((weak));
#ifdef WANTS
extern int WANTS(void);
#endif

static int restoring, looping;

static void record(const char *what, const char *more)
{
	FILE *log = fopen(RUN "log", "a");
	if (!log)
		return; /* in a container's mount namespace there is none */
	fprintf(log, "%s %s%s%s\n", NAME, what, *more ? " " : "", more);
	fclose(log);
}

static int start(int stage)
{
	static const char *const stages[] = { "dump", "pre-dump", "restore" };

#ifdef WANTS
	if (stage > 9)
		return WANTS();
#endif
	record("init", stages[stage % 3]);
	for (char **one = environ; *one; one++)
		if (!strncmp(*one, "KFD_", 4))
			record("env", *one);
	restoring = stage == 2;
	if (restoring && check_and_remove_inventory_plugin) /* CRIU wants to know that the image's plugin is there */
		check_and_remove_inventory_plugin(NAME, sizeof(NAME) - 1);
	looping = restoring && access(RUN "loop", F_OK) == 0;
	return 0;
}

static void end(int stage, int code)
{
	record("exit", code ? "failed" : "done");
}

static int dump_file(int fd, int id)
{
	char name[64], bytes[65536];
	struct stat st;
	int from, to, n;

	(void)id;
	snprintf(name, sizeof(name), "/proc/self/fd/%d", fd);
	n = readlink(name, bytes, sizeof(bytes) - 1);
	if (n < 0 || fstat(fd, &st))
		return -errno;
	bytes[n] = 0;
	if (strcmp(bytes, "/dev/kfd"))
		return -ENOTSUP;
	record("hook", "DUMP_EXT_FILE /dev/kfd");
	snprintf(name, sizeof(name), "amdgpu-kfd-%d.img", id);
	to = openat(criu_get_image_dir(), name, O_WRONLY | O_CREAT | O_TRUNC, 0600);
	from = open(RUN "kfd.img", O_RDONLY);
	if (to < 0)
		return -errno;
	while (from >= 0 && (n = read(from, bytes, sizeof(bytes))) > 0)
		if (write(to, bytes, n) != n)
			return -EIO;
	close(from);
	close(to);
	/* The memory of kfd.py's GPU: none. */
	snprintf(name, sizeof(name), "amdgpu-pages-%d-%04x.img", id, 1001);
	to = openat(criu_get_image_dir(), name, O_WRONLY | O_CREAT | O_TRUNC, 0600);
	if (to < 0 || write(to, &(uint64_t){ 0 }, 8) != 8)
		return -EIO;
	close(to);
	if (add_inventory_plugin && add_inventory_plugin(NAME))
		return -EIO;
	return 0;
}

static int restore_file(int id)
{
	(void)id;
	while (looping)
		sleep(1);
	return open("/dev/kfd", O_RDWR | O_CLOEXEC);
}

static int resume(int pid)
{
	(void)pid;
	record("hook", "RESUME_DEVICES_LATE");
	return -ENOTSUP;
}

struct {
	const char *name;
	int (*init)(int);
	void (*exit)(int, int);
	unsigned int version, max_hooks;
	void *hooks[HOOKS];
} CR_PLUGIN_DESC = {
	.name = NAME, .init = start, .exit = end, .version = VERSION, .max_hooks = HOOKS,
	.hooks = { [2] = dump_file, [3] = restore_file, [9] = resume },
};
