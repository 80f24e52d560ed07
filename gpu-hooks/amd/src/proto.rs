//! Defines the messages of CRIU's amdgpu plugin, with the field numbers of CRIU 4.1.1 and 4.2. All fields are required
//! there; they are optional here so that an error can name a missing one.

use prost::Message;

#[derive(Clone, PartialEq, Message)]
pub(super) struct IoLink {
    #[prost(uint32, optional, tag = "1")]
    pub(super) kind: Option<u32>,
    #[prost(uint32, optional, tag = "2")]
    pub(super) node_to_id: Option<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct DeviceEntry {
    #[prost(uint32, optional, tag = "1")]
    pub(super) node_id: Option<u32>,
    #[prost(uint32, optional, tag = "2")]
    pub(super) gpu_id: Option<u32>,
    #[prost(uint32, optional, tag = "3")]
    pub(super) cpu_cores_count: Option<u32>,
    #[prost(uint32, optional, tag = "4")]
    pub(super) simd_count: Option<u32>,
    #[prost(uint32, optional, tag = "5")]
    pub(super) mem_banks_count: Option<u32>,
    #[prost(uint32, optional, tag = "6")]
    pub(super) caches_count: Option<u32>,
    #[prost(uint32, optional, tag = "7")]
    pub(super) io_links_count: Option<u32>,
    #[prost(uint32, optional, tag = "8")]
    pub(super) max_waves_per_simd: Option<u32>,
    #[prost(uint32, optional, tag = "9")]
    pub(super) lds_size_in_kb: Option<u32>,
    #[prost(uint32, optional, tag = "10")]
    pub(super) gds_size_in_kb: Option<u32>,
    #[prost(uint32, optional, tag = "11")]
    pub(super) num_gws: Option<u32>,
    #[prost(uint32, optional, tag = "12")]
    pub(super) wave_front_size: Option<u32>,
    #[prost(uint32, optional, tag = "13")]
    pub(super) array_count: Option<u32>,
    #[prost(uint32, optional, tag = "14")]
    pub(super) simd_arrays_per_engine: Option<u32>,
    #[prost(uint32, optional, tag = "15")]
    pub(super) cu_per_simd_array: Option<u32>,
    #[prost(uint32, optional, tag = "16")]
    pub(super) simd_per_cu: Option<u32>,
    #[prost(uint32, optional, tag = "17")]
    pub(super) max_slots_scratch_cu: Option<u32>,
    #[prost(uint32, optional, tag = "18")]
    pub(super) vendor_id: Option<u32>,
    #[prost(uint32, optional, tag = "19")]
    pub(super) device_id: Option<u32>,
    #[prost(uint32, optional, tag = "20")]
    pub(super) domain: Option<u32>,
    #[prost(uint32, optional, tag = "21")]
    pub(super) drm_render_minor: Option<u32>,
    #[prost(uint64, optional, tag = "22")]
    pub(super) hive_id: Option<u64>,
    #[prost(uint32, optional, tag = "23")]
    pub(super) num_sdma_engines: Option<u32>,
    #[prost(uint32, optional, tag = "24")]
    pub(super) num_sdma_xgmi_engines: Option<u32>,
    #[prost(uint32, optional, tag = "25")]
    pub(super) num_sdma_queues_per_engine: Option<u32>,
    #[prost(uint32, optional, tag = "26")]
    pub(super) num_cp_queues: Option<u32>,
    #[prost(uint32, optional, tag = "27")]
    pub(super) fw_version: Option<u32>,
    #[prost(uint32, optional, tag = "28")]
    pub(super) capability: Option<u32>,
    #[prost(uint32, optional, tag = "29")]
    pub(super) sdma_fw_version: Option<u32>,
    #[prost(uint32, optional, tag = "30")]
    pub(super) vram_public: Option<u32>,
    #[prost(uint64, optional, tag = "31")]
    pub(super) vram_size: Option<u64>,
    #[prost(message, repeated, tag = "32")]
    pub(super) iolinks: Vec<IoLink>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct BufferEntry {
    #[prost(uint64, optional, tag = "1")]
    pub(super) addr: Option<u64>,
    #[prost(uint64, optional, tag = "2")]
    pub(super) size: Option<u64>,
    #[prost(uint64, optional, tag = "3")]
    pub(super) offset: Option<u64>,
    #[prost(uint32, optional, tag = "4")]
    pub(super) alloc_flags: Option<u32>,
    #[prost(uint32, optional, tag = "5")]
    pub(super) gpu_id: Option<u32>,
}
