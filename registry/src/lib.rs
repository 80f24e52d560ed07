//! Moves checkpoint images to and from registries, with the OCI distribution protocol.
//!
//! Blobs are streamed: memory does not depend on their size. Blobs that the other side already has are skipped, so an
//! interrupted transfer continues where it stopped. The manifest is pushed last, and a pulled layout gets its name
//! last: whatever has a name is complete. Every step has a time limit, and so has every pause of a transfer.

mod auth;
mod client;
mod known;
mod pull;
mod push;
mod session;
mod small;
mod text;
mod transfer;
mod trust;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cryopod_archive::format::digest::Digest;
use cryopod_archive::progress::Progress;

pub use auth::{Login, LoginError};
pub use known::{BlobPiece, KnownBlobs};
pub use oci_spec::distribution::Reference;
pub use pull::{digest, pull, pull_with};
pub use push::push;
pub use small::{SmallImage, pull_small, push_small};

#[derive(Debug, Clone)]
pub struct RegistryOptions {
    /// Require TLS with a valid certificate. Otherwise accept any certificate, and plain HTTP if the registry has no
    /// TLS.
    pub tls_verify: bool,
    /// `None`: use those of the auth files, if any.
    pub credentials: Option<Login>,
    /// `None`: use `$REGISTRY_AUTH_FILE`, else the usual files of podman and docker.
    pub auth_file: Option<PathBuf>,
    /// Time limit for a connection, and for each answer.
    pub step_limit: Duration,
    /// Longest pause of a transfer.
    pub stall_limit: Duration,
    /// Number of attempts per blob.
    pub tries: u32,
    pub parallel: usize,
    pub progress: Arc<Progress>,
}

impl Default for RegistryOptions {
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

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transferred {
    /// Digest of the manifest.
    pub digest: Digest,
    pub blobs: usize,
    /// Blobs that the other side already had.
    pub skipped: usize,
    pub bytes: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "{text}: not the name of an image in a registry ({reason}); write REGISTRY/REPOSITORY:TAG"
    )]
    Reference { text: String, reason: String },
    #[error("{path}: {reason}")]
    AuthFile { path: PathBuf, reason: LoginError },
    #[error("{registry}: no connection: {reason}{}", if *.tls { "; a registry without TLS, or with a certificate of its own, needs --tls-verify=false, for containers and `cache pull` `insecure_registries` under [cache] in /etc/cryopod/config.toml" } else { "" })]
    Connect {
        registry: String,
        reason: String,
        tls: bool,
    },
    #[error(
        "{image}: the registry refuses access ({reason}); log in with `podman login` (push and pull: or give --creds USER:PASSWORD)"
    )]
    Access { image: String, reason: String },
    #[error("{image}: not in the registry")]
    NotFound { image: String },
    #[error(
        "{image}: {step}: {reason}; the same command goes on from there, but not a pull that makes a file"
    )]
    Step {
        image: String,
        step: String,
        reason: String,
    },
    #[error("{image}: {reason}; nothing of it is used")]
    Content { image: String, reason: String },
    #[error(transparent)]
    Archive(#[from] cryopod_archive::Error),
}

/// Parses `REGISTRY/REPOSITORY[:TAG|@DIGEST]`, with or without `docker://`.
///
/// # Errors
/// [`Error::Reference`]. A name without a registry is an error too: no checkpoint must reach a default registry by
/// mistake.
pub fn parse_reference(text: &str) -> Result<Reference, Error> {
    let bare = text.strip_prefix("docker://").unwrap_or(text);
    let wrong = |reason: String| Error::Reference {
        text: text.into(),
        reason,
    };
    let reference: Reference = bare
        .parse()
        .map_err(|e: oci_spec::distribution::ParseError| wrong(e.to_string()))?;
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
