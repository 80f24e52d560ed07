//! Opens directories to CRIU's processes that run as the user of a container in a user namespace.
//!
//! CRIU's restored processes open images themselves, as the user that they are mapped to, and runc, crun and podman
//! make image directories that only root may enter: `Unable to open tty-info.img: Permission denied`. The directory is
//! opened to others for the time of the restore. Its parents stay closed to them, as CRIU uses a descriptor.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use cryopod_gpu_plan::gpus::own_nodes;
use cryopod_host::files::{Host, if_there};
use cryopod_host::spec::Spec;

use crate::error::Error;

const ENTER: u32 = 0o001;
const CRUN_ROOT: &str = "/run/crun";

/// A directory that anybody can enter; dropped, it is as it was.
#[derive(Debug)]
pub struct Searchable {
    directory: PathBuf,
    mode: u32,
}

impl Searchable {
    /// Opens the image directory, if this container needs it.
    pub fn for_restore(host: &Host, spec: &Spec, directory: &Path) -> Result<Option<Self>, Error> {
        if !own_nodes::in_user_namespace(host, spec) {
            return Ok(None);
        }
        let mode = open(directory).map_err(Error::io(what(directory)))?;
        Ok(mode.map(|mode| Self {
            directory: directory.to_owned(),
            mode,
        }))
    }
}

/// Lets the restored processes pass crun's state directory, `root` or crun's default.
///
/// crun 1.24 and newer mask directories with `.empty-directory` in it, and CRIU opens that by its path: `open_tree
/// .../.empty-directory: Permission denied`. It stays passable, as another restore may need it at the same time; each
/// container's directory in it stays closed to all but root.
pub fn state_directory(host: &Host, spec: &Spec, root: Option<&Path>) -> Result<(), Error> {
    if !own_nodes::in_user_namespace(host, spec) {
        return Ok(());
    }
    let directory = root.unwrap_or(Path::new(CRUN_ROOT));
    let opened = if_there(open(directory)).map(drop);
    opened.map_err(Error::io(what(directory)))
}

fn what(directory: &Path) -> String {
    let directory = directory.display();
    format!("{directory}: cannot be opened to the container's user")
}

/// Returns the old mode, if the directory was closed to others.
fn open(directory: &Path) -> io::Result<Option<u32>> {
    let mode = fs::metadata(directory)?.permissions().mode();
    if mode & ENTER != 0 {
        return Ok(None);
    }
    fs::set_permissions(directory, Permissions::from_mode(mode | ENTER))?;
    Ok(Some(mode))
}

impl Drop for Searchable {
    fn drop(&mut self) {
        let before = Permissions::from_mode(self.mode);
        if let Err(e) = fs::set_permissions(&self.directory, before) {
            tracing::warn!("{}: stays open to others: {e}", self.directory.display());
        }
    }
}
