//! From an archive to a folder.

use std::path::Path;
use std::sync::Arc;

use crate::error::Error;
use crate::limits::Limits;
use crate::progress::Progress;
use crate::source::Source;

/// How to unpack.
#[derive(Debug, Clone, Default)]
pub struct UnpackOptions {
    /// Only CRIU's images, directly in the target folder (`checkpoint/` left out), as runtimes want them.
    pub images_only: bool,
    /// Threads; 0: as many as there are cores.
    pub threads: usize,
    /// Bounds on the archive.
    pub limits: Limits,
    /// Counters for a progress bar, and a way to stop.
    pub progress: Arc<Progress>,
}

/// What was unpacked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unpacked {
    /// Files.
    pub files: u64,
    /// Bytes of all files.
    pub bytes: u64,
}

/// Unpacks a checkpoint into a folder that does not exist yet, or is empty.
///
/// All is written below a temporary name beside the target, checked, synced and renamed: the target is whole or
/// absent. What an interrupted run left is removed by the next. Files belong to the caller, without set-id bits;
/// devices and links of the container are inside `rootfs-diff.tar`, which is not unpacked.
///
/// # Errors
/// [`Error`].
pub fn unpack(source: &Source, to: &Path, options: &UnpackOptions) -> Result<Unpacked, Error> {
    let _ = (to, options);
    Err(Error::Unsupported {
        path: source.path().into(),
        reason: "unpacking is not built yet".into(),
    })
}
