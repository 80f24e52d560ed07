//! The image folder of a container in a user namespace.
//!
//! CRIU's restored processes open images themselves, as the user that they are mapped to, and runc, crun and podman make
//! image folders that root alone may enter: `Unable to open tty-info.img: Permission denied`. The folder is opened to
//! others for the time of the restore; what leads to it stays closed to them, as CRIU goes by a descriptor.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use cryopod_gpu_hooks::host::Host;
use cryopod_gpu_hooks::own_nodes;
use cryopod_gpu_hooks::spec::Spec;

use crate::Error;

/// Leave to enter a folder.
const ENTER: u32 = 0o001;

/// A folder that can be entered by anybody; dropped, it is as it was.
#[derive(Debug)]
pub struct Searchable {
    folder: PathBuf,
    mode: u32,
}

impl Searchable {
    /// Opens the image folder, if this container needs it.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn for_restore(host: &Host, spec: &Spec, folder: &Path) -> Result<Option<Self>, Error> {
        let what = || {
            format!(
                "{}: cannot be opened to the container's user",
                folder.display()
            )
        };
        let mode = fs::metadata(folder).map_err(Error::io(what()))?;
        let mode = mode.permissions().mode();
        if !own_nodes::in_user_namespace(host, spec) || mode & ENTER != 0 {
            return Ok(None);
        }
        fs::set_permissions(folder, Permissions::from_mode(mode | ENTER))
            .map_err(Error::io(what()))?;
        Ok(Some(Self {
            folder: folder.to_owned(),
            mode,
        }))
    }
}

impl Drop for Searchable {
    fn drop(&mut self) {
        let before = Permissions::from_mode(self.mode);
        if let Err(e) = fs::set_permissions(&self.folder, before) {
            tracing::warn!("{}: stays open to others: {e}", self.folder.display());
        }
    }
}
