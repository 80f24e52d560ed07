//! Reads the images of CRIU's amdgpu plugin: `amdgpu-kfd-<id>.img` and `amdgpu-renderD-<id>.img`.
//!
//! Each begins with the length of its contents as an 8-byte integer of the machine that wrote it; the contents are a
//! protobuf message. Field numbers are those of `criu-amdgpu.proto` in CRIU 4.1.1 and 4.2. All fields of the plugin's
//! messages are required, so a missing one means a damaged file. Images come from strangers: sizes and counts are
//! bounded, and the buffers and private data of a process are counted, not kept.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use prost::Message;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};

use super::proto::{BufferEntry, DeviceEntry};
use super::topology::{
    LINK_PCIE, LINK_XGMI, Link, Node, Properties, RENDER_FIRST, RENDER_LAST, Topology,
};

/// Largest image that is read, in bytes. It holds the queues' and buffers' private data, not the VRAM.
pub const MAX_IMAGE: u64 = 256 << 20;
const MAX_NODES: usize = 256;
const MAX_LINKS: usize = 1024;
const MAX_ENTRY: usize = 64 << 10;
/// `KFD_IOC_ALLOC_MEM_FLAGS_VRAM` and `_GTT` of the kernel's interface: memory of the GPU, and the host's that the driver
/// has allocated. The plugin saves the contents of both.
const ALLOC_VRAM: u32 = 1;
const ALLOC_GTT: u32 = 2;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{file}: {field}: {reason}; the checkpoint is damaged or not of CRIU's amdgpu plugin")]
pub struct ImageError {
    pub file: String,
    pub field: String,
    pub reason: String,
}

/// `amdgpu-kfd-<id>.img`: the GPU state of one process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KfdImage {
    pub file: String,
    pub pid: u32,
    /// The CPUs and GPUs that it saw, in the image's order.
    pub topology: Topology,
    pub buffers: u64,
    /// VRAM of its buffers in bytes, by `gpu_id`.
    pub vram: BTreeMap<u32, u64>,
    /// What the plugin must have saved of its buffers, VRAM and GTT, in bytes, by `gpu_id`.
    pub contents: BTreeMap<u32, u64>,
}

/// `amdgpu-renderD-<id>.img`: an open render node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderImage {
    pub file: String,
    pub gpu_id: u32,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Images {
    /// One a process, by file name.
    pub kfd: Vec<KfdImage>,
    /// One an open render node, by file name.
    pub render: Vec<RenderImage>,
}

pub fn is_image(name: &str) -> bool {
    numbered(name, "amdgpu-kfd-") || numbered(name, "amdgpu-renderD-")
}

/// `amdgpu-pages-<id>-<gpu_id>.img`: the contents of a process's buffers on one GPU.
pub fn is_pages(name: &str) -> bool {
    let middle = name
        .strip_prefix("amdgpu-pages-")
        .and_then(|n| n.strip_suffix(".img"));
    middle
        .and_then(|n| n.split_once('-'))
        .is_some_and(|(id, gpu)| {
            !id.is_empty()
                && id.bytes().all(|b| b.is_ascii_digit())
                && (1..=8).contains(&gpu.len())
                && gpu.bytes().all(|b| b.is_ascii_hexdigit())
        })
}

fn numbered(name: &str, prefix: &str) -> bool {
    name.strip_prefix(prefix)
        .and_then(|n| n.strip_suffix(".img"))
        .is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
}

impl Images {
    /// Parses a file of a checkpoint, if it is one of the plugin's; returns `false` if not.
    pub fn add(&mut self, name: &str, bytes: &[u8]) -> Result<bool, ImageError> {
        if numbered(name, "amdgpu-kfd-") {
            self.kfd.push(KfdImage::parse(name, bytes)?);
            self.kfd.sort_by(|a, b| a.file.cmp(&b.file));
        } else if numbered(name, "amdgpu-renderD-") {
            self.render.push(RenderImage::parse(name, bytes)?);
            self.render.sort_by(|a, b| a.file.cmp(&b.file));
        } else {
            return Ok(false);
        }
        Ok(true)
    }

    /// What the plugin will write of a container with these render minors on this machine, as far as the choice of GPUs
    /// depends on it. Several processes of a container see the same.
    pub fn foreseen(host: &Topology, minors: &[u32]) -> Self {
        let image = KfdImage {
            file: "amdgpu-kfd-0.img".into(),
            pid: 0,
            topology: host.visible(minors).recorded(),
            buffers: 0,
            vram: BTreeMap::new(),
            contents: BTreeMap::new(),
        };
        Self {
            kfd: vec![image],
            render: Vec::new(),
        }
    }

