//! Defines the errors of reading and writing archives.

use std::io;
use std::path::{Path, PathBuf};

use cryopod_host::sandbox::SandboxError;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Of the child that decodes the archive.
    #[error(transparent)]
    Decoder(#[from] SandboxError),
    #[error("{path}: cannot {action}: {source}")]
    Io {
        path: PathBuf,
        /// Completes "cannot ...".
        action: &'static str,
        source: io::Error,
    },
    #[error(
        "{path}: not a checkpoint: {reason}; known are podman's export file, a directory of CRIU images, an OCI image layout or a tar of one, an exported containerd checkpoint, and a checkpoint file of Kubernetes"
    )]
    NotACheckpoint { path: PathBuf, reason: String },
    /// The archive's content is damaged or hostile.
    #[error(
        "{path}: {bad}; the archive is damaged or not made by a checkpoint: nothing of it is used"
    )]
    Bad { path: PathBuf, bad: Bad },
    #[error("{path}: exists already; choose another name or remove it")]
    Exists { path: PathBuf },
    #[error(
        "{path}: {needed} bytes are needed and {free} are free; free some space or choose another place"
    )]
    NoSpace {
        path: PathBuf,
        needed: u64,
        free: u64,
    },
    #[error(
        "{path}: encrypted, and {reason}; name the file of an identity that may read it in `identities` under [encrypt] of cryopod's configuration"
    )]
    NoKey { path: PathBuf, reason: String },
    #[error("{path}: {reason}")]
    Unsupported {
        path: PathBuf,
        /// What does not work, and what does.
        reason: String,
    },
    /// Another thread has failed, whose error is reported.
    #[error("{path}: stopped, as another part of it has failed")]
    Cancelled {
        /// The destination, or the archive that was read.
        path: PathBuf,
    },
}

impl Error {
    /// Wraps a system error; `action` completes "cannot ...".
    pub fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::from_io(&path, action, source)
    }

    /// Like [`Error::io`], but unwraps a [`Bad`] that travelled inside the `io::Error`.
    pub fn from_io(path: &Path, action: &'static str, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.downcast::<Bad>() {
            Ok(bad) => Self::Bad { path, bad },
            Err(source) => Self::Io {
                path,
                action,
                source,
            },
        }
    }

    pub fn bad(path: &Path, bad: Bad) -> Self {
        Self::Bad {
            path: path.to_owned(),
            bad,
        }
    }
}

