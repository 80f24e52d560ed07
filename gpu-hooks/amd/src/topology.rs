//! Reads the KFD's topology: CPUs and GPUs as nodes, and their properties. The same types describe this host and
//! an image of CRIU's amdgpu plugin.
//!
//! A node with `gpu_id` 0 is a CPU. Nodes keep the order in which the directory or image lists them, because the plugin's
//! choice depends on it.

use std::collections::BTreeMap;
use std::fmt;
use std::io;

use cryopod_archive::metadata::Gpu;
use cryopod_host::nodes::Vendor;

use cryopod_gpu_plan::gpus::amd_gpus::{TOPOLOGY, pci_address};
use cryopod_host::files::Host;

pub const RENDER_FIRST: u32 = 128;
/// Last minor that the plugin opens as a render node.
pub const RENDER_LAST: u32 = 255;

macro_rules! properties {
    ($($(#[$doc:meta])* $name:ident: $type:ty,)*) => {
        /// The KFD's properties of a GPU, under its names. All 0 for a CPU.
        #[derive(Debug, Clone, Default, PartialEq, Eq)]
        #[allow(missing_docs, reason = "the names are those of the KFD's properties")]
        pub struct KfdProperties {
            $($(#[$doc])* pub $name: $type,)*
        }

        impl KfdProperties {
            /// The names, in the order of the plugin's images.
            pub(super) const NAMES: &[&str] = &[$(stringify!($name)),*];

            /// Takes each from where it stands under its name. As the plugin, keeps the low 32 bits of most.
            #[allow(clippy::cast_possible_truncation, trivial_numeric_casts)]
            pub(super) fn of(number: impl Fn(&str) -> u64) -> Self {
                Self { $($name: number(stringify!($name)) as $type,)* }
            }

            #[cfg(test)]
            pub(super) fn numbers(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name.into())),*]
            }
        }
    };
}

properties! {
    simd_count: u32,
    mem_banks_count: u32,
    caches_count: u32,
    io_links_count: u32,
    max_waves_per_simd: u32,
    lds_size_in_kb: u32,
    num_gws: u32,
    wave_front_size: u32,
    array_count: u32,
    simd_arrays_per_engine: u32,
    cu_per_simd_array: u32,
    simd_per_cu: u32,
    max_slots_scratch_cu: u32,
    vendor_id: u32,
    device_id: u32,
    domain: u32,
    drm_render_minor: u32,
    hive_id: u64,
    num_sdma_engines: u32,
    num_sdma_xgmi_engines: u32,
    num_sdma_queues_per_engine: u32,
    num_cp_queues: u32,
    fw_version: u32,
    capability: u32,
    sdma_fw_version: u32,
    /// 1 if the CPU can see all VRAM, else 0.
    vram_public: u32,
    vram_size: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Node {
    pub id: u32,
    /// The KFD's id of a GPU; 0 for a CPU.
    pub gpu_id: u32,
    /// Cores of a CPU; 0 for a GPU.
    pub cpu_cores_count: u32,
    pub properties: KfdProperties,
    pub pci: Option<String>,
    /// The GPU's unique id, 16 hex digits, or else its PCI address; where known.
    pub unique_id: Option<String>,
}

impl Node {
    pub fn is_gpu(&self) -> bool {
        self.gpu_id != 0
    }

    pub fn render_minor(&self) -> u32 {
        self.properties.drm_render_minor
    }
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.is_gpu() {
            return write!(f, "CPU node {}", self.id);
        }
        write!(
            f,
            "GPU {:#06x} (renderD{}",
            self.gpu_id,
            self.render_minor()
        )?;
        if let Some(pci) = &self.pci {
            write!(f, ", {pci}")?;
        }
        f.write_str(")")
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unreadable {
    pub node: u32,
    pub render_minor: Option<u32>,
    pub what: String,
    /// The plugin gives up on the whole topology because of it; otherwise it skips the node.
    pub stops_plugin: bool,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Topology {
    /// The nodes, in the order of the directory or image.
    pub nodes: Vec<Node>,
    pub unreadable: Vec<Unreadable>,
}

impl Topology {
    /// Reads the host's topology; empty where there is none. Unreadable nodes are listed in [`Topology::unreadable`].
    pub fn read(host: &Host) -> Self {
        let mut topology = Self::default();
        for (id, name) in numbered(host, TOPOLOGY).unwrap_or_default() {
            topology.read_node(host, id, &format!("{TOPOLOGY}/{name}"));
        }
        topology
    }

    fn read_node(&mut self, host: &Host, id: u32, dir: &str) {
        let mut node = Node {
            id,
            ..Node::default()
        };
        let mut trouble = |what: String, render_minor, stops_plugin| {
            self.unreadable.push(Unreadable {
                node: id,
                render_minor,
                what,
                stops_plugin,
            });
        };
        match host.text(format!("{dir}/gpu_id")) {
            // The kernel gives an empty or unreadable id for a GPU that the device cgroup hides.
            Err(e) => return trouble(format!("gpu_id: {e}"), None, false),
            Ok(text) => match text.trim().parse() {
                Ok(gpu_id) => node.gpu_id = gpu_id,
                Err(_) => return trouble("gpu_id: not a number".into(), None, false),
            },
        }
        let properties = match pairs(host, &format!("{dir}/properties")) {
            Ok(properties) => properties,
            Err(e) => return trouble(format!("properties: {e}"), None, true),
        };
        node.take(&properties);
        let minor = node.is_gpu().then_some(node.render_minor());
        if node.is_gpu() {
            match vram(host, dir) {
                Ok((public, size)) => {
                    node.properties.vram_public = u32::from(public);
                    node.properties.vram_size = size;
                }
                Err(e) => return trouble(format!("mem_banks: {e}"), minor, true),
            }
        }
        self.nodes.push(node);
    }

    pub fn gpus(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter().filter(|n| n.is_gpu())
    }

    /// The node with this id; the first, if a strange image has several.
    pub fn node(&self, id: u32) -> Option<&Node> {
        self.nodes.iter().find(|n| n.id == id)
    }

    /// Returns what a process sees whose device cgroup allows only these render nodes: the other GPUs are gone.
    #[must_use]
    pub fn visible(&self, minors: &[u32]) -> Self {
        Self {
            nodes: self
                .nodes
                .iter()
                .filter(|n| !n.is_gpu() || minors.contains(&n.render_minor()))
                .cloned()
                .collect(),
            unreadable: self
                .unreadable
                .iter()
                .filter(|u| u.render_minor.is_none_or(|m| minors.contains(&m)))
                .cloned()
                .collect(),
        }
    }

    /// Adds the PCI addresses and unique ids from the metadata; an image of the plugin has neither.
    pub fn label(&mut self, recorded: &[Gpu]) {
        for gpu in recorded.iter().filter(|g| g.vendor == Vendor::Amd) {
            let minor = gpu.render_minor.and_then(|m| u32::try_from(m).ok());
            if let Some(node) = self
                .nodes
                .iter_mut()
                .find(|n| n.is_gpu() && Some(n.render_minor()) == minor)
            {
                node.pci = Some(gpu.pci.clone());
                node.unique_id = Some(gpu.id.clone());
            }
        }
    }
}

impl Node {
    pub(super) fn take(&mut self, from: &BTreeMap<String, u64>) {
        let long = |key: &str| from.get(key).copied().unwrap_or(0);
        // The plugin keeps the low 32 bits.
        #[allow(clippy::cast_possible_truncation)]
        let cores = long("cpu_cores_count") as u32;
        self.cpu_cores_count = cores;
        if !self.is_gpu() {
            return;
        }
        self.properties = KfdProperties::of(long);
        let pci = pci_address(long("domain"), long("location_id"));
        self.unique_id = Some(match long("unique_id") {
            0 => pci.clone(),
            id => format!("{id:016x}"),
        });
        self.pci = Some(pci);
    }
}

/// The directory's entries with numbers for names, in the order in which it lists them.
fn numbered(host: &Host, dir: &str) -> io::Result<Vec<(u32, String)>> {
    Ok(host
        .listed(dir)?
        .into_iter()
        .filter_map(|name| Some((name.parse().ok()?, name)))
        .collect())
}

/// Parses lines `name value`. A line of another form is an error, as it is to the plugin.
fn pairs(host: &Host, path: &str) -> Result<BTreeMap<String, u64>, String> {
    let text = host.text(path).map_err(|e| e.to_string())?;
    text.lines()
        .filter(|l| !l.trim().is_empty())
        .map(|line| {
            let (name, value) = line
                .trim()
                .split_once(char::is_whitespace)
                .unwrap_or((line, ""));
            match value.trim().parse() {
                Ok(value) => Ok((name.to_owned(), value)),
                Err(_) => Err(format!("{line:?} is not a name and a number")),
            }
        })
        .collect()
}

/// The first memory bank that is VRAM: heap type 1 (visible to the CPU) or 2 (private).
fn vram(host: &Host, dir: &str) -> Result<(bool, u64), String> {
    let banks = format!("{dir}/mem_banks");
    for (_, bank) in numbered(host, &banks).map_err(|e| e.to_string())? {
        let bank = pairs(host, &format!("{banks}/{bank}/properties"))?;
        let heap = bank.get("heap_type").copied();
        if matches!(heap, Some(1 | 2)) {
            return match bank.get("size_in_bytes").copied() {
                None | Some(0) => Err("VRAM of no size".into()),
                Some(size) => Ok((heap == Some(1), size)),
            };
        }
    }
    Err("no bank of VRAM".into())
}
