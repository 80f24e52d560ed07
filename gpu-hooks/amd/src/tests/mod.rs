//! Holds what the tests of the AMD library share: topologies, and an encoder of the plugin's
//! images that knows nothing of the parser.

mod checks;
mod choose;
mod image;
mod saved;
mod topology;

use super::topology::{KfdProperties, Node, Topology};

/// A GPU like an MI250's, at node `id`, with render node `renderD(128 + index)`.
fn gpu(id: u32, gpu_id: u32, index: u32) -> Node {
    Node {
        id,
        gpu_id,
        properties: KfdProperties {
            simd_count: 416,
            mem_banks_count: 1,
            caches_count: 206,
            io_links_count: 8,
            max_waves_per_simd: 8,
            lds_size_in_kb: 64,
            num_gws: 64,
            wave_front_size: 64,
            array_count: 8,
            simd_arrays_per_engine: 1,
            cu_per_simd_array: 14,
            simd_per_cu: 4,
            max_slots_scratch_cu: 32,
            vendor_id: 0x1002,
            device_id: 0x740c,
            domain: 0,
            drm_render_minor: 128 + index,
            hive_id: 0,
            num_sdma_engines: 2,
            num_sdma_xgmi_engines: 3,
            num_sdma_queues_per_engine: 8,
            num_cp_queues: 24,
            fw_version: 80,
            capability: 0x2a9a_f280,
            sdma_fw_version: 8,
            vram_public: 1,
            vram_size: 68_702_699_520,
        },
        ..Node::default()
    }
}

/// `cpus` CPUs at nodes 0.., then `gpus` GPUs.
fn machine(cpus: u32, gpus: u32, first_id: u32) -> Topology {
    let cpu = |id| Node {
        id,
        cpu_cores_count: 64,
        ..Node::default()
    };
    Topology {
        nodes: (0..cpus)
            .map(cpu)
            .chain((0..gpus).map(|i| gpu(cpus + i, first_id + i, i)))
            .collect(),
        unreadable: Vec::new(),
    }
}
