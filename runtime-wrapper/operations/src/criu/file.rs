//! Reads CRIU's configuration files: only regular files up to a size limit. A file that a container's annotation names
//! must belong to root and be writable by nobody else.

use cryopod_host::files::open_regular;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

const MAX_BYTES: u64 = 1 << 20;

/// Reads a file that the administrator or the runtime names.
pub fn read(path: &Path) -> io::Result<String> {
    text(
        OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(path)?,
    )
}

/// Reads a file that an annotation names: no link, owned by root, writable by nobody else.
pub fn read_roots(path: &Path) -> io::Result<String> {
    let file = open_regular(path)?;
    let meta = file.metadata()?;
    let own = nix::unistd::geteuid().as_raw();
    if meta.uid() != 0 && meta.uid() != own || meta.mode() & 0o022 != 0 {
        return Err(io::Error::other(
            "it is not root's alone: chown it to root and take write permission from group and others",
        ));
    }
    text(file)
}

fn text(file: File) -> io::Result<String> {
    let meta = file.metadata()?;
    if !meta.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    let mut text = String::new();
    file.take(MAX_BYTES + 1).read_to_string(&mut text)?;
    match text.len() as u64 {
        0..=MAX_BYTES => Ok(text),
        _ => Err(io::Error::other(
            "it is larger than 1 MiB, which no such file is",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn roots_own_regular_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("criu.conf");
        fs::write(&path, "tcp-close\n").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        assert_eq!(read_roots(&path).unwrap(), "tcp-close\n");
        let link = dir.path().join("link");
        symlink(&path, &link).unwrap();
        assert!(read_roots(&link).is_err() && read(&link).is_ok());
        fs::set_permissions(&path, Permissions::from_mode(0o664)).unwrap();
        let e = read_roots(&path).unwrap_err().to_string();
        assert!(e.contains("not root's alone"), "{e}");
        let e = read(Path::new("/dev/zero")).unwrap_err().to_string();
        assert!(e.contains("no regular file"), "{e}");
        fs::write(&path, "x".repeat((1 << 20) + 1)).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("1 MiB"));
        let fifo = dir.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRUSR).unwrap();
        assert!(read(&fifo).is_err(), "and does not wait for a writer");
    }
}
