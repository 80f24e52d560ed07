//! Opens files that strangers may have put there.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use super::VramError;

const O_NOFOLLOW: i32 = 0o400_000;
const O_NONBLOCK: i32 = 0o4_000;

/// Opens a regular file, whatever a stranger may have put there.
pub(super) fn open_file(path: &Path) -> Result<File, VramError> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(O_NOFOLLOW | O_NONBLOCK)
        .open(path)
        .map_err(VramError::io(path, "cannot be opened"))?;
    let is_file = file.metadata().is_ok_and(|meta| meta.is_file());
    if !is_file {
        return Err(VramError::damaged(path, "not a regular file"));
    }
    Ok(file)
}