    /// Reads the images in a directory. The error is that of the first bad one, by name.
    pub fn collect(dir: &Path) -> Result<Self, ImageError> {
        let io = |file: &str, e: &io::Error| Field(file).wrong("file", e.to_string());
        let mut names = Vec::new();
        for entry in dir.read_dir().map_err(|e| io(&dir.to_string_lossy(), &e))? {
            let entry = entry.map_err(|e| io(&dir.to_string_lossy(), &e))?;
            names.extend(entry.file_name().into_string().ok().filter(|n| is_image(n)));
        }
        names.sort();
        let mut images = Self::default();
        for name in names {
            let mut bytes = Vec::new();
            File::open(dir.join(&name))
                .and_then(|f| f.take(MAX_IMAGE + 1).read_to_end(&mut bytes))
                .map_err(|e| io(&name, &e))?;
            images.add(&name, &bytes)?;
        }
        Ok(images)
    }
}

#[derive(Clone, Copy)]
struct Field<'a>(&'a str);

impl Field<'_> {
    fn wrong(self, field: impl Into<String>, reason: impl Into<String>) -> ImageError {
        ImageError {
            file: self.0.to_owned(),
            field: field.into(),
            reason: reason.into(),
        }
    }

    fn need<T>(self, entry: &str, field: &str, value: Option<T>) -> Result<T, ImageError> {
        value.ok_or_else(|| self.wrong(format!("{entry}{field}"), "missing"))
    }
}

