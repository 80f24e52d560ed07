//! Recognises what containerd makes beside its containers.

use std::path::Path;

/// Prefix of the image directories that containerd makes for a checkpoint and for a restore. A random number follows:
/// `os.MkdirTemp(os.Getenv("XDG_RUNTIME_DIR"), "ctrd-checkpoint")` in its task service (1.7.24, 2.1.9).
pub const IMAGES: &str = "ctrd-checkpoint";
/// The random number has 32 bits.
const MAX_DIGITS: usize = 10;

/// Returns true if a path has the name of such a directory.
pub fn is_image_directory(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.strip_prefix(IMAGES).is_some_and(|n| {
        (1..=MAX_DIGITS).contains(&n.len()) && n.bytes().all(|b| b.is_ascii_digit())
    })
}
