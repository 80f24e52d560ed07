//! Parses the place of an archive as a user writes it.

use std::path::{Path, PathBuf};

use super::Source;
use crate::bytes::encryption::Identities;
use crate::error::Error;
use crate::format::limits::Limits;

/// An archive to read: `PATH`, `oci:DIR[:NAME]`, `oci-archive:FILE[:NAME]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArchivePlace {
    path: PathBuf,
    image: Option<String>,
}

impl ArchivePlace {
    /// Parses a user's text. Never fails: errors show when the archive is opened.
    pub fn parse(text: &str) -> Self {
        let image = text
            .strip_prefix("oci:")
            .or_else(|| text.strip_prefix("oci-archive:"));
        let Some(rest) = image else {
            return Self {
                path: text.into(),
                image: None,
            };
        };
        // Names (with tags) and directories may both hold colons; the path that exists decides.
        let splits = rest.match_indices(':').map(|(at, _)| at);
        let split = splits
            .filter(|_| !Path::new(rest).exists())
            .find(|at| Path::new(&rest[..*at]).exists());
        match split {
            Some(at) => Self {
                path: rest[..at].into(),
                image: Some(rest[at + 1..].into()),
            },
            None => Self {
                path: rest.into(),
                image: None,
            },
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The image's name in a layout that may hold several.
    pub fn image(&self) -> Option<&str> {
        self.image.as_deref()
    }

    /// Opens the archive within the default limits, with keys for what is encrypted.
    pub fn open(&self, identities: &Identities) -> Result<Source, Error> {
        let image = self.image.as_deref();
        let mut source = Source::open_image(&self.path, image, &Limits::default())?;
        source.unlock(identities);
        Ok(source)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places() {
        let dir = tempfile::tempdir().unwrap();
        let layout = dir.path().join("lay:out");
        std::fs::create_dir(&layout).unwrap();
        let place = |text: &str| {
            let place = ArchivePlace::parse(text);
            (place.path, place.image)
        };
        let layout = layout.to_str().unwrap();
        assert_eq!(place(layout), (layout.into(), None));
        assert_eq!(place(&format!("oci:{layout}")), (layout.into(), None));
        assert_eq!(
            place(&format!("oci:{layout}:job:1")),
            (layout.into(), Some("job:1".into()))
        );
        assert_eq!(place("oci-archive:none:x"), ("none:x".into(), None));
    }
}