/// What is wrong inside an archive. Names are shortened and stripped of control characters for display.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum Bad {
    #[error("{}: an absolute path", show(.0))]
    AbsoluteName(String),
    #[error("{}: a path with `..`", show(.0))]
    ParentName(String),
    #[error("an entry without a name")]
    EmptyName,
    #[error("{}: a name with control characters", show(.0))]
    ControlName(String),
    #[error("{}: a name that is not UTF-8", show(.0))]
    NotUtf8(String),
    #[error("{}...: a name of {bytes} bytes, at most {max} are taken", show(.name))]
    LongName {
        name: String,
        bytes: u64,
        max: usize,
    },
    #[error("{}: more than {max} directories inside each other", show(.name))]
    TooDeep { name: String, max: usize },
    #[error("{}: appears twice", show(.0))]
    Duplicate(String),
    #[error("{}: lies below {}, which is not a directory", show(.name), show(.parent))]
    BelowFile { name: String, parent: String },
    #[error("{}: a symbolic link to {}; the only link in a checkpoint is CRIU's `parent`", show(.name), show(.target))]
    Symlink { name: String, target: String },
    #[error("{}: a hard link to {}, which no checkpoint has", show(.name), show(.target))]
    HardLink { name: String, target: String },
    #[error("{}: a device node, which has no place in an archive", show(.0))]
    Device(String),
    #[error("{}: a fifo, which has no place in an archive", show(.0))]
    Fifo(String),
    #[error("{}: a socket, which has no place in an archive", show(.0))]
    Socket(String),
    #[error("{}: a sparse file, which no engine writes", show(.0))]
    Sparse(String),
    #[error("{}: a tar entry of unknown type {kind:#04x}", show(.name))]
    UnknownType { name: String, kind: u8 },
    #[error("{}: a whiteout, which a checkpoint image cannot have", show(.0))]
    Whiteout(String),
    #[error("a tar header with a wrong checksum at byte {0}")]
    TarChecksum(u64),
    #[error("a tar header with an unreadable {field} at byte {at}")]
    TarField { field: &'static str, at: u64 },
    #[error("an extended tar header that cannot be read at byte {0}")]
    Pax(u64),
    #[error("an extended tar header of {bytes} bytes at byte {at}, at most {max} are taken")]
    PaxTooLarge { bytes: u64, max: u64, at: u64 },
    #[error("extended tar headers without an entry after them")]
    DanglingPax,
    #[error("ends in the middle of a tar header, at byte {0}")]
    TruncatedHeader(u64),
    #[error("{}: ends {missing} bytes too early", show(.name))]
    TruncatedFile { name: String, missing: u64 },
    #[error("the tar has no end mark; it was cut off after {entries} entries")]
    NoEndMark { entries: u64 },
    #[error("{}: a directory or link with content, {bytes} bytes", show(.name))]
    ContentOfDirectory { name: String, bytes: u64 },
    #[error("more than {0} entries")]
    TooManyEntries(u64),
    #[error("more than {0} bytes of content")]
    TooLarge(u64),
    #[error("{}: {bytes} bytes, at most {max} are taken for such a file", show(.name))]
    SmallFileTooLarge { name: String, bytes: u64, max: u64 },
    #[error("the small files have more than {0} bytes together")]
    SmallFilesTooLarge(u64),
    #[error(
        "{out} bytes came out of {input}, more than {max} for each; a decompression bomb, or memory that is all zeros"
    )]
    Ratio { input: u64, out: u64, max: u64 },
    #[error("the {format} data cannot be decompressed: {reason}")]
    Compression {
        format: &'static str,
        reason: String,
    },
    #[error("encrypted data cannot be decrypted: {0}")]
    Encryption(String),
    #[error("{file}: not valid JSON of its kind: {reason}")]
    Json { file: String, reason: String },
    #[error("{file}: {bytes} bytes, at most {max} are taken for a document")]
    JsonTooLarge { file: String, bytes: u64, max: u64 },
    #[error("{file}: version {found:?}, only {known} is known")]
    Version {
        file: String,
        found: String,
        known: &'static str,
    },
    #[error("{0:?} is not a sha256 digest")]
    Digest(String),
    #[error("blob {0} is missing")]
    MissingBlob(String),
    #[error("blob {digest}: {found} bytes, the manifest says {expected}")]
    BlobSize {
        digest: String,
        expected: u64,
        found: u64,
    },
    #[error("blob {expected}: its content has the digest {found}")]
    BlobDigest { expected: String, found: String },
    #[error("blob {0}: not a regular file")]
    BlobType(String),
    #[error(
        "layer {layer}: its decompressed content has the digest {found}, the config says {expected}"
    )]
    DiffId {
        layer: usize,
        expected: String,
        found: String,
    },
    #[error("{layers} layers, but the config has {diff_ids} diff_ids")]
    DiffIdCount { layers: usize, diff_ids: usize },
    #[error("no layers")]
    NoLayers,
    #[error("{found} layers, at most {max} are taken")]
    TooManyLayers { found: usize, max: usize },
    #[error("{what} of media type {found:?}; a checkpoint image has {known}")]
    MediaType {
        what: String,
        found: String,
        known: &'static str,
    },
    #[error("layer {0} is to be fetched from a URL; a checkpoint holds its layers itself")]
    ForeignLayer(usize),
    #[error("an image index for several platforms; a checkpoint is one manifest")]
    ManifestList,
    #[error("index.json names no image")]
    NoImage,
    #[error("index.json names {0} images; say which, by its name")]
    SeveralImages(usize),
    #[error("no image is named {0:?}")]
    NoSuchImage(String),
    #[error("no {0}")]
    MissingFile(String),
    #[error("{}: {reason}", show(.name))]
    Content { name: String, reason: String },
}

impl From<Bad> for io::Error {
    fn from(bad: Bad) -> Self {
        Self::new(io::ErrorKind::InvalidData, bad)
    }
}

/// Makes a name from an archive fit to show: short, without control characters.
fn show(name: &str) -> String {
    let mut out: String = name
        .chars()
        .take(120)
        .flat_map(char::escape_debug)
        .collect();
    if name.chars().nth(120).is_some() {
        out.push_str("...");
    }
    out
}
