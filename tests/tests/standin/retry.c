/* A probe in place of cryopod_nvidia.so: it loads that from beside itself, passes everything on, and tells in
 * /run/retry what the plugin makes of RESTORE_EXT_FILE's second argument: "true" goes in, the line says what it was
 * after. CRIU 4.3 hands the argument over, and gets what the plugin wrote.
 *
 * cc -shared -fPIC retry.c
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define HOOKS 12
#define RESTORE_EXT_FILE 3

struct descriptor {
	const char *name;
	int (*init)(int stage);
	void (*exit)(int stage, int ret);
	uint32_t version, max_hooks;
	void *hooks[HOOKS];
};

struct descriptor CR_PLUGIN_DESC;
static int (*real)(int id, bool *retry);

static int restore_file(int id, bool *retry)
{
	bool mine = true;
	int fd = real(id, &mine);
	FILE *said = fopen("/run/retry", "a");

	if (said) {
		fprintf(said, "%s\n", mine ? "true" : "false");
		fclose(said);
	}
	if (dlsym(RTLD_DEFAULT, "criu_plugin_get_options"))
		*retry = mine;
	return fd;
}

__attribute__((constructor)) static void load(void)
{
	char path[PATH_MAX];
	Dl_info info;
	void *plugin, *descriptor = NULL;

	if (!dladdr((void *)load, &info))
		return;
	/* Not *.so: CRIU would load it too. In the same directory: there is its configuration. */
	snprintf(path, sizeof(path), "%.*s/real", (int)(strrchr(info.dli_fname, '/') - info.dli_fname), info.dli_fname);
	if (symlink("/opt/build/libcryopod_nvidia.so", path)) {}
	plugin = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (plugin)
		descriptor = dlsym(plugin, "CR_PLUGIN_DESC");
	if (!descriptor)
		return;
	memcpy(&CR_PLUGIN_DESC, descriptor, sizeof(CR_PLUGIN_DESC));
	real = (int (*)(int, bool *))CR_PLUGIN_DESC.hooks[RESTORE_EXT_FILE];
	CR_PLUGIN_DESC.hooks[RESTORE_EXT_FILE] = (void *)restore_file;
}
