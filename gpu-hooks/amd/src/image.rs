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

use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};

use super::topology::{KfdProperties, Node, RENDER_FIRST, RENDER_LAST, Topology};

/// Largest image that is read, in bytes. It holds the queues' and buffers' private data, not the VRAM.
pub const MAX_IMAGE: u64 = 256 << 20;
const MAX_NODES: usize = 256;
const MAX_LINKS: usize = 1024;
/// PCI Express (`HSA_IOLINKTYPE_PCIEXPRESS`) and XGMI (`HSA_IOLINK_TYPE_XGMI`).
const LINK_KINDS: [u32; 2] = [2, 11];
const MAX_ENTRY: usize = 64 << 10;
/// `KFD_IOC_ALLOC_MEM_FLAGS_VRAM` and `_GTT` of the kernel's interface: memory of the GPU, and the host's that the driver
/// has allocated. The plugin saves the contents of both.
const ALLOC_VRAM: u32 = 1;
const ALLOC_GTT: u32 = 2;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{file}: {field}: {reason}; the checkpoint is damaged or not of CRIU's amdgpu plugin")]
pub struct KfdImageError {
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
    pub fn add(&mut self, name: &str, bytes: &[u8]) -> Result<bool, KfdImageError> {
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
            topology: host.visible(minors),
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
    pub fn collect(dir: &Path) -> Result<Self, KfdImageError> {
        let io = |file: &str, e: &io::Error| FileField(file).wrong("file", e.to_string());
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
struct FileField<'a>(&'a str);

impl FileField<'_> {
    fn wrong(self, field: impl Into<String>, reason: impl Into<String>) -> KfdImageError {
        KfdImageError {
            file: self.0.to_owned(),
            field: field.into(),
            reason: reason.into(),
        }
    }

    fn missing(self, entry: &str, field: &str) -> KfdImageError {
        self.wrong(format!("{entry}{field}"), "missing")
    }
}

fn contents<'a>(file: FileField<'_>, bytes: &'a [u8]) -> Result<&'a [u8], KfdImageError> {
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

/// A known field: its number, its name, and whether it holds bytes.
type KnownField = (u32, &'static str, bool);

/// Walks a message without keeping it: hands bytes to `each`, and returns the numbers by name. Each number is required.
/// `entry` goes before names in messages.
fn walk(
    file: FileField<'_>,
    entry: &str,
    mut rest: &[u8],
    known: &[KnownField],
    mut each: impl FnMut(&str, &[u8]) -> Result<(), KfdImageError>,
) -> Result<BTreeMap<&'static str, u64>, KfdImageError> {
    let mut numbers = BTreeMap::new();
    let mut last = "the beginning";
    while !rest.is_empty() {
        let wrong =
            |field: &str, reason: String| Err(file.wrong(format!("{entry}{field}"), reason));
        let (tag, wire) = match decode_key(&mut rest) {
            Ok(key) => key,
            Err(e) => return wrong(&format!("after {last}"), e.to_string()),
        };
        let Some((_, name, bytes)) = known.iter().find(|(n, ..)| *n == tag) else {
            if let Err(e) = skip_field(wire, tag, &mut rest, DecodeContext::default()) {
                return wrong(&format!("field {tag}"), e.to_string());
            }
            continue;
        };
        last = name;
        let wanted = match bytes {
            true => WireType::LengthDelimited,
            false => WireType::Varint,
        };
        if wire != wanted {
            return wrong(name, format!("wire type {wire:?} in place of {wanted:?}"));
        }
        let number = match decode_varint(&mut rest) {
            Ok(number) => number,
            Err(e) => return wrong(name, e.to_string()),
        };
        if !bytes {
            numbers.insert(*name, number);
            continue;
        }
        let split = usize::try_from(number)
            .ok()
            .and_then(|n| rest.split_at_checked(n));
        let Some((value, after)) = split else {
            let reason = format!("{number} bytes announced, {} left", rest.len());
            return wrong(name, reason);
        };
        rest = after;
        each(name, value)?;
    }
    let missing = known
        .iter()
        .find(|(_, name, bytes)| !bytes && !numbers.contains_key(name));
    match missing {
        Some((_, name, _)) => Err(file.missing(entry, name)),
        None => Ok(numbers),
    }
}

const KFD_FIELDS: &[KnownField] = &[
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
const BUFFER_FIELDS: &[KnownField] = &[
    (1, "addr", false),
    (2, "size", false),
    (3, "offset", false),
    (4, "alloc_flags", false),
    (5, "gpu_id", false),
];
const LINK_FIELDS: &[KnownField] = &[(1, "type", false), (2, "node_to_id", false)];

/// Of a node: `gds_size_in_kb` stands among the properties, and nothing depends on it.
fn device_fields() -> Vec<KnownField> {
    let mut names = vec!["node_id", "gpu_id", "cpu_cores_count"];
    names.extend(KfdProperties::NAMES);
    names.insert(9, "gds_size_in_kb");
    let numbers = (1..).zip(names).map(|(tag, name)| (tag, name, false));
    numbers.chain([(32, "iolinks", true)]).collect()
}

impl KfdImage {
    /// Parses an image. `name` is for messages; `bytes` is the whole file.
    pub fn parse(name: &str, bytes: &[u8]) -> Result<Self, KfdImageError> {
        let file = FileField(name);
        let (mut nodes, mut ends) = (Vec::new(), BTreeSet::new());
        let (mut buffers, mut vram, mut saved) = (0_u64, BTreeMap::new(), BTreeMap::new());
        let mut private = false;
        let contents = contents(file, bytes)?;
        let numbers = walk(file, "", contents, KFD_FIELDS, |field, entry| {
            match field {
                "device_entries" if nodes.len() == MAX_NODES => {
                    return Err(file.wrong(field, format!("more than {MAX_NODES}")));
                }
                "device_entries" => {
                    nodes.push(device(file, nodes.len(), entry, &mut ends)?);
                }
                "bo_entries" => {
                    buffer(file, buffers, entry, &mut vram, &mut saved)?;
                    buffers += 1;
                }
                _ => private = true,
            }
            Ok(())
        })?;
        if !private {
            return Err(file.missing("", "priv_data"));
        }
        let gpus = nodes.iter().filter(|n| n.is_gpu()).count() as u64;
        for (field, found) in [
            ("num_of_gpus", gpus),
            ("num_of_cpus", nodes.len() as u64 - gpus),
            ("num_of_bos", buffers),
        ] {
            count(file, field, number(&numbers, field), found)?;
        }
        unique(file, &nodes)?;
        // The plugin does not check that a link leads to a node.
        if let Some(end) = ends.iter().find(|to| !nodes.iter().any(|n| n.id == **to)) {
            return Err(file.wrong(
                "iolinks",
                format!("a link to node {end}, which is not there"),
            ));
        }
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
            pid: u32::try_from(number(&numbers, "pid"))
                .map_err(|_| file.wrong("pid", "larger than 32 bits"))?,
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

fn number(numbers: &BTreeMap<&str, u64>, name: &str) -> u64 {
    numbers.get(name).copied().unwrap_or(0)
}

/// The plugin's own numbers have 32 bits.
#[allow(clippy::cast_possible_truncation)]
fn short(numbers: &BTreeMap<&str, u64>, name: &str) -> u32 {
    number(numbers, name) as u32
}

fn count(file: FileField<'_>, field: &str, said: u64, found: u64) -> Result<(), KfdImageError> {
    if said == found {
        return Ok(());
    }
    Err(file.wrong(field, format!("says {said}, and the image has {found}")))
}

/// Node and GPU ids and render minors must tell the nodes apart.
fn unique(file: FileField<'_>, nodes: &[Node]) -> Result<(), KfdImageError> {
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

/// Returns a node; counts where links lead in `ends`.
fn device(
    file: FileField<'_>,
    index: usize,
    bytes: &[u8],
    ends: &mut BTreeSet<u32>,
) -> Result<Node, KfdImageError> {
    let entry = format!("device_entries[{index}].");
    let wrong = |field: &str, reason: String| file.wrong(format!("{entry}{field}"), reason);
    if bytes.len() > MAX_ENTRY {
        return Err(wrong("length", format!("larger than {MAX_ENTRY} bytes")));
    }
    let mut links = 0;
    let numbers = walk(file, &entry, bytes, &device_fields(), |_, link| {
        if links == MAX_LINKS {
            return Err(wrong("iolinks", format!("more than {MAX_LINKS}")));
        }
        let entry = format!("{entry}iolinks[{links}].");
        let link = walk(file, &entry, link, LINK_FIELDS, |_, _| Ok(()))?;
        let kind = short(&link, "type");
        if !LINK_KINDS.contains(&kind) {
            return Err(file.wrong(
                format!("{entry}type"),
                format!("{kind} is neither PCIe nor XGMI {LINK_KINDS:?}"),
            ));
        }
        links += 1;
        ends.insert(short(&link, "node_to_id"));
        Ok(())
    })?;
    let mut node = Node {
        id: short(&numbers, "node_id"),
        gpu_id: short(&numbers, "gpu_id"),
        cpu_cores_count: short(&numbers, "cpu_cores_count"),
        properties: KfdProperties::of(|name| number(&numbers, name)),
        ..Node::default()
    };
    node.properties.vram_public = u32::from(node.properties.vram_public != 0);
    // The plugin reads nothing else of a node with cores.
    if node.cpu_cores_count != 0 {
        if node.is_gpu() {
            return Err(wrong(
                "cpu_cores_count",
                format!("{} for a GPU", node.cpu_cores_count),
            ));
        }
        node.properties = KfdProperties::default();
    }
    let minor = node.render_minor();
    if node.is_gpu() && !(RENDER_FIRST..=RENDER_LAST).contains(&minor) {
        return Err(wrong(
            "drm_render_minor",
            format!("{minor} is none of {RENDER_FIRST} to {RENDER_LAST}"),
        ));
    }
    Ok(node)
}

fn buffer(
    file: FileField<'_>,
    index: u64,
    bytes: &[u8],
    vram: &mut BTreeMap<u32, u64>,
    contents: &mut BTreeMap<u32, u64>,
) -> Result<(), KfdImageError> {
    let entry = format!("bo_entries[{index}].");
    if bytes.len() > MAX_ENTRY {
        let reason = format!("larger than {MAX_ENTRY} bytes");
        return Err(file.wrong(format!("{entry}length"), reason));
    }
    let numbers = walk(file, &entry, bytes, BUFFER_FIELDS, |_, _| Ok(()))?;
    let (size, gpu_id) = (number(&numbers, "size"), short(&numbers, "gpu_id"));
    let flags = short(&numbers, "alloc_flags");
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
    pub fn parse(name: &str, bytes: &[u8]) -> Result<Self, KfdImageError> {
        let file = FileField(name);
        let contents = contents(file, bytes)?;
        let numbers = walk(file, "", contents, &[(1, "gpu_id", false)], |_, _| Ok(()))?;
        match number(&numbers, "gpu_id") {
            0 => Err(file.wrong("gpu_id", "0 is a CPU")),
            n => Ok(Self {
                file: name.to_owned(),
                gpu_id: u32::try_from(n)
                    .map_err(|_| file.wrong("gpu_id", "larger than 32 bits"))?,
            }),
        }
    }
}
