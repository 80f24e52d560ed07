//! Reads a checkpoint in an OCI image layout: as an image, or as containerd's own index.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use super::tarball::visit_tar;
use super::{Kind, SourceInner, Visitor};
use crate::bytes::blobs::Blobs;
use crate::bytes::encryption::Identities;
use crate::bytes::stream::{Allowance, Hashed, Stream};
use crate::bytes::tarread::TarReader;
use crate::error::{Bad, Error};
use crate::format::compression::Compression;
use crate::format::digest::Digest;
use crate::format::entry::{Entry, clean_name};
use crate::format::limits::Limits;
use crate::format::names;
use crate::format::oci::{self, Descriptor, ImageConfig, Index, Manifest, annotation, media};

/// An OCI image: its documents, all checked against their digests.
#[derive(Debug, Clone)]
pub struct Image {
    /// Digest of the manifest.
    pub digest: Digest,
    /// Its name in the layout's index.
    pub name: Option<String>,
    /// The layout has no other image.
    pub alone: bool,
    pub manifest: Manifest,
    pub config: ImageConfig,
}

#[derive(Debug, Clone)]
pub(crate) struct Layer {
    pub(crate) index: usize,
    pub(crate) descriptor: Descriptor,
    pub(crate) diff_id: Digest,
    pub(crate) compression: Compression,
}

impl Layer {
    /// The names of its files, where the image states them.
    pub(crate) fn files(&self) -> Option<Vec<String>> {
        serde_json::from_str(self.descriptor.annotations.get(annotation::LAYER_FILES)?).ok()
    }

    /// Returns how many bytes the layer may decompress to.
    pub(crate) fn allowance(&self, limits: &Limits) -> Allowance {
        let stated = self.descriptor.annotations.get(annotation::LAYER_BYTES);
        match stated.and_then(|n| n.parse().ok()) {
            Some(bytes) => Allowance::Exactly(bytes),
            None => Allowance::of(limits),
        }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct ImageSource {
    pub(crate) blobs: Blobs,
    pub(crate) image: Image,
    layers: Vec<Layer>,
    pub(crate) identities: Identities,
}

#[derive(Debug, Clone)]
pub struct ContainerdParts {
    /// The names of all images in the layout's index.
    pub names: Vec<String>,
    /// The index that lists the parts.
    pub index: Index,
    pub criu: Descriptor,
    /// What the root file system has beyond its image (`--rw`).
    pub rw: Option<Descriptor>,
    /// The container's image, if it was exported too (`--image`).
    pub image: Option<Descriptor>,
    /// The records: config, options, the runtime's name and options.
    pub records: Vec<Descriptor>,
}

#[derive(Debug, Clone)]
pub(crate) struct ContainerdSource {
    pub(crate) blobs: Blobs,
    pub(crate) parts: ContainerdParts,
}

pub(super) fn open(
    blobs: Blobs,
    wanted: Option<&str>,
    limits: &Limits,
) -> Result<(Kind, SourceInner), Error> {
    let path = blobs.path().to_owned();
    let bad = |bad| Error::bad(&path, bad);
    let archive = matches!(blobs, Blobs::Tar { .. });
    check_layout(&blobs, &path)?;
    let text = blobs.document(names::OCI_INDEX)?;
    let index: Index = oci::parse(names::OCI_INDEX, &text).map_err(bad)?;
    version(names::OCI_INDEX, index.schema_version).map_err(bad)?;
    let names: Vec<String> = index.manifests.iter().filter_map(name_of).collect();
    if criu_of(&index).is_some() {
        let parts = containerd_parts(index, names).map_err(bad)?;
        return Ok((
            Kind::Containerd { archive },
            SourceInner::Containerd(ContainerdSource { blobs, parts }),
        ));
    }
    let descriptor = choose(&index, wanted).map_err(bad)?;
    match descriptor.media_type.as_str() {
        media::MANIFEST => {
            let mut image = read_image(&blobs, descriptor, limits)?;
            image.image.alone = index.manifests.len() == 1;
            let kind = if archive {
                Kind::OciArchive
            } else {
                Kind::OciLayout
            };
            Ok((kind, SourceInner::Image(image)))
        }
        media::INDEX => {
            let text = blobs.json(descriptor, "the image index")?;
            let index: Index = oci::parse("the image index", &text).map_err(bad)?;
            version("the image index", index.schema_version).map_err(bad)?;
            if criu_of(&index).is_none() {
                return Err(bad(Bad::ManifestList));
            }
            let parts = containerd_parts(index, names).map_err(bad)?;
            Ok((
                Kind::Containerd { archive },
                SourceInner::Containerd(ContainerdSource { blobs, parts }),
            ))
        }
        other => Err(bad(Bad::MediaType {
            what: "the image".into(),
            found: other.chars().take(100).collect(),
            known: "an OCI manifest, application/vnd.oci.image.manifest.v1+json",
        })),
    }
}

fn check_layout(blobs: &Blobs, path: &Path) -> Result<(), Error> {
    #[derive(serde::Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Layout {
        image_layout_version: String,
    }
    let text = blobs.document(names::OCI_LAYOUT)?;
    let layout: Layout = oci::parse(names::OCI_LAYOUT, &text).map_err(|b| Error::bad(path, b))?;
    if layout.image_layout_version != "1.0.0" {
        let found = layout.image_layout_version.chars().take(40).collect();
        return Err(Error::bad(
            path,
            Bad::Version {
                file: names::OCI_LAYOUT.into(),
                found,
                known: "1.0.0",
            },
        ));
    }
    Ok(())
}

fn version(file: &str, version: u32) -> Result<(), Bad> {
    match version {
        2 => Ok(()),
        other => Err(Bad::Version {
            file: file.into(),
            found: other.to_string(),
            known: "2",
        }),
    }
}

fn name_of(descriptor: &Descriptor) -> Option<String> {
    let get = |key| descriptor.annotations.get(key);
    get(annotation::CONTAINERD_REF)
        .or_else(|| get(annotation::REF_NAME))
        .cloned()
}

fn choose<'i>(index: &'i Index, wanted: Option<&str>) -> Result<&'i Descriptor, Bad> {
    let Some(wanted) = wanted else {
        return match index.manifests.as_slice() {
            [] => Err(Bad::NoImage),
            [one] => Ok(one),
            several => Err(Bad::SeveralImages(several.len())),
        };
    };
    let named = |d: &&Descriptor| {
        [annotation::CONTAINERD_REF, annotation::REF_NAME]
            .iter()
            .any(|key| d.annotations.get(*key).is_some_and(|name| name == wanted))
    };
    index
        .manifests
        .iter()
        .find(named)
        .ok_or_else(|| Bad::NoSuchImage(wanted.into()))
}

