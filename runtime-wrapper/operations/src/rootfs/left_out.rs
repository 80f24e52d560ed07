//! Collects the extended attributes that a tar of changes leaves out, for one warning.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};

use super::CAPABILITY;

/// Most files, and most attributes, that the warning names.
const NAMED: usize = 5;
/// Most characters of an attribute's name: in a stranger's tar it may have any length.
const MAX_NAME: usize = 255;
/// Attributes that no restore needs: the runtime labels the new root, and overlayfs writes its own.
const NOT_MISSED: [&str; 2] = ["security.selinux", "trusted.overlay."];

#[derive(Debug, Default)]
pub struct LeftOut {
    files: u64,
    first: Vec<PathBuf>,
    attributes: BTreeSet<String>,
}

impl LeftOut {
    /// Notes which attributes of this file are not carried.
    pub fn note<'n>(&mut self, path: &Path, names: impl IntoIterator<Item = &'n [u8]>) {
        let names = names.into_iter().map(String::from_utf8_lossy);
        let missed = |n: &_| !NOT_MISSED.iter().any(|p| str::starts_with(n, p));
        let mut lost = false;
        for name in names.filter(|n| n != CAPABILITY && !n.is_empty() && missed(n)) {
            lost = true;
            // One more than is named says that there are more.
            if self.attributes.len() <= NAMED {
                self.attributes
                    .insert(name.chars().take(MAX_NAME).collect());
            }
        }
        if lost {
            self.files += 1;
            if self.first.len() <= NAMED {
                self.first.push(path.to_owned());
            }
        }
    }

    pub fn warn(&self) {
        if self.files > 0 {
            tracing::warn!("{self}");
        }
    }
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let files = self.first.iter().map(|p| format!("/{}", p.display()));
        write!(
            f,
            "a restore leaves out extended attributes of {} files and directories ({}): {}; users and groups that only \
             an access control list names lose access",
            self.files,
            some(self.attributes.iter().cloned()),
            some(files)
        )
    }
}

fn some(names: impl Iterator<Item = String>) -> String {
    let mut names: Vec<_> = names.take(NAMED + 1).collect();
    if let Some(more) = names.get_mut(NAMED) {
        *more = "...".to_owned();
    }
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_warning_names_some() {
        let mut left_out = LeftOut::default();
        left_out.note(
            Path::new("a"),
            [&b"trusted.overlay.origin"[..], b"security.selinux", b""],
        );
        left_out.note(Path::new("a"), [CAPABILITY.as_bytes()]);
        assert_eq!(left_out.files, 0);
        left_out.note(Path::new("d/a"), [&b"user.x"[..], b"security.ima"]);
        let text = left_out.to_string();
        assert!(
            text.contains("of 1 files") && text.contains("(security.ima, user.x): /d/a;"),
            "{text}"
        );
        for n in 0..1000 {
            let name = format!("user.{n}");
            left_out.note(Path::new(&name), [name.as_bytes()]);
        }
        let text = left_out.to_string();
        assert!(
            text.contains("1001") && text.contains(", ...): ") && text.contains(", ...;"),
            "{text}"
        );
        assert!(text.len() < 300, "{text}");
    }
}
