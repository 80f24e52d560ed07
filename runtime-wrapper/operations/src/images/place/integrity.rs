//! Tells whether a checkpoint in a place is damaged. A stop lists the files of its checkpoint, with digests.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use cryopod_archive::metadata::Metadata;
use cryopod_archive::store::Listing;
use cryopod_archive::vram::{Vram, VramError, usual_threads};
use cryopod_host::sandbox::{Sandbox, SandboxError, real};

use crate::config::Config;
use crate::images::owners;

/// Lists the files of a complete checkpoint.
pub fn list(config: &Config, checkpoint: &Path) -> Result<(), String> {
    let until = Instant::now().checked_add(limit(config, checkpoint));
    Listing::write(checkpoint, usual_threads(), until).map_err(|e| e.to_string())
}

/// Compares a checkpoint with its list. Returns what is damaged. The restore checks the GPU memory.
///
/// # Errors
/// It cannot be read.
pub fn damage(config: &Config, checkpoint: &Path) -> Result<Option<String>, String> {
    owners::check(checkpoint)?;
    if config.store.verify == Some(false) {
        return Ok(None);
    }
    let limit = limit(config, checkpoint);
    let (sender, compared) = mpsc::channel();
    let path = checkpoint.to_owned();
    // The place may be on a server that does not answer.
    std::thread::spawn(move || {
        let until = Instant::now().checked_add(limit);
        let _ = sender.send(Listing::damage(&path, usual_threads(), until));
    });
    match compared.recv_timeout(limit) {
        Ok(compared) => compared.map_err(|e| e.to_string()),
        Err(_) => Err(format!(
            "{}: no answer within {} s",
            checkpoint.display(),
            limit.as_secs()
        )),
    }
}

/// Compares the GPU memory of a checkpoint that was not restored with its digests. Returns what is damaged.
pub fn damage_of_vram(config: &Config, checkpoint: &Path) -> Option<String> {
    let facts = Metadata::open(checkpoint).ok()??.gpu.vram?;
    let digest = facts.digest.parse().ok()?;
    let place = checkpoint.ancestors().nth(2).unwrap_or(checkpoint);
    let search = config.search();
    let read = search.iter().map(PathBuf::as_path).chain([place]);
    let sandbox = Sandbox {
        read: read.map(real).collect(),
        write: Vec::new(),
    };
    let compare = || {
        let opened = Vram::open_with(checkpoint, Some(digest), &search);
        let compared = opened.and_then(|vram| match vram {
            Some(vram) => vram.verify(usual_threads(), &AtomicBool::new(false)),
            None => Ok(()),
        });
        match compared {
            Err(e @ (VramError::Damaged { .. } | VramError::Missing(_))) => Err(e.to_string()),
            _ => Ok(Vec::new()),
        }
    };
    match sandbox.run(limit(config, checkpoint), compare) {
        Err(SandboxError::Failed(damage)) => Some(damage),
        _ => None,
    }
}

/// Returns how long all files of a checkpoint may take to be read.
pub fn limit(config: &Config, checkpoint: &Path) -> Duration {
    let files = fs::read_dir(checkpoint).into_iter().flatten().flatten();
    let bytes = files.filter_map(|file| Some(file.metadata().ok()?.len()));
    config.limits.restore(bytes.sum())
}
