//! Reading checkpoints of every kind as one set of files with one set of names.
//!
//! Whatever the kind, CRIU's images are `checkpoint/NAME`, and the engine's files lie beside that directory as in
//! podman's export file: `config.dump`, `spec.dump`, `rootfs-diff.tar`. Nothing is trusted: names, types, sizes
//! and counts are checked before a caller sees an entry.

mod detect;
mod directory;
mod image;
mod tarball;

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::entry::{Entry, Ledger};
use crate::error::{Bad, Error};
use crate::limits::Limits;
use crate::oci::Descriptor;
use crate::store::Found;
use crate::stream::Compression;

pub(crate) use image::Layer;
pub use image::{ContainerdParts, Image};
pub(crate) use tarball::visit_tar;

/// What a checkpoint is stored as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// podman's export file.
    PodmanTar(Compression),
    /// A directory with the content of such a file: `checkpoint/`, `config.dump`, ...
    Directory,
    /// A directory of CRIU's images.
    CriuDirectory,
    /// An OCI image layout in a directory.
    OciLayout,
    /// A tar of an OCI image layout.
    OciArchive,
    /// containerd's own checkpoint (`ctr c checkpoint`, `ctr i export`) in a tar, or in a directory.
    Containerd {
        /// `true` for a tar.
        archive: bool,
    },
    /// A checkpoint file by CRI-O.
    CrioTar(Compression),
    /// A checkpoint file by containerd's CRI plugin.
    CriContainerdTar(Compression),
    /// A tar of CRIU's images.
    CriuTar(Compression),
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PodmanTar(c) => write!(f, "podman export file ({c})"),
            Self::Directory => f.write_str("unpacked checkpoint"),
            Self::CriuDirectory => f.write_str("directory of CRIU images"),
            Self::OciLayout => f.write_str("OCI image layout"),
            Self::OciArchive => f.write_str("OCI image archive"),
            Self::Containerd { archive: true } => f.write_str("containerd checkpoint archive"),
            Self::Containerd { archive: false } => f.write_str("containerd checkpoint layout"),
            Self::CrioTar(c) => write!(f, "CRI-O checkpoint file ({c})"),
            Self::CriContainerdTar(c) => write!(f, "containerd CRI checkpoint file ({c})"),
            Self::CriuTar(c) => write!(f, "tar of CRIU images ({c})"),
        }
    }
}

/// A checkpoint that was found at a path.
#[derive(Debug, Clone)]
pub struct Source {
    path: PathBuf,
    kind: Kind,
    pub(crate) inner: Inner,
}

#[derive(Debug, Clone)]
pub(crate) enum Inner {
    Directory(directory::Directory),
    Tar(tarball::Tarball),
    Image(image::ImageSource),
    Containerd(image::ContainerdSource),
}

/// What [`Source::visit`] calls for each entry.
pub type Visitor<'v> = dyn FnMut(&Entry, &mut dyn Read) -> Result<(), Error> + 'v;

impl Source {
    /// Finds out what lies at the path, within the default [`Limits`]. Of a large archive only so much is read as
    /// tells its kind.
    ///
    /// # Errors
    /// [`Error::NotACheckpoint`], or what is wrong with it.
    pub fn open(path: &Path) -> Result<Self, Error> {
        Self::open_image(path, None, &Limits::default())
    }

    /// As [`Source::open`], with other limits, and the name of the image where a layout holds several.
    ///
    /// # Errors
    /// As [`Source::open`].
    pub fn open_image(path: &Path, image: Option<&str>, limits: &Limits) -> Result<Self, Error> {
        let (kind, inner) = detect::detect(path, image, limits)?;
        Ok(Self {
            path: path.into(),
            kind,
            inner,
        })
    }

    /// What it is stored as.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// CRIU's image directory, if the checkpoint is a directory.
    pub fn images_directory(&self) -> Option<PathBuf> {
        match &self.inner {
            Inner::Directory(directory) => Some(directory.place(crate::names::CHECKPOINT_DIR)),
            _ => None,
        }
    }

    /// Takes the files of a store's entry as if they were in the directory that the checkpoint is, without the reference
    /// to them: what is made of it needs no store. `false`: it is no directory, unpack it first.
    pub fn join(&mut self, stored: Found) -> bool {
        match &mut self.inner {
            Inner::Directory(directory) => {
                directory.join(stored);
                true
            }
            _ => false,
        }
    }

    /// The image, if it is one.
    pub fn image(&self) -> Option<&Image> {
        match &self.inner {
            Inner::Image(image) => Some(&image.image),
            _ => None,
        }
    }

