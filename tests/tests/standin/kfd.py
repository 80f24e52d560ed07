"""kfd.py: a KFD topology without a GPU, and the file that CRIU's amdgpu plugin would make of it.

tree DIR GPUS [KEY=VALUE...]   one CPU and that many GPUs (their properties changed), as /sys/class/kfd/kfd/topology shows them
image DIR FILE                 amdgpu-kfd-ID.img of a process that has all of them
"""
import os
import struct
import sys

# Field numbers of kfd_device_entry in CRIU's criu-amdgpu.proto.
FIELDS = dict(cpu_cores_count=3, simd_count=4, mem_banks_count=5, caches_count=6, io_links_count=7, max_waves_per_simd=8,
              lds_size_in_kb=9, gds_size_in_kb=10, num_gws=11, wave_front_size=12, array_count=13,
              simd_arrays_per_engine=14, cu_per_simd_array=15, simd_per_cu=16, max_slots_scratch_cu=17, vendor_id=18,
              device_id=19, domain=20, drm_render_minor=21, hive_id=22, num_sdma_engines=23, num_sdma_xgmi_engines=24,
              num_sdma_queues_per_engine=25, num_cp_queues=26, fw_version=27, capability=28, sdma_fw_version=29)
GPU = dict(cpu_cores_count=0, simd_count=440, mem_banks_count=1, caches_count=5, io_links_count=1, max_waves_per_simd=8,
           lds_size_in_kb=64, gds_size_in_kb=0, num_gws=64, wave_front_size=64, array_count=8, simd_arrays_per_engine=1,
           cu_per_simd_array=16, simd_per_cu=4, max_slots_scratch_cu=32, vendor_id=4098, device_id=29704, domain=0,
           hive_id=0, num_sdma_engines=2, num_sdma_xgmi_engines=3, num_sdma_queues_per_engine=8, num_cp_queues=24,
           fw_version=60, capability=0x200, sdma_fw_version=18, gfx_target_version=90010)
VRAM = 68702699520


def write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)


def lines(values):
    return "".join(f"{key} {value}\n" for key, value in values.items())


def tree(directory, gpus, changes):
    values = dict(GPU, **changes)
    vram = values.pop("vram_size", VRAM)
    cpu = dict.fromkeys(FIELDS, 0) | dict(cpu_cores_count=64, mem_banks_count=1, caches_count=8, io_links_count=gpus)
    for node in range(gpus + 1):
        at = f"{directory}/nodes/{node}"
        gpu = dict(values, drm_render_minor=127 + node, location_id=node << 8, unique_id=node + 1000)
        write(f"{at}/gpu_id", f"{1000 * node + node}\n" if node else "0\n")
        write(f"{at}/name", "aldebaran\n" if node else "\n")
        write(f"{at}/properties", lines(gpu if node else cpu))
        size, heap = (vram, 1) if node else (1 << 36, 0)
        write(f"{at}/mem_banks/0/properties", lines(dict(heap_type=heap, size_in_bytes=size)))
        for link, to in enumerate([0] if node else range(1, gpus + 1)):
            write(f"{at}/io_links/{link}/properties", lines(dict(type=2, node_from=node, node_to=to, weight=20)))


def varint(value):
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def number(field, value):
    return varint(field << 3) + varint(value)


def message(field, text):
    return varint(field << 3 | 2) + varint(len(text)) + text


def read(path):
    with open(path) as file:
        return {key: int(value) for key, value in (line.split() for line in file)}


def device(at, node):
    values = read(f"{at}/properties")
    with open(f"{at}/gpu_id") as file:
        gpu_id = int(file.read())
    text = number(1, node) + number(2, gpu_id)
    for key, field in FIELDS.items():
        text += number(field, values.get(key, 0))
    bank = read(f"{at}/mem_banks/0/properties")
    vram = bank["size_in_bytes"] if bank["heap_type"] else 0
    text += number(30, int(bank["heap_type"] == 1)) + number(31, vram)
    for link in sorted(os.listdir(f"{at}/io_links"), key=int):
        values = read(f"{at}/io_links/{link}/properties")
        text += message(32, number(1, values["type"]) + number(2, values["node_to"]))
    return text


def image(directory, file):
    nodes = sorted(os.listdir(f"{directory}/nodes"), key=int)
    text = number(1, 4711) + number(2, len(nodes) - 1) + number(3, 1)
    for node in nodes:
        text += message(4, device(f"{directory}/nodes/{node}", int(node)))
    text += number(5, 0) + number(7, 0) + number(8, 0) + number(9, 0) + message(10, b"")
    with open(file, "wb") as out:
        out.write(struct.pack("=Q", len(text)) + text)


if sys.argv[1] == "tree":
    tree(sys.argv[2], int(sys.argv[3]), {key: int(value) for key, value in (c.split("=") for c in sys.argv[4:])})
else:
    image(sys.argv[2], sys.argv[3])