fn contents<'a>(file: Field<'_>, bytes: &'a [u8]) -> Result<&'a [u8], ImageError> {
    if bytes.len() as u64 > MAX_IMAGE {
        return Err(file.wrong(
            "length",
            format!("the file is larger than {MAX_IMAGE} bytes"),
        ));
    }
    let Some((head, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(file.wrong(
            "length",
            format!("the file has {} of its first 8 bytes", bytes.len()),
        ));
    };
    let (length, here) = (u64::from_ne_bytes(*head), rest.len() as u64);
    if length == here {
        return Ok(rest);
    }
    let swapped = length.swap_bytes() == here;
    Err(file.wrong(
        "length",
        if swapped {
            "written on a machine of the other byte order".to_owned()
        } else {
            format!("{length} bytes of contents announced, {here} there")
        },
    ))
}

enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

/// Walks a message without keeping it. `names` gives the known fields: number, name, and whether it holds bytes.
fn walk<'a>(
    file: Field<'_>,
    mut rest: &'a [u8],
    names: &[(u32, &str, bool)],
    mut each: impl FnMut(u32, Value<'a>) -> Result<(), ImageError>,
) -> Result<(), ImageError> {
    let mut last = "the beginning";
    while !rest.is_empty() {
        let (tag, wire) = decode_key(&mut rest)
            .map_err(|e| file.wrong(format!("after {last}"), e.to_string()))?;
        let Some((_, name, bytes)) = names.iter().find(|(n, ..)| *n == tag) else {
            skip_field(wire, tag, &mut rest, DecodeContext::default())
                .map_err(|e| file.wrong(format!("field {tag}"), e.to_string()))?;
            continue;
        };
        last = name;
        let wanted = if *bytes {
            WireType::LengthDelimited
        } else {
            WireType::Varint
        };
        if wire != wanted {
            return Err(file.wrong(*name, format!("wire type {wire:?} in place of {wanted:?}")));
        }
        let number = decode_varint(&mut rest).map_err(|e| file.wrong(*name, e.to_string()))?;
        if !bytes {
            each(tag, Value::Number(number))?;
            continue;
        }
        let split = usize::try_from(number)
            .ok()
            .and_then(|n| rest.split_at_checked(n));
        let Some((value, after)) = split else {
            return Err(file.wrong(
                *name,
                format!("{number} bytes announced, {} left", rest.len()),
            ));
        };
        rest = after;
        each(tag, Value::Bytes(value))?;
    }
    Ok(())
}

const KFD_FIELDS: &[(u32, &str, bool)] = &[
    (1, "pid", false),
    (2, "num_of_gpus", false),
    (3, "num_of_cpus", false),
    (4, "device_entries", true),
    (5, "num_of_bos", false),
    (6, "bo_entries", true),
    (7, "num_of_objects", false),
    (8, "shared_mem_size", false),
    (9, "shared_mem_magic", false),
    (10, "priv_data", true),
];

impl KfdImage {
    /// Parses an image. `name` is for messages; `bytes` is the whole file.
    pub fn parse(name: &str, bytes: &[u8]) -> Result<Self, ImageError> {
        let file = Field(name);
        let mut numbers: BTreeMap<u32, u64> = BTreeMap::new();
        let mut nodes = Vec::new();
        let (mut buffers, mut vram, mut saved) = (0_u64, BTreeMap::new(), BTreeMap::new());
        let mut private = None;
        walk(file, contents(file, bytes)?, KFD_FIELDS, |tag, value| {
            match (tag, value) {
                (4, Value::Bytes(entry)) => {
                    if nodes.len() == MAX_NODES {
                        return Err(file.wrong("device_entries", format!("more than {MAX_NODES}")));
                    }
                    nodes.push(device(file, nodes.len(), entry)?);
                }
                (6, Value::Bytes(entry)) => {
                    buffer(file, buffers, entry, &mut vram, &mut saved)?;
                    buffers += 1;
                }
                (10, Value::Bytes(data)) => private = Some(data.len()),
                (tag, Value::Number(n)) => {
                    numbers.insert(tag, n);
                }
                _ => {}
            }
            Ok(())
        })?;
        for (tag, field, bytes) in KFD_FIELDS {
            if !bytes && !numbers.contains_key(tag) {
                return Err(file.wrong(*field, "missing"));
            }
        }
        file.need("", "priv_data", private)?;
        let number = |tag: u32| numbers.get(&tag).copied().unwrap_or(0);
        count(
            file,
            "num_of_gpus",
            number(2),
            nodes.iter().filter(|n| n.is_gpu()).count() as u64,
        )?;
        count(
            file,
            "num_of_cpus",
            number(3),
            nodes.iter().filter(|n| !n.is_gpu()).count() as u64,
        )?;
        count(file, "num_of_bos", number(5), buffers)?;
        unique(file, &nodes)?;
        if let Some(gpu_id) = saved
            .keys()
            .find(|id| !nodes.iter().any(|n| n.gpu_id == **id))
        {
            return Err(file.wrong(
                "bo_entries",
                format!("a buffer on GPU {gpu_id:#06x}, which device_entries has not"),
            ));
        }
        Ok(Self {
            file: name.to_owned(),
            pid: u32::try_from(number(1)).map_err(|_| file.wrong("pid", "larger than 32 bits"))?,
            topology: Topology {
                nodes,
                unreadable: Vec::new(),
            },
            buffers,
            vram,
            contents: saved,
        })
    }
}

fn count(file: Field<'_>, field: &str, said: u64, found: u64) -> Result<(), ImageError> {
    if said == found {
        return Ok(());
    }
    Err(file.wrong(field, format!("says {said}, and the image has {found}")))
}

/// Node and GPU ids and render minors must tell the nodes apart.
fn unique(file: Field<'_>, nodes: &[Node]) -> Result<(), ImageError> {
    let (mut ids, mut gpus, mut minors) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for (i, node) in nodes.iter().enumerate() {
        let twice = |field: &str, n: u32| {
            Err(file.wrong(
                format!("device_entries[{i}].{field}"),
                format!("{n} a second time"),
            ))
        };
        if !ids.insert(node.id) {
            return twice("node_id", node.id);
        }
        if !node.is_gpu() {
            continue;
        }
        if !gpus.insert(node.gpu_id) {
            return twice("gpu_id", node.gpu_id);
        }
        if !minors.insert(node.render_minor()) {
            return twice("drm_render_minor", node.render_minor());
        }
    }
    Ok(())
}

fn device(file: Field<'_>, index: usize, bytes: &[u8]) -> Result<Node, ImageError> {
    let entry = format!("device_entries[{index}].");
    let wrong = |field: &str, reason: String| file.wrong(format!("{entry}{field}"), reason);
    if bytes.len() > MAX_ENTRY {
        return Err(wrong("length", format!("larger than {MAX_ENTRY} bytes")));
    }
    let e = DeviceEntry::decode(bytes).map_err(|e| wrong("fields", e.to_string()))?;
    if e.iolinks.len() > MAX_LINKS {
        return Err(wrong("iolinks", format!("more than {MAX_LINKS}")));
    }
    macro_rules! need {
        ($name:ident) => {
            file.need(&entry, stringify!($name), e.$name)?
        };
    }
    need!(gds_size_in_kb);
    let mut node = Node {
        id: need!(node_id),
        gpu_id: need!(gpu_id),
        cpu_cores_count: need!(cpu_cores_count),
        properties: Properties {
            simd_count: need!(simd_count),
            mem_banks_count: need!(mem_banks_count),
            caches_count: need!(caches_count),
            io_links_count: need!(io_links_count),
            max_waves_per_simd: need!(max_waves_per_simd),
            lds_size_in_kb: need!(lds_size_in_kb),
            num_gws: need!(num_gws),
            wave_front_size: need!(wave_front_size),
            array_count: need!(array_count),
            simd_arrays_per_engine: need!(simd_arrays_per_engine),
            cu_per_simd_array: need!(cu_per_simd_array),
            simd_per_cu: need!(simd_per_cu),
            max_slots_scratch_cu: need!(max_slots_scratch_cu),
            vendor_id: need!(vendor_id),
            device_id: need!(device_id),
            domain: need!(domain),
            drm_render_minor: need!(drm_render_minor),
            hive_id: need!(hive_id),
            num_sdma_engines: need!(num_sdma_engines),
            num_sdma_xgmi_engines: need!(num_sdma_xgmi_engines),
            num_sdma_queues_per_engine: need!(num_sdma_queues_per_engine),
            num_cp_queues: need!(num_cp_queues),
            fw_version: need!(fw_version),
            capability: need!(capability),
            sdma_fw_version: need!(sdma_fw_version),
            vram_public: u32::from(need!(vram_public) != 0),
            vram_size: need!(vram_size),
        },
        ..Node::default()
    };
    // The plugin reads nothing else of a node with cores.
    if node.cpu_cores_count != 0 {
        if node.is_gpu() {
            return Err(wrong(
                "cpu_cores_count",
                format!("{} for a GPU", node.cpu_cores_count),
            ));
        }
        node.properties = Properties::default();
    }
    let minor = node.render_minor();
    if node.is_gpu() && !(RENDER_FIRST..=RENDER_LAST).contains(&minor) {
        return Err(wrong(
            "drm_render_minor",
            format!("{minor} is none of {RENDER_FIRST} to {RENDER_LAST}"),
        ));
    }
    for (i, link) in e.iolinks.iter().enumerate() {
        let entry = format!("{entry}iolinks[{i}].");
        let kind = file.need(&entry, "type", link.kind)?;
        if kind != LINK_PCIE && kind != LINK_XGMI {
            return Err(file.wrong(
                format!("{entry}type"),
                format!("{kind} is neither PCIe ({LINK_PCIE}) nor XGMI ({LINK_XGMI})"),
            ));
        }
        node.links.push(Link {
            kind,
            to: file.need(&entry, "node_to_id", link.node_to_id)?,
        });
    }
    Ok(node)
}

fn buffer(
    file: Field<'_>,
    index: u64,
    bytes: &[u8],
    vram: &mut BTreeMap<u32, u64>,
    contents: &mut BTreeMap<u32, u64>,
) -> Result<(), ImageError> {
    let entry = format!("bo_entries[{index}].");
    let e = bytes
        .get(..bytes.len().min(MAX_ENTRY))
        .filter(|b| b.len() == bytes.len())
        .ok_or_else(|| {
            file.wrong(
                format!("{entry}length"),
                format!("larger than {MAX_ENTRY} bytes"),
            )
        })
        .and_then(|b| {
            BufferEntry::decode(b).map_err(|e| file.wrong(format!("{entry}fields"), e.to_string()))
        })?;
    file.need(&entry, "addr", e.addr)?;
    let size = file.need(&entry, "size", e.size)?;
    file.need(&entry, "offset", e.offset)?;
    let flags = file.need(&entry, "alloc_flags", e.alloc_flags)?;
    let gpu_id = file.need(&entry, "gpu_id", e.gpu_id)?;
    let add = |sums: &mut BTreeMap<u32, u64>| {
        let sum = sums.entry(gpu_id).or_insert(0_u64);
        *sum = sum.saturating_add(size);
    };
    if flags & ALLOC_VRAM != 0 {
        add(vram);
    }
    if flags & (ALLOC_VRAM | ALLOC_GTT) != 0 {
        add(contents);
    }
    Ok(())
}

impl RenderImage {
    /// Parses an image. `name` is for messages; `bytes` is the whole file.
    pub fn parse(name: &str, bytes: &[u8]) -> Result<Self, ImageError> {
        let file = Field(name);
        let mut gpu_id = None;
        walk(
            file,
            contents(file, bytes)?,
            &[(1, "gpu_id", false)],
            |_, value| {
                if let Value::Number(n) = value {
                    gpu_id = Some(n);
                }
                Ok(())
            },
        )?;
        match file.need("", "gpu_id", gpu_id)? {
            0 => Err(file.wrong("gpu_id", "0 is a CPU")),
            n => Ok(Self {
                file: name.to_owned(),
                gpu_id: u32::try_from(n)
                    .map_err(|_| file.wrong("gpu_id", "larger than 32 bits"))?,
            }),
        }
    }
}
