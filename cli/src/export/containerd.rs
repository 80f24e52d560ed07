//! containerd: `ctr containers checkpoint`, which takes task, root file system and record at one moment, and its
//! export from the content store.

use std::path::Path;
use std::time::Duration;

use anyhow::bail;

use super::{Args, Taken};
use crate::engine::Call;
use crate::ui::Steps;

/// How long removing the image may take.
const REMOVE: Duration = Duration::from_secs(60);

/// Checkpoints.
///
/// # Errors
/// containerd's.
pub fn checkpoint(args: &Args, scratch: &Path, steps: &mut Steps) -> anyhow::Result<Taken> {
    if !args.leave_running {
        bail!(
            "a containerd checkpoint leaves the container running: say --leave-running, and end it afterwards with `ctr tasks kill`"
        );
    }
    if args.tcp_established || args.file_locks {
        bail!(
            "ctr has no option for TCP connections and file locks; put `tcp-established` or `file-locks` into /etc/criu/default.conf"
        );
    }
    let ctr = |limit| Call::new("ctr", limit).args(["--namespace", &args.namespace]);
    let image = format!(
        "localhost/cryopod-export/{}:{}",
        args.container.to_lowercase(),
        std::process::id()
    );
    let file = scratch.join("checkpoint.tar");
    ctr(args.limit())
        .args([
            "containers",
            "checkpoint",
            "--rw",
            "--task",
            &args.container,
            &image,
        ])
        .run()?;
    steps.done("ctr containers checkpoint");
    let exported = ctr(args.limit())
        .args(["images", "export", "--skip-manifest-json"])
        .args([&file])
        .args([&image])
        .run();
    if exported.is_ok() {
        let _ = ctr(REMOVE).args(["images", "rm", &image]).run();
    }
    exported?;
    steps.done("ctr images export");
    Ok(Taken {
        source: file,
        extra: Default::default(),
        folder: None,
    })
}
