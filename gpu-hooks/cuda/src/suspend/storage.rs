//! What the driver's custom storage has taken at a suspend, until the processes keep it or it is in files.

use super::super::custom_storage::Stores;
use super::super::vram::SharedBuffer;
use super::files::injected;
use super::preload::Out;
use std::fs::File;
use std::io;

/// A process's GPU memory in a buffer of the agent's, which is the only copy.
pub(super) struct Stored {
    pub out: Out,
    tid: i32,
    /// The buffer, which so outlives the agent.
    file: io::Result<File>,
}

impl Stored {
    pub fn new(out: Out, tid: i32, buffer: &SharedBuffer) -> Self {
        let file = File::options().read(true).write(true).open(&buffer.path);
        Self { out, tid, file }
    }
}

/// When the agent is gone: has the processes keep their memory, so that another agent can restore them.
pub(super) fn recover(stored: Vec<Stored>) {
    for Stored { out, tid, file } in stored {
        if Stores::keeps(out.pid) {
            continue;
        }
        let kept = file.and_then(|file| {
            let bytes = file.metadata()?.len();
            injected(out.pid, tid, |inject| {
                inject.map_anywhere(bytes, &file).map(drop)
            })
        });
        match kept {
            Ok(()) => tracing::warn!(
                pid = out.pid,
                "it keeps its GPU memory in host memory, and waits: `cryopod resume` brings it back"
            ),
            Err(error) => tracing::error!(pid = out.pid, "its GPU memory is lost: {error}"),
        }
    }
}
