//! Opens files that strangers may have put there.

use std::fs::File;
use std::io;
use std::path::Path;

use cryopod_host::files::open_regular;

use super::VramError;

/// Opens a regular file, whatever a stranger may have put there.
pub(super) fn open_file(path: &Path) -> Result<File, VramError> {
    open_regular(path).map_err(|e| match e.kind() {
        io::ErrorKind::InvalidInput => VramError::damaged(path, e.to_string()),
        _ => VramError::io(path, "cannot be opened")(e),
    })
}
