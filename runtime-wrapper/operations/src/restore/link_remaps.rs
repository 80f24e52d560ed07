//! Keeps the links by which CRIU finds files that have lost the name under which they were opened.
//!
//! At a checkpoint CRIU gives such a file a name, `link_remap.N` in the directory of the old one, and a restore removes it
//! (`remove_link_remap`, files-reg.c). In a volume that is the only one: the next copy of the checkpoint would not find
//! the file (`Can't link ... link_remap.N`). So a copy puts it back.

use std::ffi::OsString;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag};
use nix::unistd::linkat;

use crate::request::Request;
use cryopod_host::files::open_in_root;

/// Start of the names that CRIU gives.
const NAME: &str = "link_remap.";

/// A link in a volume: the directory, the name, the file.
type LinkRemap = (OwnedFd, OsString, OwnedFd);

/// The links by which CRIU finds files without a name, kept for the next copy.
#[derive(Debug)]
pub struct LinkRemaps(Vec<LinkRemap>);

impl LinkRemaps {
    /// Opens the files behind those of the images' links that are in the spec's volumes.
    pub fn of(request: &Request<'_>, links: &[String]) -> Self {
        let found = links.iter().filter_map(|path| open(request, path));
        Self(found.collect())
    }

    /// Makes the links that CRIU has removed.
    pub fn put_back(&self) {
        for (directory, name, file) in &self.0 {
            match linkat(
                file,
                "",
                directory,
                name.as_os_str(),
                AtFlags::AT_EMPTY_PATH,
            ) {
                Ok(()) | Err(Errno::EEXIST) => {}
                Err(e) => tracing::warn!(
                    "{}: not put back, and another copy of this checkpoint needs it: {e}",
                    Path::new(name).display()
                ),
            }
        }
    }
}

fn open(request: &Request<'_>, path: &str) -> Option<LinkRemap> {
    let path = Path::new("/").join(path);
    let name = path.file_name()?.to_owned();
    if !name.to_string_lossy().starts_with(NAME) {
        return None;
    }
    let (volume, rest) = request.mounts.covering(&path)?;
    let volume = volume.source.as_ref().filter(|_| volume.bind)?;
    let volume = File::open(request.bundle.join(volume)).ok()?;
    let parent = Path::new(".").join(rest.parent()?);
    let directory = open_in_root(&volume, &parent, OFlag::O_PATH | OFlag::O_DIRECTORY).ok()?;
    let file = open_in_root(&volume, rest, OFlag::O_PATH | OFlag::O_NOFOLLOW).ok()?;
    Some((directory, name, file))
}
