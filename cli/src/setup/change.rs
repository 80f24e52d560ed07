//! Changes of files. A file is written whole and then renamed into its place: nobody sees half of one.

use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};

use anyhow::Context;
use cryopod_host::files::{Host, create_private, if_there, read_bounded, sync_directory};
use serde::{Deserialize, Serialize};
use similar::TextDiff;

/// A larger configuration file is none.
pub const MAX_FILE: u64 = 1 << 20;

/// Paths are those of the host, before [`Host::path`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Change {
    /// `None`: the file is not there.
    File {
        path: PathBuf,
        before: Option<String>,
        after: Option<String>,
    },
    /// A symbolic link; `None`: there is none.
    Link {
        path: PathBuf,
        before: Option<PathBuf>,
        after: Option<PathBuf>,
    },
}

impl Change {
    /// The change of a file's text; `None` if there is none.
    pub fn of(path: PathBuf, before: Option<String>, after: String) -> Option<Self> {
        let after = Some(after);
        (before != after).then_some(Self::File {
            path,
            before,
            after,
        })
    }

    /// Returns the path that is changed.
    pub fn path(&self) -> &Path {
        match self {
            Self::File { path, .. } | Self::Link { path, .. } => path,
        }
    }

    /// Returns true if it is the change of a link.
    pub fn is_link(&self) -> bool {
        matches!(self, Self::Link { .. })
    }

    /// As a unified diff.
    pub fn shown(&self) -> String {
        match self {
            Self::File {
                path,
                before,
                after,
            } => {
                let name = |text: &Option<String>| match text {
                    Some(_) => path.display().to_string(),
                    None => "/dev/null".into(),
                };
                TextDiff::from_lines(
                    before.as_deref().unwrap_or_default(),
                    after.as_deref().unwrap_or_default(),
                )
                .unified_diff()
                .header(&name(before), &name(after))
                .to_string()
            }
            Self::Link {
                path,
                before,
                after,
            } => {
                let line = |sign: char, to: &Option<PathBuf>| match to {
                    Some(to) => format!("{sign}link {} -> {}\n", path.display(), to.display()),
                    None => String::new(),
                };
                format!("{}{}", line('-', before), line('+', after))
            }
        }
    }

    /// Makes it. The directory must exist.
    pub fn make(&self, host: &Host) -> anyhow::Result<()> {
        let failed = || format!("{}: cannot be changed", self.path().display());
        match self {
            Self::File {
                path,
                after: Some(text),
                ..
            } => write(&host.path(path), text).with_context(failed),
            Self::Link {
                path,
                after: Some(to),
                ..
            } => symlink(to, host.path(path)).with_context(failed),
            Self::File { path, .. } | Self::Link { path, .. } => {
                std::fs::remove_file(host.path(path)).with_context(failed)
            }
        }
    }
}

/// Reads a file; `None` if it is not there.
pub fn read(host: &Host, path: &Path) -> anyhow::Result<Option<String>> {
    let failed = || format!("{}: cannot be read", path.display());
    let read = if_there(read_bounded(&host.path(path), MAX_FILE));
    let Some(bytes) = read.with_context(failed)? else {
        return Ok(None);
    };
    let text = String::from_utf8(bytes).with_context(failed)?;
    Ok(Some(text))
}

/// Where the new content of a file is until it is whole. It is one name, so that what a killed run leaves is found.
pub fn beside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.cryopod-new"))
}

/// Replaces a file by one with this text. Mode and owner stay; behind a link, the file that it leads to is replaced.
pub fn write(path: &Path, text: &str) -> io::Result<()> {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let directory = path.parent().unwrap_or(Path::new("/"));
    let new = beside(&path);
    if_there(std::fs::remove_file(&new))?;
    // An engine's configuration can hold secrets.
    let mut file = create_private(&new)?;
    file.write_all(text.as_bytes())?;
    let mode = match path.metadata() {
        Ok(old) => {
            chown(&new, Some(old.uid()), Some(old.gid()))?;
            old.permissions()
        }
        Err(_) => PermissionsExt::from_mode(0o644),
    };
    file.set_permissions(mode)?;
    file.sync_all()?;
    std::fs::rename(&new, &path)?;
    sync_directory(directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_keeps_its_mode_and_a_link_stays() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        std::fs::write(&file, "old").unwrap();
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).unwrap();
        symlink("file", &link).unwrap();
        // A run that was killed left this.
        std::fs::write(beside(&file), "half").unwrap();
        write(&link, "new").unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "new");
        assert_eq!(file.metadata().unwrap().mode() & 0o777, 0o600);
        assert!(link.is_symlink());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_diff() {
        let change = Change::of("/etc/x".into(), Some("a\nb\n".into()), "a\nc\n".into()).unwrap();
        assert_eq!(
            change.shown(),
            "--- /etc/x\n+++ /etc/x\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n"
        );
        let new = Change::of("/etc/x".into(), None, "a\n".into()).unwrap();
        assert!(new.shown().starts_with("--- /dev/null\n+++ /etc/x\n"));
        assert!(Change::of("/etc/x".into(), Some("a".into()), "a".into()).is_none());
    }
}
