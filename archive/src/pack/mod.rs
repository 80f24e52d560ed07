//! Writing a checkpoint as one portable thing.
//!
//! [`pack`] also converts: its source is whatever [`Source`] reads. The destination appears under its name only
//! when it is whole and on disk.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::Error;
use crate::limits::Limits;
use crate::oci::{Descriptor, Digest};
use crate::progress::Progress;
use crate::source::Source;
use crate::stream::Compression;

/// What is written, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Destination {
    /// An OCI image layout in a folder: `oci:DIR`.
    Layout(PathBuf),
    /// A tar of one: `oci-archive:FILE`.
    Archive(PathBuf),
    /// A file as podman's `checkpoint --export` writes it, for `podman restore --import` and, not compressed, for
    /// Kubernetes.
    Tar(PathBuf, Compression),
}

impl Destination {
    /// Reads `oci:DIR`, `oci-archive:FILE`, or a file name: `.tar` is not compressed, `.tar.gz` and `.tgz` are gzip,
    /// everything else zstd.
    pub fn parse(text: &str) -> Self {
        if let Some(dir) = text.strip_prefix("oci:") {
            return Self::Layout(dir.into());
        }
        if let Some(file) = text.strip_prefix("oci-archive:") {
            return Self::Archive(file.into());
        }
        let compression = match text {
            t if t.ends_with(".tar") => Compression::None,
            t if t.ends_with(".gz") || t.ends_with(".tgz") => Compression::Gzip,
            _ => Compression::Zstd,
        };
        Self::Tar(text.into(), compression)
    }

    /// Where it will lie.
    pub fn path(&self) -> &Path {
        match self {
            Self::Layout(path) | Self::Archive(path) | Self::Tar(path, _) => path,
        }
    }
}

/// How to write.
#[derive(Debug, Clone)]
pub struct PackOptions {
    /// zstd level, -7 to 19, or gzip level 1 to 9.
    pub level: i32,
    /// How an image's layers are compressed. Data that does not shrink is stored as it is.
    pub compression: Compression,
    /// Threads that compress; 0: as many as there are cores. The result does not depend on it.
    pub threads: usize,
    /// Everything in one layer, for engines that need it.
    pub single_layer: bool,
    /// Annotations of the image, beside those that come from the checkpoint.
    pub annotations: BTreeMap<String, String>,
    /// The image's name in the layout's index.
    pub name: Option<String>,
    /// Files that replace or complete those of the source, by their normalised names.
    pub extra_files: BTreeMap<String, Vec<u8>>,
    /// Replace what lies under the destination's name.
    pub replace: bool,
    /// Bounds on the source.
    pub limits: Limits,
    /// Counters for a progress bar, and a way to stop.
    pub progress: Arc<Progress>,
}

impl Default for PackOptions {
    fn default() -> Self {
        Self {
            level: 1,
            compression: Compression::Zstd,
            threads: 0,
            single_layer: false,
            annotations: BTreeMap::new(),
            name: None,
            extra_files: BTreeMap::new(),
            replace: false,
            limits: Limits::default(),
            progress: Arc::default(),
        }
    }
}

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packed {
    /// Digest of an image's manifest; of a tar none.
    pub digest: Option<Digest>,
    /// An image's layers.
    pub layers: Vec<Descriptor>,
    /// Bytes of all files of the checkpoint.
    pub content_bytes: u64,
    /// Bytes that were written.
    pub stored_bytes: u64,
}

/// Writes a checkpoint to a destination.
///
/// # Errors
/// [`Error`]; then nothing lies under the destination's name, or, with [`PackOptions::replace`], what lay there
/// before.
pub fn pack(source: &Source, to: &Destination, options: &PackOptions) -> Result<Packed, Error> {
    let _ = (to, options);
    Err(Error::Unsupported {
        path: source.path().into(),
        reason: "packing is not built yet".into(),
    })
}
