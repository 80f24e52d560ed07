//! What the archives are made of.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use cryopod_archive::format::digest::Digest;
use serde_json::{Value, json};

use crate::common::PODMAN_CONFIG;
use crate::{INVENTORY, LAYER};

/// A tar, made byte by byte.
#[derive(Clone, Default)]
pub struct Tar(pub Vec<u8>);

impl Tar {
    /// The start of a good archive.
    pub fn good() -> Self {
        Self::default()
            .file("config.dump", PODMAN_CONFIG.as_bytes())
            .file("checkpoint/inventory.img", INVENTORY)
    }

    pub fn file(self, name: &str, content: &[u8]) -> Self {
        self.raw(name.as_bytes(), b'0', b"", content)
    }

    pub fn raw(self, name: &[u8], kind: u8, link: &[u8], content: &[u8]) -> Self {
        self.with(name, kind, link, content, |_| {})
    }

    pub fn with(
        mut self,
        name: &[u8],
        kind: u8,
        link: &[u8],
        content: &[u8],
        change: impl FnOnce(&mut tar::Header),
    ) -> Self {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::new(kind));
        header.set_mode(0o6755);
        header.set_size(content.len() as u64);
        header.as_old_mut().name[..name.len()].copy_from_slice(name);
        header.as_old_mut().linkname[..link.len()].copy_from_slice(link);
        header.set_cksum();
        change(&mut header);
        self.0.extend_from_slice(header.as_bytes());
        self.0.extend_from_slice(content);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    pub fn pax(self, records: &[(&str, &str)]) -> Self {
        let mut text = String::new();
        for (key, value) in records {
            let body = key.len() + value.len() + 3;
            let len = (body + 1..)
                .find(|n| n.to_string().len() + body == *n)
                .unwrap();
            text += &format!("{len} {key}={value}\n");
        }
        self.raw(b"pax", b'x', b"", text.as_bytes())
    }

    pub fn end(mut self) -> Vec<u8> {
        self.0.resize(self.0.len() + 1024, 0);
        self.0
    }

    /// Bytes so far.
    pub fn len(&self) -> usize {
        self.0.len()
    }
}

pub fn write(bytes: Vec<u8>) -> impl FnOnce(&Path) {
    move |path| fs::write(path, bytes).unwrap()
}

pub fn zstd(data: &[u8]) -> Vec<u8> {
    let mut compressor = zstd::bulk::Compressor::new(1).unwrap();
    compressor.include_checksum(true).unwrap();
    data.chunks(1 << 20)
        .flat_map(|chunk| compressor.compress(chunk).unwrap())
        .collect()
}

pub fn gzip(data: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(data).unwrap();
    encoder.finish().unwrap()
}

/// An image whose parts a test changes before it is written.
pub struct Layout {
    pub layers: Vec<Vec<u8>>,
    pub media: Vec<String>,
    pub config: Value,
    pub manifest: Value,
    pub index: Value,
    pub layout: Value,
}

impl Layout {
    pub fn new(layers: Vec<Vec<u8>>) -> Self {
        let diff_ids: Vec<_> = layers.iter().map(|l| Digest::of(l).to_string()).collect();
        Self {
            media: vec![LAYER.into(); layers.len()],
            layers,
            config: json!({"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": diff_ids}}),
            manifest: json!({"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json"}),
            index: json!({"schemaVersion": 2}),
            layout: json!({"imageLayoutVersion": "1.0.0"}),
        }
    }

    pub fn good() -> Self {
        Self::new(vec![Tar::good().end()])
    }

    /// Writes it; each change is made to a document before its digest is taken.
    pub fn write(
        mut self,
        path: &Path,
        change: impl Fn(&mut Value),
        index: impl Fn(&mut Value),
        then: impl FnOnce(&Path),
    ) {
        let blobs = path.join("blobs/sha256");
        fs::create_dir_all(&blobs).unwrap();
        let put = |bytes: &[u8], media: &str| {
            let digest = Digest::of(bytes);
            fs::write(blobs.join(digest.hex()), bytes).unwrap();
            json!({"mediaType": media, "digest": digest.to_string(), "size": bytes.len()})
        };
        let layers: Vec<_> = self
            .layers
            .iter()
            .zip(&self.media)
            .map(|(l, m)| put(l, m))
            .collect();
        self.manifest["layers"] = layers.into();
        let config = serde_json::to_vec(&self.config).unwrap();
        self.manifest["config"] = put(&config, "application/vnd.oci.image.config.v1+json");
        change(&mut self.manifest);
        let manifest = serde_json::to_vec(&self.manifest).unwrap();
        self.index["manifests"] =
            json!([put(&manifest, "application/vnd.oci.image.manifest.v1+json")]);
        index(&mut self.index);
        fs::write(
            path.join("index.json"),
            serde_json::to_vec(&self.index).unwrap(),
        )
        .unwrap();
        fs::write(
            path.join("oci-layout"),
            serde_json::to_vec(&self.layout).unwrap(),
        )
        .unwrap();
        then(path);
    }
}

/// The blob of the image's first layer.
pub fn first_layer(path: &Path) -> PathBuf {
    path.join("blobs/sha256")
        .join(Digest::of(&Tar::good().end()).hex())
}
