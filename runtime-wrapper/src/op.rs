//! The private folder of one operation, `/run/cryopod/PID-STARTTIME`.
//!
//! It holds the CRIU plugins of this operation and no others, CRIU's configuration, the sockets of the gate and
//! of the driver agent. Its name is the identity of the process that owns it, so that a folder left by a killed
//! wrapper is known as such and swept by the next operation.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};

use cryopod_gpu_hooks::host::Host;
use cryopod_gpu_hooks::live;

use crate::Error;

/// Where the folders lie, unless `CRYOPOD_RUN_DIR` names another place.
pub const BASE: &str = "/run/cryopod";

/// Where the folders lie.
pub fn base() -> PathBuf {
    std::env::var_os("CRYOPOD_RUN_DIR").map_or_else(|| BASE.into(), PathBuf::from)
}

/// The folder of one operation; removed when dropped.
#[derive(Debug)]
pub struct Operation {
    dir: PathBuf,
}

impl Operation {
    /// Makes the folder for this process, and sweeps those of processes that are gone.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be made.
    pub fn new() -> Result<Self, Error> {
        Self::below(&base(), &Host::system())
    }

    fn below(base: &Path, host: &Host) -> Result<Self, Error> {
        let made = |p: &Path| format!("{}: cannot make the operation's folder", p.display());
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(base)
            .map_err(Error::io(made(base)))?;
        ours(base)?;
        sweep(base, host);
        let pid = i32::try_from(std::process::id()).unwrap_or(0);
        let start = live::start_time(host, pid).unwrap_or(0);
        let op = Self {
            dir: base.join(format!("{pid}-{start}")),
        };
        DirBuilder::new()
            .mode(0o700)
            .create(&op.dir)
            .map_err(Error::io(made(&op.dir)))?;
        op.subfolder("plugins")?;
        Ok(op)
    }

    fn subfolder(&self, name: &str) -> Result<(), Error> {
        let path = self.dir.join(name);
        let what = format!("{}: cannot make it", path.display());
        DirBuilder::new()
            .mode(0o700)
            .create(path)
            .map_err(Error::io(what))
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// A file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// CRIU's plugin folder of this operation.
    pub fn plugins(&self) -> PathBuf {
        self.dir.join("plugins")
    }

    /// Puts a plugin into the folder, under its own file name; CRIU skips what does not end in `.so`.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn link_plugin(&self, plugin: &Path) -> Result<(), Error> {
        let mut name = plugin.file_name().unwrap_or_default().to_owned();
        if !name.as_encoded_bytes().ends_with(b".so") {
            name.push(".so");
        }
        let link = self.plugins().join(name);
        symlink(plugin, &link).map_err(Error::io(format!(
            "{}: cannot link the plugin",
            link.display()
        )))
    }
}

/// CRIU loads plugins from below this folder: nobody else may write there.
fn ours(base: &Path) -> Result<(), Error> {
    let meta = fs::symlink_metadata(base)
        .map_err(Error::io(format!("{}: cannot be read", base.display())))?;
    let user = nix::unistd::geteuid().as_raw();
    let why = if !meta.is_dir() {
        "it is no folder".to_owned()
    } else if meta.uid() != user {
        format!("it belongs to user {}, and this is user {user}", meta.uid())
    } else if meta.mode() & 0o022 != 0 {
        format!("others may write to it (mode {:o})", meta.mode() & 0o7777)
    } else {
        return Ok(());
    };
    Err(Error::Failed(format!(
        "{}: not used for CRIU's plugins: {why}; remove it, it is made anew. Nothing was touched",
        base.display()
    )))
}

impl Drop for Operation {
    fn drop(&mut self) {
        if let Err(e) = fs::remove_dir_all(&self.dir) {
            tracing::warn!("{}: left behind: {e}", self.dir.display());
        }
    }
}

/// Removes the folders whose owner is gone. Best effort: another wrapper may sweep at the same time.
fn sweep(base: &Path, host: &Host) {
    let Ok(entries) = fs::read_dir(base) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some((pid, start)) = name.to_str().and_then(owner) else {
            continue;
        };
        if live::start_time(host, pid) == Some(start) {
            continue;
        }
        match fs::remove_dir_all(entry.path()) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                tracing::warn!("{}: cannot be removed: {e}", entry.path().display());
            }
            _ => {}
        }
    }
}

fn owner(name: &str) -> Option<(i32, u64)> {
    let (pid, start) = name.split_once('-')?;
    Some((pid.parse().ok()?, start.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn made_swept_removed() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("run");
        fs::create_dir_all(base.join("999999999-1/plugins")).unwrap();
        fs::create_dir_all(base.join("notes")).unwrap();
        let host = Host::system();
        let op = Operation::below(&base, &host).unwrap();
        assert!(!base.join("999999999-1").exists() && base.join("notes").exists());
        op.link_plugin(Path::new("/x/y.so")).unwrap();
        op.link_plugin(Path::new("/x/z.so.2")).unwrap();
        assert!(op.plugins().join("z.so.2.so").is_symlink());
        assert_eq!(
            fs::read_link(op.plugins().join("y.so")).unwrap(),
            Path::new("/x/y.so")
        );
        sweep(&base, &host);
        assert!(op.dir().exists(), "its owner lives");
        drop(op);
        assert_eq!(fs::read_dir(&base).unwrap().count(), 1);
    }

    #[test]
    fn a_folder_that_others_can_write_to_is_not_used() {
        use std::os::unix::fs::{PermissionsExt, chown};
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("run");
        let refused = |what: &str| {
            let error = Operation::below(&base, &Host::system()).unwrap_err();
            assert!(error.to_string().contains(what), "{error}");
        };
        fs::create_dir(&base).unwrap();
        fs::set_permissions(&base, fs::Permissions::from_mode(0o1777)).unwrap();
        refused("mode 1777");
        fs::set_permissions(&base, fs::Permissions::from_mode(0o755)).unwrap();
        if nix::unistd::geteuid().is_root() {
            chown(&base, Some(4711), None).unwrap();
            refused("user 4711");
        }
        fs::remove_dir(&base).unwrap();
        symlink(dir.path(), &base).unwrap();
        refused("no folder");
    }
}
