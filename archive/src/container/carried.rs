//! Checks the container's image inside an archive: `cryopod-image.tar`, a tar of an OCI image layout, or one as `docker
//! save` writes it. An image in docker's own format has another digest as an OCI image.
//!
//! An archive comes from strangers. Its image must be the one whose digest the checkpoint names, and must bring no name of
//! its own: a name would replace an image of this host. The engine that loads it compares the digests of its layers.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::bytes::stream::{Section, open_regular};
use crate::bytes::tarread::TarReader;
use crate::format::digest::Digest;
use crate::format::limits::{Limits, MAX_JSON_BYTES};
use crate::format::names;

/// The file beside `config.dump`.
pub const IMAGE: &str = "cryopod-image.tar";
/// Most bytes of JSON that are read of one image.
const MAX_JSON_TOTAL: u64 = 32 << 20;
/// Annotations with a name that an engine would give the image.
const NAMES: [&str; 2] = [
    "org.opencontainers.image.ref.name",
    "io.containerd.image.name",
];

#[derive(Debug, thiserror::Error)]
#[error("{path}: the container's image is not used: {reason}")]
pub struct CarriedError {
    pub path: PathBuf,
    pub reason: String,
}

/// Checks that a file is a tar with one image, of this id (the digest of its config) and without a name.
///
/// # Errors
/// What is wrong with it. Nothing of it may be loaded.
pub fn check(file: &Path, id: &str) -> Result<(), CarriedError> {
    checked(file, id.trim().trim_start_matches("sha256:")).map_err(|reason| CarriedError {
        path: file.into(),
        reason,
    })
}

fn checked(file: &Path, id: &str) -> Result<(), String> {
    let documents = documents(file)?;
    let json = |name: &str| -> Result<Option<Value>, String> {
        let text = documents.get(name).map(|text| serde_json::from_slice(text));
        text.transpose().map_err(|e| format!("{name}: {e}"))
    };
    if documents.contains_key("repositories") {
        return Err("the file `repositories` gives it names".into());
    }
    let list = json("manifest.json")?;
    let Some(index) = json(names::OCI_INDEX)? else {
        return of_docker(&documents, list.as_ref(), id);
    };
    let manifests = index.get("manifests").and_then(Value::as_array);
    let manifests = manifests.map_or(&[][..], Vec::as_slice);
    let [only] = manifests else {
        return Err(format!("index.json has {} images", manifests.len()));
    };
    for annotations in [index.get("annotations"), only.get("annotations")] {
        let mut found = NAMES
            .iter()
            .filter_map(|key| annotations?.get(key)?.as_str());
        if let Some(name) = found.find(|name| !name.is_empty()) {
            return Err(format!(
                "it has the name {name:?}, and would replace an image"
            ));
        }
    }
    let manifest = blob(&documents, only.get("digest"))?;
    let manifest: Value = serde_json::from_slice(manifest).map_err(|e| e.to_string())?;
    let config = manifest.pointer("/config/digest").and_then(Value::as_str);
    let mut configs = vec![config.unwrap_or_default().to_owned()];
    // docker's own list, which it prefers.
    for image in list.iter().flat_map(|l| l.as_array()).flatten() {
        configs.push(unnamed(image)?.to_owned());
    }
    for config in &configs {
        // `sha256:ID`, `blobs/sha256/ID`
        let found = config.rsplit(['/', ':']).next().unwrap_or_default();
        if found != id {
            return Err(format!(
                "it is the image {found:?}, and the checkpoint names {id:?}"
            ));
        }
    }
    Ok(())
}

/// Checks an image of docker's format: the list has one image, and its config has the digest that is its id.
fn of_docker(
    documents: &BTreeMap<String, Vec<u8>>,
    list: Option<&Value>,
    id: &str,
) -> Result<(), String> {
    let list = list.and_then(Value::as_array);
    let list = list.ok_or("it has neither index.json nor manifest.json")?;
    let [only] = &list[..] else {
        return Err(format!("manifest.json has {} images", list.len()));
    };
    let config = unnamed(only)?;
    let content = documents.get(config);
    let content = content.ok_or_else(|| format!("{config:?} is missing"))?;
    let found = Digest::of(content);
    match found.hex() == id {
        true => Ok(()),
        false => Err(format!(
            "it is the image {:?}, and the checkpoint names {id:?}",
            found.hex()
        )),
    }
}

/// Returns the config of an image in docker's list, which gives it no name.
fn unnamed(image: &Value) -> Result<&str, String> {
    let tags = image.get("RepoTags").and_then(Value::as_array);
    if tags.is_some_and(|tags| !tags.is_empty()) {
        return Err("manifest.json gives it names".into());
    }
    let config = image.get("Config").and_then(Value::as_str);
    Ok(config.unwrap_or_default())
}

/// Returns a document that has the digest by which it is named.
fn blob<'a>(
    documents: &'a BTreeMap<String, Vec<u8>>,
    digest: Option<&Value>,
) -> Result<&'a [u8], String> {
    let digest = digest
        .and_then(Value::as_str)
        .ok_or("a blob has no digest")?;
    let digest = Digest::parse(digest).map_err(|e| e.to_string())?;
    let blob = documents.get(&format!("{}/sha256/{}", names::OCI_BLOBS, digest.hex()));
    let blob = blob.ok_or_else(|| format!("the blob {digest} is missing"))?;
    match Digest::of(blob) == digest {
        true => Ok(blob),
        false => Err(format!("the blob {digest} has another digest")),
    }
}

