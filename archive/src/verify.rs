//! Is an archive whole, and what it says it is?

use std::path::Path;
use std::sync::Arc;

use crate::error::Error;
use crate::limits::Limits;
use crate::progress::Progress;
use crate::seal::Seal;
use crate::source::{Kind, Source};

/// How to verify.
#[derive(Debug, Clone, Default)]
pub struct VerifyOptions {
    /// Threads; 0: as many as there are cores.
    pub threads: usize,
    /// Bounds on the archive.
    pub limits: Limits,
    /// Counters for a progress bar, and a way to stop.
    pub progress: Arc<Progress>,
}

/// What was verified.
#[derive(Debug, Clone)]
pub struct Verified {
    /// What the archive is stored as.
    pub kind: Kind,
    /// Files.
    pub files: u64,
    /// Bytes of all files.
    pub bytes: u64,
    /// Layers whose digests were checked, of the blob and of its decompressed content.
    pub layers: usize,
    /// Chunks of the VRAM lane that were checked.
    pub chunks: u64,
    /// cryopod's record, if there is one.
    pub seal: Option<Seal>,
}

/// Reads all of a checkpoint and checks what can be checked: every digest, every name, the compression's own sums,
/// CRIU's magic numbers, `cryopod.json`, the VRAM lane's chunks, stated sizes.
///
/// # Errors
/// The first thing that is wrong, with the file's name.
pub fn verify(source: &Source, options: &VerifyOptions) -> Result<Verified, Error> {
    let _ = options;
    Err(Error::Unsupported {
        path: source.path().into(),
        reason: "verifying is not built yet".into(),
    })
}

/// As [`verify`] of what lies at a path.
///
/// # Errors
/// As [`verify`].
pub fn verify_path(path: &Path, options: &VerifyOptions) -> Result<Verified, Error> {
    verify(&Source::open_image(path, None, &options.limits)?, options)
}