fn criu_of(index: &Index) -> Option<&Descriptor> {
    index
        .manifests
        .iter()
        .find(|d| d.media_type == media::CONTAINERD_CRIU)
}

fn containerd_parts(index: Index, names: Vec<String>) -> Result<ContainerdParts, Bad> {
    let criu = criu_of(&index).ok_or(Bad::NoImage)?.clone();
    let mut parts = ContainerdParts {
        names,
        criu,
        rw: None,
        image: None,
        records: Vec::new(),
        index: index.clone(),
    };
    let twice = |d: &Descriptor| Bad::Duplicate(d.media_type.chars().take(100).collect());
    let put = |part: &mut Option<Descriptor>, new: Descriptor| match part {
        Some(_) => Err(twice(&new)),
        None => {
            *part = Some(new);
            Ok(())
        }
    };
    for descriptor in index.manifests {
        match descriptor.media_type.as_str() {
            media::CONTAINERD_CRIU if descriptor == parts.criu => {}
            media::CONTAINERD_CRIU => return Err(twice(&descriptor)),
            media::MANIFEST | media::INDEX => put(&mut parts.image, descriptor)?,
            kind if kind.starts_with("application/vnd.containerd.") => {
                parts.records.push(descriptor)
            }
            kind if kind.contains(".rootfs.diff.tar") || kind.starts_with(media::LAYER) => {
                put(&mut parts.rw, descriptor)?;
            }
            // Docker's media types of an image.
            kind if kind.starts_with("application/vnd.docker.distribution.manifest") => {
                put(&mut parts.image, descriptor)?;
            }
            other => {
                return Err(Bad::MediaType {
                    what: "a part of containerd's checkpoint".into(),
                    found: other.chars().take(100).collect(),
                    known: "parts application/vnd.containerd.container.*, a layer and an image",
                });
            }
        }
    }
    Ok(parts)
}

fn read_image(
    blobs: &Blobs,
    descriptor: &Descriptor,
    limits: &Limits,
) -> Result<ImageSource, Error> {
    let path = blobs.path().to_owned();
    let bad = |bad| Error::bad(&path, bad);
    let text = blobs.json(descriptor, "the manifest")?;
    let manifest: Manifest = oci::parse("the manifest", &text).map_err(bad)?;
    version("the manifest", manifest.schema_version).map_err(bad)?;
    let config: ImageConfig = {
        let wrong = (manifest.config.media_type != media::CONFIG).then(|| Bad::MediaType {
            what: "the config".into(),
            found: manifest.config.media_type.chars().take(100).collect(),
            known: media::CONFIG,
        });
        if let Some(wrong) = wrong {
            return Err(bad(wrong));
        }
        oci::parse("the config", &blobs.json(&manifest.config, "the config")?).map_err(bad)?
    };
    let layers = layers_of(&manifest, &config, limits).map_err(bad)?;
    let image = Image {
        digest: descriptor.digest.clone(),
        name: name_of(descriptor),
        alone: true,
        manifest,
        config,
    };
    Ok(ImageSource {
        blobs: blobs.clone(),
        image,
        layers,
        identities: Identities::default(),
    })
}

