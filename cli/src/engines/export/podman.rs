//! Checkpoints with podman: makes the archive from podman's uncompressed export file. (Without `--export` podman writes
//! neither config.dump nor the difference of the root file system.) Large files of a GPU container bypass that file:
//! they are packed from where the runtime wrote them.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cryopod_archive::format::names;
use cryopod_archive::store::StoreError;
use cryopod_operations::images::handover::ExportRequest;

use super::{Args, Taken};
use crate::engines::engine::EngineCall;
use crate::terminal::ui::Steps;

const ASK: Duration = Duration::from_secs(60);

/// After an error the container still runs, unless podman says otherwise.
pub fn checkpoint(args: &Args, temp: &Path, steps: &mut Steps) -> anyhow::Result<Taken> {
    let request = ask(&static_dir(&args.container)?)?;
    let file = temp.join("checkpoint.tar");
    let made = EngineCall::new("podman", args.limit())
        .args(["container", "checkpoint", "--compress", "none", "--export"])
        .args([&file])
        .flag(args.leave_running, "--leave-running")
        .flag(args.tcp_established, "--tcp-established")
        .flag(args.file_locks, "--file-locks")
        .args([&args.container])
        .run();
    steps.done("podman container checkpoint");
    made?;
    Ok(Taken {
        source: file,
        extra: Default::default(),
        request,
    })
}

/// Asks cryopod's runtime for the large files. `None` if that cannot be: then everything goes through podman's file.
fn ask(bundle: &Path) -> anyhow::Result<Option<ExportRequest>> {
    match ExportRequest::new(&bundle.join(names::CHECKPOINT_DIR)) {
        Ok(request) => Ok(Some(request)),
        // The other export would get the large files of this one's checkpoint.
        Err(e) if matches!(&e, StoreError::Io { source, .. } if source.kind() == ErrorKind::WouldBlock) => {
            Err(e.into())
        }
        Err(e) => {
            tracing::debug!("all goes through podman's file: {e}");
            Ok(None)
        }
    }
}

fn static_dir(container: &str) -> anyhow::Result<PathBuf> {
    let said = EngineCall::new("podman", ASK)
        .args(["container", "inspect", "--format", "{{.StaticDir}}"])
        .args([container])
        .run()?;
    Ok(said.trim().into())
}

/// Returns true if the container does not run and podman can restore it in place.
pub fn has_checkpoint(container: &str) -> bool {
    let state = EngineCall::new("podman", ASK)
        .args(["container", "inspect", "--format", "{{.State.Running}}"])
        .args([container])
        .run();
    let images = static_dir(container).map(|dir| dir.join(names::CHECKPOINT_DIR));
    state.is_ok_and(|said| said.trim() == "false")
        && images.is_ok_and(|images| images.join("inventory.img").exists())
}
