//! Checkpoint images to and from registries, by the OCI distribution protocol.
//!
//! Blobs are streamed: memory does not depend on their size. Blobs that the other side has already are left out,
//! so a transfer that was interrupted goes on where it stopped. The manifest is pushed last and a pulled layout
//! gets its name last: what has a name is whole. Every step has a time limit, and so has every pause of a
//! transfer.

mod auth;
mod client;
mod pull;
mod push;
mod session;
mod text;
mod transfer;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cryopod_archive::digest::Digest;
use cryopod_archive::progress::Progress;
use oci_client::Reference;

pub use auth::Credentials;
pub use pull::pull;
pub use push::push;

/// How to talk to a registry.
#[derive(Debug, Clone)]
pub struct Options {
    /// Require TLS with a certificate that is valid. Without it, any certificate is taken, and plain HTTP where
    /// the registry speaks no TLS.
    pub tls_verify: bool,
    /// The credentials; `None`: those of the auth files, if there are any.
    pub credentials: Option<Credentials>,
    /// The auth file; `None`: `$REGISTRY_AUTH_FILE`, else the usual ones of podman and docker.
    pub auth_file: Option<PathBuf>,
    /// Time for a connection, and for each answer.
    pub step_limit: Duration,
    /// How long a transfer may stand still.
    pub stall_limit: Duration,
    /// How often a blob is tried.
    pub tries: u32,
    /// Blobs that are transferred at once.
    pub parallel: usize,
    /// Counters for a progress bar.
    pub progress: Arc<Progress>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            tls_verify: true,
            credentials: None,
            auth_file: None,
            step_limit: Duration::from_secs(60),
            stall_limit: Duration::from_secs(120),
            tries: 3,
            parallel: 3,
            progress: Arc::default(),
        }
    }
}

/// What was pushed or pulled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transferred {
    /// Digest of the manifest.
    pub digest: Digest,
    /// Blobs of the image.
    pub blobs: usize,
    /// Those of them that the other side had.
    pub skipped: usize,
    /// Bytes that were transferred.
    pub bytes: u64,
}

/// Why an image was not pushed or pulled.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No name of an image in a registry.
    #[error(
        "{text}: not the name of an image in a registry ({reason}); write REGISTRY/REPOSITORY:TAG"
    )]
    Reference {
        /// What was given.
        text: String,
        /// What is wrong.
        reason: String,
    },
    /// The credentials' file.
    #[error("{path}: {reason}")]
    AuthFile {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// The registry does not answer.
    #[error("{registry}: no connection: {reason}{}", if *.tls { "; a registry without TLS, or with a certificate of its own, needs --tls-verify=false" } else { "" })]
    Connect {
        /// The registry.
        registry: String,
        /// What the system or TLS said.
        reason: String,
        /// TLS was required.
        tls: bool,
    },
    /// The registry refuses.
    #[error(
        "{image}: the registry refuses access ({reason}); log in with `podman login`, or give --creds USER:PASSWORD"
    )]
    Access {
        /// The image.
        image: String,
        /// What it said.
        reason: String,
    },
    /// The registry has no such image.
    #[error("{image}: not in the registry")]
    NotFound {
        /// The image.
        image: String,
    },
    /// A step failed.
    #[error(
        "{image}: {step}: {reason}; what was transferred stays, the same command goes on from there"
    )]
    Step {
        /// The image.
        image: String,
        /// Which step.
        step: String,
        /// What was said.
        reason: String,
    },
    /// What came is not what was asked for.
    #[error("{image}: {reason}; nothing of it is used")]
    Content {
        /// The image.
        image: String,
        /// What is wrong.
        reason: String,
    },
    /// The local archive.
    #[error(transparent)]
    Archive(#[from] cryopod_archive::Error),
}

/// An image in a registry: `REGISTRY/REPOSITORY[:TAG|@DIGEST]`, `docker://` ahead of it or not.
///
/// # Errors
/// [`Error::Reference`]; also without a registry, as a checkpoint is not to end on a default one by mistake.
pub fn parse_reference(text: &str) -> Result<Reference, Error> {
    let bare = text.strip_prefix("docker://").unwrap_or(text);
    let wrong = |reason: String| Error::Reference {
        text: text.into(),
        reason,
    };
    let reference: Reference = bare
        .parse()
        .map_err(|e: oci_client::ParseError| wrong(e.to_string()))?;
    let first = bare.split('/').next().unwrap_or_default();
    if !bare.contains('/') || !(first.contains(['.', ':']) || first == "localhost") {
        return Err(wrong("it names no registry".into()));
    }
    if let Some(digest) = reference.digest() {
        Digest::parse(digest).map_err(|e| wrong(e.to_string()))?;
    }
    Ok(reference)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references() {
        let ok = |text: &str| parse_reference(text).map(|r| r.to_string()).unwrap();
        assert_eq!(ok("localhost:5000/a/b:c"), "localhost:5000/a/b:c");
        assert_eq!(ok("docker://r.example/a"), "r.example/a:latest");
        for text in ["a", "team/a:1", "r.example/A", "", "r.example/a@sha256:12"] {
            let error = parse_reference(text).unwrap_err().to_string();
            assert!(error.contains("REGISTRY/REPOSITORY:TAG"), "{error}");
        }
    }
}
