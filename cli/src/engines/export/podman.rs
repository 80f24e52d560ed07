//! Checkpoints with podman: makes the archive from podman's uncompressed export file. (Without `--export` podman writes
//! neither config.dump nor the difference of the root file system.) Large files of a GPU container bypass that file:
//! they are packed from where the runtime wrote them.

use std::cell::Cell;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use cryopod_archive::format::names;
use cryopod_archive::source::Source;
use cryopod_archive::unpack::{UnpackOptions, unpack};
use cryopod_operations::images::handover;

use super::{Args, Taken};
use crate::engines::engine::EngineCall;
use crate::temp_dir::{Holds, LockedTempDir};
use crate::terminal::ui::Steps;

const ASK: Duration = Duration::from_secs(60);

/// After an error the container still runs, unless podman says otherwise.
pub fn checkpoint(args: &Args, temp: &Path, steps: &mut Steps) -> anyhow::Result<Taken> {
    let bundle = static_dir(&args.container)?;
    let away = Away::beside(&bundle)?;
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
    let large = away.as_ref().map_or(0, Away::files);
    made?;
    let plain = |source| Taken {
        source,
        extra: Default::default(),
        directory: None,
    };
    match away {
        Some(away) if large > 0 => {
            let directory = LockedTempDir::within(&away.bundle, Holds::Checkpoint)?;
            let whole = directory.path().join("whole");
            unpack(&Source::open(&file)?, &whole, &UnpackOptions::default())?;
            away.link(&whole.join(names::CHECKPOINT_DIR))?;
            away.bring_back()?;
            fs::remove_file(&file).with_context(|| file.display().to_string())?;
            steps.done("podman's file, without the large files");
            Ok(Taken {
                directory: Some(directory),
                ..plain(whole)
            })
        }
        _ => Ok(plain(file)),
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

/// The directory into which the runtime moves large files, if it is cryopod's.
struct Away {
    bundle: PathBuf,
    request: handover::ImportRequest,
    is_back: Cell<bool>,
}

impl Away {
    /// `None` if there can be none: then everything goes through podman's file.
    fn beside(bundle: &Path) -> anyhow::Result<Option<Self>> {
        match handover::ask(&bundle.join(names::CHECKPOINT_DIR)) {
            Ok(request) => Ok(Some(Self {
                bundle: bundle.into(),
                request,
                is_back: Cell::new(false),
            })),
            // The other export would get the large files of this one's checkpoint.
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Err(e.into()),
            Err(e) => {
                tracing::debug!("all goes through podman's file: {e}");
                Ok(None)
            }
        }
    }

    fn files(&self) -> usize {
        fs::read_dir(self.request.away()).map_or(0, Iterator::count)
    }

    /// Hard-links the files into another directory of the same file system.
    fn link(&self, directory: &Path) -> anyhow::Result<()> {
        let link = || -> io::Result<()> {
            for item in fs::read_dir(self.request.away())? {
                let item = item?;
                fs::hard_link(item.path(), directory.join(item.file_name()))?;
            }
            Ok(())
        };
        link().with_context(|| format!("{}: the files cannot be linked", directory.display()))
    }

    /// Moves the files back to podman's checkpoint, from which podman can restore too.
    fn bring_back(&self) -> anyhow::Result<()> {
        if self.is_back.get() {
            return Ok(());
        }
        let away = self.request.away();
        if self.files() > 0 {
            handover::join(away, &self.bundle.join(names::CHECKPOINT_DIR))?;
        }
        match fs::remove_dir(away) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                return Err(e).with_context(|| away.display().to_string());
            }
            _ => self.is_back.set(true),
        }
        Ok(())
    }
}

impl Drop for Away {
    fn drop(&mut self) {
        if let Err(error) = self.bring_back() {
            tracing::error!(
                "{error:#}; the files of the checkpoint that are there belong into its directory"
            );
        }
    }
}
