//! What the fuzz targets share.

use std::path::PathBuf;

/// A name of this process's own for what is read back from disk, below `$FUZZ_SCRATCH`, else in memory.
pub fn scratch(target: &str) -> PathBuf {
    let dir = std::env::var_os("FUZZ_SCRATCH").map_or_else(|| "/dev/shm".into(), PathBuf::from);
    dir.join(format!("cryopod-fuzz-{target}-{}", std::process::id()))
}
