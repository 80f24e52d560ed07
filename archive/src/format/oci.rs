//! Defines the OCI image format and its annotations, as far as a checkpoint needs them.
//!
//! These are our own types: `oci-spec` keeps annotations in hash maps, whose order differs from run to run, but the
//! same input must give the same digests.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::Bad;
use crate::format::compression::Compression;
use crate::format::digest::Digest;

pub mod media {
    pub const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
    pub const INDEX: &str = "application/vnd.oci.image.index.v1+json";
    pub const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
    pub const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
    pub const LAYER_GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
    pub const LAYER_ZSTD: &str = "application/vnd.oci.image.layer.v1.tar+zstd";
    /// Ends the type of a layer that is an `age` stream. Not `+encrypted`, which is ocicrypt's: that has the keys in
    /// annotations, and `age` could not read it.
    pub const AGE: &str = "+age";
    /// containerd: CRIU's images, a tar.
    pub const CONTAINERD_CRIU: &str =
        "application/vnd.containerd.container.criu.checkpoint.criu.tar";
    pub const CONTAINERD_CONFIG: &str =
        "application/vnd.containerd.container.checkpoint.config.v1+proto";
    pub const CONTAINERD_OPTIONS: &str =
        "application/vnd.containerd.container.checkpoint.options.v1+proto";
}

pub mod annotation {
    /// podman: the runtime that must restore it.
    pub const PODMAN_RUNTIME: &str = "io.podman.annotations.checkpoint.runtime.name";
    /// CRI-O: the container's name; makes an image a checkpoint.
    pub const CRIO_NAME: &str = "io.kubernetes.cri-o.annotations.checkpoint.name";
    /// checkpointctl and containerd: the container's name; makes an image a checkpoint for containerd.
    pub const CRIU_NAME: &str = "org.criu.checkpoint.container.name";
    pub const REF_NAME: &str = "org.opencontainers.image.ref.name";
    /// The name of an image in an index, as containerd writes it.
    pub const CONTAINERD_REF: &str = "io.containerd.image.name";
    pub const CREATED: &str = "org.opencontainers.image.created";
    /// On a layer: bytes of its tar.
    pub const LAYER_BYTES: &str = "dev.cryopod.layer.bytes";
    /// On a layer: its files, a JSON list; absent on the layer of the small files.
    pub const LAYER_FILES: &str = "dev.cryopod.layer.files";
    /// Version of this set of annotations.
    pub const FORMAT: &str = "dev.cryopod.archive.version";
    pub const FORMAT_VERSION: &str = "1";
    pub const CONTENT_BYTES: &str = "dev.cryopod.content.bytes";
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    pub media_type: String,
    pub digest: Digest,
    pub size: u64,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Other places to fetch it from; refused for layers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub urls: Vec<String>,
    /// `platform`, `data` and others.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

impl Descriptor {
    pub fn new(media_type: &str, digest: Digest, size: u64) -> Self {
        Self {
            media_type: media_type.into(),
            digest,
            size,
            annotations: BTreeMap::new(),
            urls: Vec::new(),
            extra: Map::new(),
        }
    }

    /// Returns true for a layer that is an `age` stream.
    pub fn is_encrypted(&self) -> bool {
        self.media_type.ends_with(media::AGE)
    }

    /// Returns how a layer is compressed, below its encryption. Fails with [`Bad::MediaType`] if it is not a layer of an OCI image.
    pub fn layer_compression(&self, layer: usize) -> Result<Compression, Bad> {
        let kind = self.media_type.as_str();
        match kind.strip_suffix(media::AGE).unwrap_or(kind) {
            media::LAYER => Ok(Compression::None),
            media::LAYER_GZIP => Ok(Compression::Gzip),
            media::LAYER_ZSTD => Ok(Compression::Zstd),
            other => Err(Bad::MediaType {
                what: format!("layer {layer}"),
                found: other.chars().take(100).collect(),
                known: "application/vnd.oci.image.layer.v1.tar, +gzip or +zstd, or one of these +age",
            }),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    /// Always 2.
    pub schema_version: u32,
    /// [`media::MANIFEST`]; the OCI format allows it to be absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub media_type: Option<String>,
    pub config: Descriptor,
    /// Lowest first.
    pub layers: Vec<Descriptor>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// An image index, also the `index.json` of a layout.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Index {
    /// Always 2.
    pub schema_version: u32,
    /// [`media::INDEX`]; the OCI format allows it to be absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub media_type: Option<String>,
    pub manifests: Vec<Descriptor>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageConfig {
    /// RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created: Option<String>,
    /// In Go's names: `amd64`, `arm64`.
    pub architecture: String,
    /// `linux`.
    pub os: String,
    /// What a container of the image would run: nothing.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub config: Map<String, Value>,
    pub rootfs: RootFs,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RootFs {
    /// `layers`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Digests of the layers' decompressed tars.
    pub diff_ids: Vec<Digest>,
}

pub(crate) fn parse<T: serde::de::DeserializeOwned>(file: &str, text: &[u8]) -> Result<T, Bad> {
    serde_json::from_slice(text).map_err(|e| Bad::Json {
        file: file.into(),
        reason: e.to_string(),
    })
}
