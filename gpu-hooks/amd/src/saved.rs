//! Finds what CRIU's amdgpu plugin has left out or chosen otherwise without an error.
//!
//! The plugin of CRIU 4.1.1 and 4.2.1 drops the errors of its copies: a copy that fails counts as done (`sdma_copy_bo`
//! returns the result of its clean-up). It looks for a process's buffers under the ids of the machine's GPUs, but a
//! process that was restored on other GPUs knows them by the ids of the old ones: then it saves none of them
//! (`save_bos`). So a checkpoint is complete only if the files are.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use cryopod_archive::metadata::{GpuFacts, GpuUse};
use cryopod_gpu_plan::checks::switches::HOW_TO_MAP;
use cryopod_host::nodes::Vendor;

use super::image::{Images, KfdImage};

/// The plugin's files begin with the length of their contents.
const HEAD: u64 = 8;
/// How much of CRIU's log is searched. A long one has a line for each page map.
const MAX_LOG: u64 = 256 << 20;
const MAX_LINE: u64 = 16 << 10;

/// What CRIU's log says where a copy has failed, and the plugin goes on (`sdma_copy_bo` of CRIU 4.1.1 and 4.2.1).
const FAILED_COPIES: [&str; 13] = [
    "failed to submit command for SDMA IB",
    "failed to create context for SDMA command submission",
    "failed to query fence status",
    "IB execution did not complete",
    "failed to read from storage",
    "failed to write out to storage",
    "failed to import dmabuf handle from libdrm",
    "failed to create userptr for sdma",
    "failed to alloc VA for",
    "failed to GPU map the",
    "failed to allocate and map ib/rb",
    "failed to create BO resources list",
    "Invalid sdma operation",
];

/// Checks that the checkpoint in this directory has the memory of every GPU of every process. Returns the processes'
/// images.
pub fn complete(dir: &Path) -> Result<Images, String> {
    let images = Images::collect(dir).map_err(|e| e.to_string())?;
    if images.kfd.is_empty() {
        return Err(
            "CRIU's amdgpu plugin has saved no process: there is no amdgpu-kfd-*.img".into(),
        );
    }
    let missing: Vec<String> = images.kfd.iter().flat_map(|i| incomplete(dir, i)).collect();
    match missing.is_empty() {
        true => Ok(images),
        false => Err(format!(
            "CRIU's amdgpu plugin has reported success, and has not saved all GPU memory: {}",
            missing.join("; ")
        )),
    }
}

/// Notes in the metadata how much GPU memory of each process is saved.
pub fn note(images: &Images, facts: &mut GpuFacts) {
    let id = |minor: u32| {
        let mut gpus = facts.gpus.iter().filter(|g| g.vendor == Vendor::Amd);
        gpus.find(|g| g.render_minor == Some(minor.into()))
            .map(|g| g.id.clone())
    };
    for process in &mut facts.processes {
        let own = images
            .kfd
            .iter()
            .filter(|i| i64::from(i.pid) == i64::from(process.ns_pid));
        let used = own.flat_map(|image| {
            image.topology.gpus().filter_map(|gpu| {
                Some(GpuUse {
                    gpu: id(gpu.render_minor())?,
                    bytes: *image.contents.get(&gpu.gpu_id)?,
                })
            })
        });
        process.gpu_memory.extend(used);
    }
}

fn incomplete(dir: &Path, image: &KfdImage) -> Vec<String> {
    let id = image
        .file
        .trim_start_matches("amdgpu-kfd-")
        .trim_end_matches(".img");
    let mut missing = Vec::new();
    for gpu in image.topology.gpus() {
        let want = image.contents.get(&gpu.gpu_id).copied().unwrap_or(0);
        let name = format!("amdgpu-pages-{id}-{:04x}.img", gpu.gpu_id);
        let found = match File::open(dir.join(&name)) {
            Ok(mut file) => length(&mut file).map_err(|e| e.to_string()),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Err(
                "is not there: the process was restored on another GPU than it started on, and up to CRIU 4.2 the plugin saves it only on that one. Restore it there from its checkpoint".to_owned(),
            ),
            Err(e) => Err(format!("cannot be read: {e}")),
        };
        match found {
            Ok((said, there)) if said == want && there == want => {}
            Ok((said, there)) => missing.push(format!(
                "{name} announces {said} bytes and has {there}, of {want} of the process's buffers: a copy from the GPU failed, see dump.log"
            )),
            Err(why) => missing.push(format!("{name} {why}")),
        }
    }
    missing
}

/// The bytes that a file of the plugin announces, and those that it has.
fn length(file: &mut File) -> std::io::Result<(u64, u64)> {
    let mut head = [0; HEAD as usize];
    let bytes = file.metadata()?.len();
    file.read_exact(&mut head)?;
    Ok((u64::from_ne_bytes(head), bytes.saturating_sub(HEAD)))
}

/// Returns why what CRIU has restored by this log is not the container: the plugin has gone on after a copy failed, or
/// has chosen other GPUs than these, each a `gpu_id` of the checkpoint and one of this host. With none, every map is right.
pub fn restored_wrongly(log: &Path, pairs: &[(u32, u32)]) -> Option<String> {
    let mut log = BufReader::new(File::open(log).ok()?.take(MAX_LOG));
    let mut line = Vec::new();
    // By process: the map that it prints last. What the plugin prints before are trials.
    let mut maps: BTreeMap<String, (bool, Vec<(u32, u32)>)> = BTreeMap::new();
    loop {
        line.clear();
        let mut part = (&mut log).take(MAX_LINE);
        if part.read_until(b'\n', &mut line).ok()? == 0 {
            break;
        }
        let text = String::from_utf8_lossy(&line);
        let Some((head, said)) = text.trim().split_once("amdgpu_plugin: ") else {
            continue;
        };
        if FAILED_COPIES.iter().any(|m| said.contains(m)) {
            return Some(format!(
                "a copy of GPU memory to an AMD GPU has failed, and CRIU's amdgpu plugin has gone on without it: {}",
                text.trim()
            ));
        }
        let process = head.split_once(')').map_or(head, |(_, pid)| pid).to_owned();
        let id = |hex: &str| u32::from_str_radix(hex.strip_prefix("0x")?, 16).ok();
        let pair = said.strip_prefix("GPU: ").and_then(|p| {
            let (old, new) = p.split_once(" -> ")?;
            Some((id(old)?, id(new)?))
        });
        if said == "Maps after all nodes matched" {
            maps.insert(process, (true, Vec::new()));
        } else if let Some((open, map)) = maps.get_mut(&process).filter(|(open, _)| *open) {
            *open = !said.chars().all(|c| c == '=');
            // A hive may hold CPUs, whose id is 0.
            map.extend(pair.filter(|(old, _)| *old != 0));
        }
    }
    let wrong = |map: &Vec<(u32, u32)>| map.iter().any(|p| !pairs.contains(p));
    let other = maps.values().find(|(_, map)| wrong(map));
    if let Some((_, map)) = other.filter(|_| !pairs.is_empty()) {
        let map: Vec<String> = map
            .iter()
            .map(|(a, b)| format!("{a:#06x}={b:#06x}"))
            .collect();
        return Some(format!(
            "CRIU's amdgpu plugin has restored on other GPUs than those whose nodes the container has: restore with another map ({HOW_TO_MAP}): gpu.map={}",
            map.join(",")
        ));
    }
    (pairs.len() > 1 && maps.is_empty()).then(|| {
        "CRIU's log does not say on which GPUs its amdgpu plugin has restored the container".into()
    })
}
