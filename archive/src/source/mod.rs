//! Reads checkpoints of every kind as one set of files with one set of names.
//!
//! For every kind, CRIU's images are `checkpoint/NAME`. The engine's files lie beside that directory as in podman's
//! export file: `config.dump`, `spec.dump`, `rootfs-diff.tar`. Nothing is trusted: names, types, sizes and counts are
//! checked before a caller sees an entry.

mod detect;
mod directory;
mod image;
mod in_place;
mod place;
mod tarball;
pub(crate) mod walk;

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::bytes::decode::{Hash, with_decoder};
use crate::bytes::encryption::Identities;
use crate::error::{Bad, Error};
use crate::format::compression::Compression;
use crate::format::entry::Entry;
use crate::format::limits::Limits;
use crate::format::oci::Descriptor;
use crate::progress::Progress;
use crate::store::Found;

pub(crate) use image::Layer;
pub use image::{ContainerdParts, Image};
pub use in_place::{FoundShard, InPlace};
pub use place::ArchivePlace;
pub(crate) use tarball::visit_tar;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    PodmanTar(Compression),
    /// A directory with the content of an export file of podman: `checkpoint/`, `config.dump`, ...
    Directory,
    /// A directory of CRIU's images.
    CriuDirectory,
    /// An OCI image layout in a directory.
    OciLayout,
    /// A tar of an OCI image layout.
    OciArchive,
    /// containerd's own checkpoint (`ctr c checkpoint`, `ctr i export`) in a tar or a directory.
    Containerd {
        /// `true` for a tar.
        archive: bool,
    },
    /// CRI-O's checkpoint file.
    CrioTar(Compression),
    /// The checkpoint file of containerd's CRI plugin.
    CriContainerdTar(Compression),
    /// A tar of CRIU's images.
    CriuTar(Compression),
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tar = |f: &mut fmt::Formatter<'_>, what: &str, by: &Compression| match by {
            Compression::None => write!(f, "{what} (not compressed)"),
            by => write!(f, "{what} ({by})"),
        };
        match self {
            Self::PodmanTar(c) => tar(f, "podman export file", c),
            Self::Directory => f.write_str("unpacked checkpoint"),
            Self::CriuDirectory => f.write_str("directory of CRIU images"),
            Self::OciLayout => f.write_str("OCI image layout"),
            Self::OciArchive => f.write_str("OCI image archive"),
            Self::Containerd { archive: true } => f.write_str("containerd checkpoint archive"),
            Self::Containerd { archive: false } => f.write_str("containerd checkpoint layout"),
            Self::CrioTar(c) => tar(f, "CRI-O checkpoint file", c),
            Self::CriContainerdTar(c) => tar(f, "containerd CRI checkpoint file", c),
            Self::CriuTar(c) => tar(f, "tar of CRIU images", c),
        }
    }
}

#[derive(Debug, Clone)]
pub struct Source {
    path: PathBuf,
    /// The image that was asked for.
    asked: Option<String>,
    kind: Kind,
    pub(crate) inner: SourceInner,
}

#[derive(Debug, Clone)]
pub(crate) enum SourceInner {
    Directory(directory::Directory),
    Tar(tarball::Tarball),
    Image(image::ImageSource),
    Containerd(image::ContainerdSource),
}

pub type Visitor<'v> = dyn FnMut(&Entry, &mut dyn Read) -> Result<(), Error> + 'v;

impl Source {
    /// Detects the kind of checkpoint at the path, within the default [`Limits`]. Reads only as much of a large archive
    /// as this needs.
    pub fn open(path: &Path) -> Result<Self, Error> {
        Self::open_image(path, None, &Limits::default())
    }

    /// Like [`Source::open`], with other limits. `image` names the image where a layout holds several.
    pub fn open_image(path: &Path, image: Option<&str>, limits: &Limits) -> Result<Self, Error> {
        let (kind, inner) = detect::detect(path, image, limits)?;
        Ok(Self {
            path: path.into(),
            asked: image.map(str::to_owned),
            kind,
            inner,
        })
    }

    /// Opens the same checkpoint with descriptors of its own, for a child that has not those of its parent. Without the
    /// files of a store that were joined.
    ///
    /// # Errors
    /// As for [`Source::open`]; another image has taken its place.
    pub fn reopen(&self, limits: &Limits) -> Result<Self, Error> {
        let mut again = Self::open_image(&self.path, self.asked.as_deref(), limits)?;
        if let SourceInner::Image(image) = &self.inner {
            again.unlock(&image.identities);
        }
        if again.image().map(|i| &i.digest) != self.image().map(|i| &i.digest) {
            return Err(Error::NotACheckpoint {
                path: self.path.clone(),
                reason: "another image has taken its place meanwhile".into(),
            });
        }
        Ok(again)
    }

    /// Takes the keys for what is encrypted in it.
    pub fn unlock(&mut self, identities: &Identities) {
        if let SourceInner::Image(image) = &mut self.inner {
            image.identities = identities.clone();
        }
    }

    /// Returns true if it has a layer that no engine can read.
    pub fn is_encrypted(&self) -> bool {
        let layers = self.image().into_iter().flat_map(|i| &i.manifest.layers);
        layers.into_iter().any(Descriptor::is_encrypted)
    }

