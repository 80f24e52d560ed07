//! podman: its own export file, not compressed, of which the archive is made. (Without `--export` podman writes
//! neither config.dump nor the difference of the root file system.)

use std::path::Path;

use super::{Args, Taken};
use crate::engine::Call;

/// Checkpoints.
///
/// # Errors
/// podman's; the container runs on then, if podman says nothing else.
pub fn checkpoint(args: &Args, scratch: &Path) -> anyhow::Result<Taken> {
    let file = scratch.join("checkpoint.tar");
    Call::new("podman", args.limit())
        .args(["container", "checkpoint", "--compress", "none", "--export"])
        .args([&file])
        .flag(args.leave_running, "--leave-running")
        .flag(args.tcp_established, "--tcp-established")
        .flag(args.file_locks, "--file-locks")
        .args([&args.container])
        .run()?;
    Ok(Taken {
        source: file,
        extra: Default::default(),
    })
}
