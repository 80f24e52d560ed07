//! Pushes and pulls images that are one small blob, such as signatures.

use std::collections::BTreeMap;

use bytes::Bytes;
use cryopod_archive::format::digest::Digest;
use cryopod_archive::format::oci::{Descriptor, Manifest, media};
use oci_spec::distribution::Reference;
use reqwest::Body;
use serde_json::json;

use crate::client::Registry;
use crate::pull::manifest;
use crate::session::TokenAccess;
use crate::transfer::{run, with_tries};
use crate::{Error, RegistryOptions};

/// The one layer of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SmallImage {
    pub media_type: String,
    pub blob: Vec<u8>,
    pub annotations: BTreeMap<String, String>,
}

/// Pushes an image. Those of its name stay beside it, as further layers.
pub fn push_small(
    image: &SmallImage,
    to: &Reference,
    options: &RegistryOptions,
) -> Result<(), Error> {
    run(push(image, to, options), &to.to_string())
}

async fn push(image: &SmallImage, to: &Reference, options: &RegistryOptions) -> Result<(), Error> {
    let registry = Registry::connect(to, TokenAccess::Push, options).await?;
    let mut layer = described(&image.media_type, &image.blob);
    layer.annotations = image.annotations.clone();
    let mut layers = match manifest(&registry, options).await {
        Ok((_, there)) => there.layers,
        Err(Error::NotFound { .. }) => Vec::new(),
        Err(e) => return Err(e),
    };
    if !layers.contains(&layer) {
        layers.push(layer);
    }
    let ids: Vec<&Digest> = layers.iter().map(|l| &l.digest).collect();
    let rootfs = json!({"type": "layers", "diff_ids": ids});
    let config = json!({"architecture": "", "os": "", "config": {}, "rootfs": rootfs}).to_string();
    let manifest = Manifest {
        schema_version: 2,
        media_type: Some(media::MANIFEST.into()),
        config: described(media::CONFIG, config.as_bytes()),
        layers,
        annotations: BTreeMap::new(),
    };
    let raw = serde_json::to_vec(&manifest).map_err(|e| registry.content(e.to_string()))?;
    for blob in [config.into_bytes(), image.blob.clone()] {
        with_tries(options.tries, || push_blob(&registry, &blob)).await?;
    }
    let name = to.tag().unwrap_or("latest");
    with_tries(options.tries, || {
        let step = "writing the manifest";
        let raw = Bytes::from(raw.clone());
        let sent = registry
            .session
            .send_manifest(step, name, media::MANIFEST, raw);
        registry.within(step, sent)
    })
    .await
}

fn described(media_type: &str, blob: &[u8]) -> Descriptor {
    Descriptor::new(media_type, Digest::of(blob), blob.len() as u64)
}

async fn push_blob(registry: &Registry, blob: &[u8]) -> Result<(), Error> {
    let digest = Digest::of(blob).to_string();
    let step = format!("sending {digest}");
    let sent = async {
        if registry.session.has_blob(&step, &digest).await? {
            return Ok(());
        }
        let place = registry.session.begin_blob(&step, &digest).await?;
        let (size, body) = (blob.len() as u64, Body::from(blob.to_vec()));
        registry.session.send_blob(&step, place, size, body).await
    };
    registry.within(&step, sent).await
}

/// Pulls images of one kind that share a name; none, if the registry does not have it.
pub fn pull_small(
    from: &Reference,
    media_type: &str,
    max: usize,
    options: &RegistryOptions,
) -> Result<Vec<SmallImage>, Error> {
    let pulled = run(pull(from, media_type, max, options), &from.to_string());
    match pulled {
        Err(Error::NotFound { .. }) => Ok(Vec::new()),
        other => other,
    }
}

async fn pull(
    from: &Reference,
    media_type: &str,
    max: usize,
    options: &RegistryOptions,
) -> Result<Vec<SmallImage>, Error> {
    let registry = Registry::connect(from, TokenAccess::Pull, options).await?;
    let (_, manifest) = manifest(&registry, options).await?;
    let mut images = Vec::new();
    for layer in manifest
        .layers
        .into_iter()
        .filter(|l| l.media_type == media_type)
    {
        let digest = layer.digest.to_string();
        let step = format!("receiving {digest}");
        let blob = async {
            let what = format!("blobs/{digest}");
            let answer = registry.session.get(&step, &what, &[]).await?;
            registry.session.bounded(&step, answer, max).await
        };
        let blob = registry.within(&step, blob).await?;
        if Digest::of(&blob) != layer.digest {
            return Err(registry.content(format!("blob {digest} is damaged")));
        }
        images.push(SmallImage {
            media_type: layer.media_type,
            blob,
            annotations: layer.annotations,
        });
    }
    Ok(images)
}
