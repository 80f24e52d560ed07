//! Writes a small result to a file or to standard output.

use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::Context;

/// Writes `content` to standard output if `to` is `-`, else to the file `to`: beside it, then renamed, so that a reader
/// never sees half of it. A device or pipe is written as it is.
pub fn write(to: &str, content: &[u8]) -> anyhow::Result<()> {
    if to == "-" {
        return Ok(std::io::stdout().lock().write_all(content)?);
    }
    let path = Path::new(to);
    let failed = || format!("{to}: cannot be written");
    if path.metadata().is_ok_and(|meta| !meta.is_file()) {
        return std::fs::write(path, content).with_context(failed);
    }
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
    let mut file = tempfile::Builder::new()
        .prefix(".cryopod-output-")
        .permissions(Permissions::from_mode(0o644))
        .tempfile_in(parent.unwrap_or(Path::new(".")))
        .with_context(failed)?;
    file.write_all(content).with_context(failed)?;
    file.persist(path).with_context(failed)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a");
        let name = file.to_str().unwrap();
        write(name, b"first").unwrap();
        write(name, b"second").unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), b"second");
        let mode = file.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o444, 0o444);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        write("/dev/null", b"x").unwrap();
        let error = write("/nowhere/a", b"x").unwrap_err();
        assert!(error.to_string().contains("/nowhere/a: cannot be written"));
    }
}
