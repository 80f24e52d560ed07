//! Limits what is read from an archive, because archives come from strangers.

use nix::sys::resource::{Resource, getrlimit, rlim_t, setrlimit};

/// Limits on what an archive may hold. Every value is for the whole archive unless it says otherwise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Files and directories.
    pub entries: u64,
    /// Bytes of one name. CRIU's and the engines' names have fewer than 100.
    pub name_bytes: usize,
    /// Nesting depth of directories.
    pub depth: usize,
    /// Bytes of one file that is read into memory as a whole (JSON, CRIU's small images).
    pub small_file_bytes: u64,
    /// Total bytes of the files that are read into memory.
    pub small_total_bytes: u64,
    /// Total bytes of all files, decompressed.
    pub total_bytes: u64,
    /// Decompressed bytes that are allowed whatever the compressed size.
    pub ratio_slack_bytes: u64,
    /// Decompressed bytes per compressed byte beyond that, where the archive does not state its sizes.
    pub ratio: u64,
    pub layers: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            entries: 200_000,
            name_bytes: 1024,
            depth: 16,
            small_file_bytes: 32 << 20,
            small_total_bytes: 96 << 20,
            total_bytes: 64 << 40,
            ratio_slack_bytes: 4 << 30,
            ratio: 1000,
            layers: 128,
        }
    }
}

/// Largest JSON document of an image (index, manifest, config), in bytes.
pub const MAX_JSON_BYTES: u64 = 4 << 20;

/// Returns `threads`, or the number of cores for 0.
pub(crate) fn threads_or_cores(threads: usize) -> usize {
    match threads {
        0 => std::thread::available_parallelism()
            .map_or(2, usize::from)
            .min(16),
        n => n.min(32),
    }
}

/// Lets this process have as many files open as it may: a chain of checkpoints has many. Its children inherit that, so
/// do not call it in a process that starts containers.
pub fn raise_open_files() {
    std::mem::forget(OpenFilesRaised::new());
}

/// The same, until it is dropped.
#[derive(Debug)]
pub struct OpenFilesRaised {
    /// The limits to put back.
    before: Option<(rlim_t, rlim_t)>,
}

impl OpenFilesRaised {
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        let limits = getrlimit(Resource::RLIMIT_NOFILE).ok();
        let before = limits.filter(|(soft, hard)| {
            soft < hard && setrlimit(Resource::RLIMIT_NOFILE, *hard, *hard).is_ok()
        });
        Self { before }
    }
}

impl Drop for OpenFilesRaised {
    fn drop(&mut self) {
        if let Some((soft, hard)) = self.before {
            let _ = setrlimit(Resource::RLIMIT_NOFILE, soft, hard);
        }
    }
}