    pub fn kind(&self) -> Kind {
        self.kind
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns CRIU's image directory, if the checkpoint is a directory.
    pub fn images_directory(&self) -> Option<PathBuf> {
        match &self.inner {
            SourceInner::Directory(directory) => {
                Some(directory.place(crate::format::names::CHECKPOINT_DIR))
            }
            _ => None,
        }
    }

    /// Adds the files of a store's entry as if they were in the checkpoint's directory, and hides the reference to
    /// them. So a copy of this source needs no store. Returns `false` if the checkpoint is not a directory; unpack it
    /// first.
    pub fn join(&mut self, stored: Found) -> bool {
        match &mut self.inner {
            SourceInner::Directory(directory) => {
                directory.join(stored);
                true
            }
            _ => false,
        }
    }

    /// Returns the OCI image, if the checkpoint is one.
    pub fn image(&self) -> Option<&Image> {
        match &self.inner {
            SourceInner::Image(image) => Some(&image.image),
            _ => None,
        }
    }

    /// Returns the parts of containerd's own checkpoint, if it is one.
    pub fn containerd(&self) -> Option<&ContainerdParts> {
        match &self.inner {
            SourceInner::Containerd(source) => Some(&source.parts),
            _ => None,
        }
    }

    /// Returns an image's manifest as it is stored; the image's digest covers these bytes. Fails with
    /// [`Error::Unsupported`] if it is not an image; [`Error::Bad`] if it has changed since it was opened.
    pub fn manifest(&self) -> Result<Vec<u8>, Error> {
        match &self.inner {
            SourceInner::Image(image) => image.blobs.checked(&image.image.digest),
            _ => Err(self.no_image()),
        }
    }

    pub(crate) fn no_image(&self) -> Error {
        Error::Unsupported {
            path: self.path.clone(),
            reason: format!(
                "a {} is no image; make one of it first: cryopod pack",
                self.kind
            ),
        }
    }

    /// Opens the content of an image's blob and checks its size against the descriptor. The caller must check the
    /// digest. Fails with [`Error::Unsupported`] if it is not an image; [`Error::Bad`] if the blob is missing or has
    /// another size.
    pub fn blob(&self, descriptor: &Descriptor) -> Result<impl Read + Send + use<>, Error> {
        match &self.inner {
            SourceInner::Image(image) => image.blobs.open(descriptor),
            SourceInner::Containerd(source) => source.blobs.open(descriptor),
            _ => Err(self.no_image()),
        }
    }

    /// Bytes on disk: the file, or all files of the directory or image.
    pub fn stored_bytes(&self) -> Result<u64, Error> {
        match &self.inner {
            SourceInner::Directory(directory) => Ok(directory
                .list(&Limits::default())?
                .iter()
                .map(|e| e.size)
                .sum()),
            SourceInner::Tar(tar) => Ok(tar.bytes()),
            SourceInner::Image(image) => Ok(image.layers().map(|l| l.descriptor.size).sum()),
            SourceInner::Containerd(source) => Ok(source.bytes()),
        }
    }

    /// Visits every entry, directories before their content, in the archive's order (for a directory: by name).
    ///
    /// The visitor may read an entry's content or skip it; nothing is held in memory. An image's digests are checked on
    /// the way, so trust content only after this has returned. The visitor may stop early with its own error. Fails
    /// with [`Error::Bad`] at the first fault, and errors of the visitor.
    pub fn visit(&self, limits: &Limits, visitor: &mut Visitor<'_>) -> Result<(), Error> {
        self.walk(limits, &|_| true, visitor)
    }

    /// Like `visit`, but skips the layers for which `layer` returns false, without checking them.
    pub(crate) fn walk(
        &self,
        limits: &Limits,
        layer: &dyn Fn(&Layer) -> bool,
        visitor: &mut Visitor<'_>,
    ) -> Result<(), Error> {
        with_decoder(1, &Progress::default(), |decoder| {
            walk::visit(self, limits, decoder, layer, Hash::Both, visitor)
        })
    }

    /// Reads the small files that `wanted` accepts, by name. Skips the content of other files. In an image written by
    /// cryopod, it also skips layers without a wanted file. Fails with [`Error::Bad`], also if a wanted file is larger
    /// than [`Limits::small_file_bytes`].
    pub fn small_files(
        &self,
        wanted: &dyn Fn(&str) -> bool,
        limits: &Limits,
    ) -> Result<BTreeMap<String, Vec<u8>>, Error> {
        let mut files = BTreeMap::new();
        let mut total = 0u64;
        let layer = |layer: &Layer| {
            layer
                .files()
                .is_none_or(|files| files.iter().any(|f| wanted(f)))
        };
        self.walk(limits, &layer, &mut |entry, reader| {
            if !entry.is_file() || !wanted(&entry.name) {
                return Ok(());
            }
            let read = entry.read_small(reader, limits);
            let content = read.map_err(|e| Error::from_io(&self.path, "read it", e))?;
            total += entry.size;
            if total > limits.small_total_bytes {
                return Err(Error::bad(
                    &self.path,
                    Bad::SmallFilesTooLarge(limits.small_total_bytes),
                ));
            }
            files.insert(entry.name.clone(), content);
            Ok(())
        })?;
        Ok(files)
    }
}

#[cfg(test)]
mod tests;