/// Returns the layers if manifest and config agree on them.
fn layers_of(
    manifest: &Manifest,
    config: &ImageConfig,
    limits: &Limits,
) -> Result<Vec<Layer>, Bad> {
    if let Some(other) = manifest
        .media_type
        .as_deref()
        .filter(|m| *m != media::MANIFEST)
    {
        return Err(Bad::MediaType {
            what: "the manifest".into(),
            found: other.chars().take(100).collect(),
            known: media::MANIFEST,
        });
    }
    let (layers, diff_ids) = (manifest.layers.len(), config.rootfs.diff_ids.len());
    if layers == 0 {
        return Err(Bad::NoLayers);
    }
    if layers > limits.layers {
        return Err(Bad::TooManyLayers {
            found: layers,
            max: limits.layers,
        });
    }
    if layers != diff_ids {
        return Err(Bad::DiffIdCount { layers, diff_ids });
    }
    let pairs = manifest
        .layers
        .iter()
        .zip(&config.rootfs.diff_ids)
        .enumerate();
    pairs
        .map(|(index, (descriptor, diff_id))| {
            let compression = descriptor.layer_compression(index)?;
            if !descriptor.urls.is_empty() {
                return Err(Bad::ForeignLayer(index));
            }
            Ok(Layer {
                index,
                descriptor: descriptor.clone(),
                diff_id: diff_id.clone(),
                compression,
            })
        })
        .collect()
}

impl ImageSource {
    pub(crate) fn layers(&self) -> impl Iterator<Item = &Layer> {
        self.layers.iter()
    }
}

impl ContainerdSource {
    pub(crate) fn bytes(&self) -> u64 {
        let parts = [Some(&self.parts.criu), self.parts.rw.as_ref()];
        parts
            .iter()
            .flatten()
            .chain(&self.parts.records.iter().collect::<Vec<_>>())
            .map(|d| d.size)
            .sum()
    }

    /// Visits the images as `checkpoint/*` and the records as `containerd/NAME`. The root file system's difference has
    /// whiteouts, unlike podman's `rootfs-diff.tar`, so it becomes `containerd/rw.tar` unchanged.
    pub(super) fn visit(&self, limits: &Limits, visitor: &mut Visitor<'_>) -> Result<(), Error> {
        let path = self.blobs.path();
        let wrap = |e| Error::from_io(path, "read it", e);
        let mut section = Hashed::new(self.blobs.open(&self.parts.criu)?);
        let mut reader = TarReader::new(&mut section, limits, None);
        visit_tar(&mut reader, Some(names::CHECKPOINT_DIR), path, visitor)?;
        reader.finish().map_err(wrap)?;
        self.expect(section.digest(), &self.parts.criu)?;

        visitor(&Entry::directory(names::CONTAINERD_DIR), &mut io::empty())?;
        let named = self.named_parts(limits).map_err(|b| Error::bad(path, b))?;
        for (name, descriptor) in named {
            let mut section = Hashed::new(self.blobs.open(descriptor)?);
            visitor(&Entry::file(name, descriptor.size), &mut section)?;
            io::copy(&mut section, &mut io::sink()).map_err(wrap)?;
            self.expect(section.digest(), descriptor)?;
        }
        Ok(())
    }

    /// The names come from untrusted media types.
    fn named_parts(&self, limits: &Limits) -> Result<BTreeMap<String, &Descriptor>, Bad> {
        let mut named = BTreeMap::new();
        let mut put = |name: &str, part| {
            let name = format!("{}/{name}", names::CONTAINERD_DIR);
            let name = clean_name(name.as_bytes(), limits)?;
            match named.insert(name.clone(), part) {
                Some(_) => Err(Bad::Duplicate(name)),
                None => Ok(()),
            }
        };
        for record in &self.parts.records {
            let name = record
                .media_type
                .trim_start_matches("application/vnd.containerd.container.");
            let name: String = name
                .chars()
                .map(|c| if c == '/' { '_' } else { c })
                .collect();
            put(&name, record)?;
        }
        if let Some(rw) = &self.parts.rw {
            put(names::CONTAINERD_RW, rw)?;
        }
        Ok(named)
    }

    fn expect(&self, found: Digest, descriptor: &Descriptor) -> Result<(), Error> {
        if found == descriptor.digest {
            return Ok(());
        }
        let bad = Bad::BlobDigest {
            expected: descriptor.digest.to_string(),
            found: found.to_string(),
        };
        Err(Error::bad(self.blobs.path(), bad))
    }
}

impl<S: Stream + ?Sized> Stream for &mut S {
    fn skip(&mut self, n: u64) -> io::Result<()> {
        (**self).skip(n)
    }
}