    /// The parts of containerd's own checkpoint, if it is one.
    pub fn containerd(&self) -> Option<&ContainerdParts> {
        match &self.inner {
            Inner::Containerd(source) => Some(&source.parts),
            _ => None,
        }
    }

    /// An image's manifest as it is stored, which is what its digest is of.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if it is no image; [`Error::Bad`] if it has changed since it was opened.
    pub fn manifest(&self) -> Result<Vec<u8>, Error> {
        match &self.inner {
            Inner::Image(image) => image.blobs.checked(&image.image.digest),
            _ => Err(self.no_image()),
        }
    }

    fn no_image(&self) -> Error {
        Error::Unsupported {
            path: self.path.clone(),
            reason: format!(
                "a {} is no image; make one of it first: cryopod convert",
                self.kind
            ),
        }
    }

    /// The content of an image's blob, whose size is the descriptor's; its digest is yet to be checked.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if it is no image; [`Error::Bad`] if there is no such blob, or one of another size.
    pub fn blob(&self, descriptor: &Descriptor) -> Result<impl Read + Send + use<>, Error> {
        match &self.inner {
            Inner::Image(image) => image.blobs.open(descriptor),
            Inner::Containerd(source) => source.blobs.open(descriptor),
            _ => Err(self.no_image()),
        }
    }

    /// Bytes on disk: the file, or all files of the directory or image.
    ///
    /// # Errors
    /// What the system said.
    pub fn stored_bytes(&self) -> Result<u64, Error> {
        match &self.inner {
            Inner::Directory(directory) => Ok(directory
                .list(&Limits::default())?
                .iter()
                .map(|e| e.size)
                .sum()),
            Inner::Tar(tar) => Ok(tar.bytes()),
            Inner::Image(image) => Ok(image.layers().map(|l| l.descriptor.size).sum()),
            Inner::Containerd(source) => Ok(source.bytes()),
        }
    }

    /// Every entry, directories before what lies in them, in the archive's order (a directory's: by name).
    ///
    /// The visitor may read an entry's content or leave it; nothing is held in memory. An image's digests are
    /// checked on the way, so content is to be trusted only when this has returned. It may return early with an
    /// error of its own.
    ///
    /// # Errors
    /// [`Error::Bad`] at the first thing that is wrong, and what the visitor returned.
    pub fn visit(&self, limits: &Limits, visitor: &mut Visitor<'_>) -> Result<(), Error> {
        self.walk(limits, &|_| true, visitor)
    }

    /// As `visit`; layers for which `layer` says no are left out and not checked.
    fn walk(
        &self,
        limits: &Limits,
        layer: &dyn Fn(&Layer) -> bool,
        visitor: &mut Visitor<'_>,
    ) -> Result<(), Error> {
        let mut ledger = Ledger::new(limits);
        let mut visitor = |entry: &Entry, reader: &mut dyn Read| match ledger.take(entry) {
            Ok(true) => visitor(entry, reader),
            Ok(false) => Ok(()),
            Err(bad) => Err(Error::bad(&self.path, bad)),
        };
        match &self.inner {
            Inner::Directory(directory) => directory.visit(limits, &mut visitor),
            Inner::Tar(tar) => tar.visit(limits, &mut visitor),
            Inner::Image(image) => image.visit(limits, layer, &mut visitor),
            Inner::Containerd(source) => source.visit(limits, &mut visitor),
        }
    }

    /// The small files that `wanted` says yes to, by name. Content of other files is not kept; of an image written
    /// by cryopod, layers without a wanted file are not read.
    ///
    /// # Errors
    /// [`Error::Bad`], also if a wanted file is larger than [`Limits::small_file_bytes`].
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
            let max = limits.small_file_bytes;
            if entry.size > max {
                let bad = Bad::SmallFileTooLarge {
                    name: entry.name.clone(),
                    bytes: entry.size,
                    max,
                };
                return Err(Error::bad(&self.path, bad));
            }
            total += entry.size;
            if total > limits.small_total_bytes {
                return Err(Error::bad(
                    &self.path,
                    Bad::SmallFilesTooLarge(limits.small_total_bytes),
                ));
            }
            let mut content = Vec::new();
            reader
                .read_to_end(&mut content)
                .map_err(|e| Error::from_io(&self.path, "read it", e))?;
            files.insert(entry.name.clone(), content);
            Ok(())
        })?;
        Ok(files)
    }
}

#[cfg(test)]
mod tests;
