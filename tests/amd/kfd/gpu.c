// SPDX-License-Identifier: GPL-2.0 OR MIT
/* Render nodes: DRM devices with buffers in shared memory. */
#include "mock_kfd.h"
#include <linux/version.h>
#include <drm/drm_drv.h>
#include <drm/drm_gem_shmem_helper.h>
#include <linux/device_cgroup.h>

struct gpu gpus[MAX_GPUS];
int gpu_count;

DEFINE_DRM_GEM_FOPS(render_fops);

static const struct drm_driver render_driver = {
	.driver_features = DRIVER_GEM | DRIVER_RENDER,
	.fops = &render_fops,
	DRM_GEM_SHMEM_DRIVER_OPS,
	.name = "amdgpu",
	.desc = "mock of amdgpu",
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 14, 0)
	.date = "20261101",
#endif
	.major = 3,
	.minor = 61,
};

static int gpu_start(struct gpu *gpu, int at)
{
	int ret;

	gpu->parent = platform_device_register_simple("mock_kfd", at, NULL, 0);
	if (IS_ERR(gpu->parent))
		return PTR_ERR(gpu->parent);
	/* What the shared memory helper maps for a device is never used by one. */
	dma_coerce_mask_and_coherent(&gpu->parent->dev, DMA_BIT_MASK(64));
	gpu->drm = drm_dev_alloc(&render_driver, &gpu->parent->dev);
	if (IS_ERR(gpu->drm)) {
		ret = PTR_ERR(gpu->drm);
		goto parent;
	}
	ret = drm_dev_register(gpu->drm, 0);
	if (!ret)
		return 0;
	drm_dev_put(gpu->drm);
parent:
	platform_device_unregister(gpu->parent);
	return ret;
}

int gpus_start(void)
{
	int started, ret;

	for (started = 0; started < gpu_count; started++) {
		ret = gpu_start(&gpus[started], started);
		if (ret) {
			gpu_count = started;
			gpus_stop();
			return ret;
		}
	}
	return 0;
}

void gpus_stop(void)
{
	while (gpu_count--) {
		drm_dev_unregister(gpus[gpu_count].drm);
		drm_dev_put(gpus[gpu_count].drm);
		platform_device_unregister(gpus[gpu_count].parent);
	}
}

/* Does the device cgroup of whoever asks hide this render node? As in the KFD. */
bool gpu_hidden(int minor)
{
	return devcgroup_check_permission(DEVCG_DEV_CHAR, DRM_MAJOR, minor, DEVCG_ACC_WRITE | DEVCG_ACC_READ);
}

/* The DRM client behind an open render node of this GPU. */
struct drm_file *gpu_file(struct file *file, int gpu)
{
	struct drm_file *client = file->private_data;

	if (file->f_op != &render_fops || client->minor->dev != gpus[gpu].drm)
		return NULL;
	return client;
}