/// Reads the JSON files of a tar, within bounds. Layers are never JSON.
fn documents(file: &Path) -> Result<BTreeMap<String, Vec<u8>>, String> {
    let read = || -> std::io::Result<BTreeMap<String, Vec<u8>>> {
        let mut all = BTreeMap::new();
        let mut held = 0;
        let file = open_regular(file).map_err(std::io::Error::other)?;
        let mut reader = TarReader::new(Section::whole(file)?, &Limits::default(), None);
        while let Some(entry) = reader.next()? {
            if !entry.is_file() || entry.size > MAX_JSON_BYTES {
                continue;
            }
            let mut content = vec![0; usize::from(entry.size > 0)];
            reader.read_exact(&mut content)?;
            if !matches!(content.first(), Some(b'{' | b'[')) {
                continue;
            }
            held += entry.size;
            if held > MAX_JSON_TOTAL {
                let what = format!("more than {MAX_JSON_TOTAL} bytes of JSON");
                return Err(std::io::Error::other(what));
            }
            reader.read_to_end(&mut content)?;
            if all.insert(entry.name.clone(), content).is_some() {
                let what = format!("{:?} comes twice", entry.name);
                return Err(std::io::Error::other(what));
            }
        }
        Ok(all)
    };
    read().map_err(|e| format!("no tar of an image: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const ID: &str = "4444444444444444444444444444444444444444444444444444444444444444";

    struct CarriedImage {
        files: Vec<(String, Vec<u8>)>,
    }

    /// What `podman save --format oci-archive ID` writes.
    fn image(id: &str, annotations: &Value) -> CarriedImage {
        let manifest = json!({"config": {"digest": format!("sha256:{id}")}, "layers": []});
        let manifest = manifest.to_string().into_bytes();
        let digest = Digest::of(&manifest);
        let entry = json!({"digest": digest.to_string(), "annotations": annotations});
        let index = json!({"schemaVersion": 2, "manifests": [entry]}).to_string();
        CarriedImage {
            files: vec![
                ("oci-layout".into(), b"{}".to_vec()),
                ("index.json".into(), index.into_bytes()),
                (format!("blobs/sha256/{}", digest.hex()), manifest),
                ("blobs/sha256/layer".into(), vec![0x1f; 100]),
            ],
        }
    }

    impl CarriedImage {
        fn with(mut self, name: &str, content: &str) -> Self {
            self.files.retain(|(n, _)| n != name);
            self.files.push((name.into(), content.into()));
            self
        }

        fn said(&self) -> String {
            self.said_of(ID)
        }

        fn said_of(&self, id: &str) -> String {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join(IMAGE);
            let mut tar = tar::Builder::new(std::fs::File::create(&path).unwrap());
            for (name, content) in &self.files {
                let mut header = tar::Header::new_ustar();
                header.set_size(content.len() as u64);
                header.set_mode(0o644);
                tar.append_data(&mut header, name, &content[..]).unwrap();
            }
            tar.finish().unwrap();
            check(&path, &format!("sha256:{id}")).map_or_else(|e| e.to_string(), |()| "fine".into())
        }
    }

    #[test]
    fn only_the_image_that_the_checkpoint_names_and_without_a_name() {
        let none = json!({});
        assert_eq!(image(ID, &none).said(), "fine");
        let docker = format!(r#"[{{"Config": "blobs/sha256/{ID}", "RepoTags": null}}]"#);
        assert_eq!(
            image(ID, &none).with("manifest.json", &docker).said(),
            "fine"
        );
        let other = "5".repeat(64);
        let refused = |image: CarriedImage, why: &str| {
            let said = image.said();
            assert!(said.contains(why), "{why}: {said}");
        };
        refused(image(&other, &none), "the checkpoint names");
        for key in NAMES {
            let named = json!({key: "docker.io/library/busybox:latest"});
            refused(image(ID, &named), "would replace an image");
        }
        let docker = docker.replace("null", r#"["busybox:latest"]"#);
        refused(
            image(ID, &none).with("manifest.json", &docker),
            "gives it names",
        );
        let docker = format!(r#"[{{"Config": "{other}.json"}}]"#);
        refused(
            image(ID, &none).with("manifest.json", &docker),
            "the checkpoint names",
        );
        refused(
            image(ID, &none).with("repositories", "{}"),
            "gives it names",
        );
        refused(image(ID, &none).with("index.json", "{}"), "0 images");
        refused(image(ID, &none).with("index.json", "{"), "index.json");
        let mut changed = image(ID, &none);
        changed.files[2].1.push(b' ');
        refused(changed, "has another digest");
        let mut missing = image(ID, &none);
        missing.files.remove(2);
        refused(missing, "is missing");
        refused(CarriedImage { files: Vec::new() }, "neither index.json");
        // docker's own format
        let config = r#"{"rootfs": {}}"#;
        let digest = Digest::of(config.as_bytes());
        let list = format!(
            r#"[{{"Config": "{0}.json", "RepoTags": []}}]"#,
            digest.hex()
        );
        let name = format!("{}.json", digest.hex());
        let docker = || {
            let image = CarriedImage { files: Vec::new() };
            image.with("manifest.json", &list).with(&name, config)
        };
        assert_eq!(docker().said_of(digest.hex()), "fine");
        refused(docker(), "the checkpoint names");
        let named = list.replace("[]", r#"["busybox"]"#);
        refused(docker().with("manifest.json", &named), "gives it names");
        refused(docker().with("manifest.json", "[]"), "0 images");
        let said = docker().with(&name, "{}").said_of(digest.hex());
        assert!(said.contains("the checkpoint names"), "{said}");
        let mut twice = image(ID, &none);
        twice.files.push(("index.json".into(), b"{}".to_vec()));
        refused(twice, "twice");
    }
}
