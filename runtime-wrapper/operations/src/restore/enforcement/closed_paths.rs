//! Masks in a restored container what its spec masks, and makes read-only what it makes read-only, where the images do not.
//!
//! The low-level runtime does so when it creates a container; of a restored one, only the images say what is mounted. They
//! lack the masks of paths that the checkpoint's host did not have, or of those that somebody has taken out of them.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use cryopod_host::detached::{Detached, within};
use nix::errno::Errno;
use nix::fcntl::OFlag;

use crate::error::Error;
use crate::security::privileges::LeftOpen;
use cryopod_host::files::open_in_root;

/// CRIU's stage at which all mounts are there, and a restore may still fail.
pub const STAGE: &str = "post-restore";

/// Closes the paths in the mount namespace of the container with this init process, whose processes do not run. A path
/// that the container does not have is left out.
pub fn close(init: i32, paths: &[LeftOpen]) -> Result<(), Error> {
    if paths.is_empty() {
        return Ok(());
    }
    let null = || Detached::of(Path::new("/dev/null"), false);
    let nulls: io::Result<Vec<Detached>> = paths.iter().map(|_| null()).collect();
    let nulls = nulls.map_err(Error::io("/dev/null"))?;
    within(init, |root| {
        for (left, null) in paths.iter().zip(nulls) {
            let failed = Error::at(Path::new(&left.path), "cannot be closed");
            close_one(root, left, null).map_err(failed)?;
        }
        Ok(())
    })
}

fn close_one(root: &File, left: &LeftOpen, null: Detached) -> io::Result<()> {
    let there = match open_in_root(
        root,
        Path::new(&left.path),
        OFlag::O_PATH | OFlag::O_NOFOLLOW,
    ) {
        Err(Errno::ENOENT | Errno::ENOTDIR) => return Ok(()),
        there => File::from(there?),
    };
    let over = match (left.masked, there.metadata()?.is_dir()) {
        (false, _) => Detached::of_opened(there.as_fd())?,
        (true, true) => Detached::new(c"tmpfs", &[(c"mode", "755"), (c"size", "4k")])?,
        (true, false) => null,
    };
    let read_only = libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID;
    over.set(read_only, libc::MS_PRIVATE)?;
    over.attach(there.as_fd())
}
