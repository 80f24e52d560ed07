//! Finds what CRIU's amdgpu plugin has left out without an error.
//!
//! The plugin of CRIU 4.1.1 and 4.2.1 drops the errors of its copies: a copy that fails counts as done (`sdma_copy_bo`
//! returns the result of its clean-up). It looks for a process's buffers under the ids of the machine's GPUs, but a
//! process that was restored on other GPUs knows them by the ids of the old ones: then it saves none of them
//! (`save_bos`). So a checkpoint is complete only if the files are.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use cryopod_archive::metadata::{GpuFacts, GpuUse};
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

/// Returns the first line of CRIU's log by which a copy of GPU memory has failed.
pub fn failed_copy(log: &Path) -> Option<String> {
    let mut log = BufReader::new(File::open(log).ok()?.take(MAX_LOG));
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = (&mut log)
            .take(MAX_LINE)
            .read_until(b'\n', &mut line)
            .ok()?;
        if read == 0 {
            return None;
        }
        let text = String::from_utf8_lossy(&line);
        if text.contains("amdgpu_plugin") && FAILED_COPIES.iter().any(|m| text.contains(m)) {
            return Some(text.trim().to_owned());
        }
    }
}
