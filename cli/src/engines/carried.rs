//! Loads the container's image that an archive has into an engine: [`cryopod_archive::container::carried`].

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use cryopod_archive::Error as ArchiveError;
use cryopod_archive::container::carried::{self, IMAGE};
use cryopod_archive::format::limits::Limits;
use cryopod_archive::format::names;
use cryopod_archive::source::Source;
use serde_json::Value;

use crate::engines::engine::{Engine, EngineCall};

const ASK: Duration = Duration::from_secs(60);

/// The image that a checkpoint names.
#[derive(Debug, PartialEq, Eq)]
pub struct NamedImage {
    /// Its id: the digest of its config, without `sha256:`.
    pub id: String,
    pub name: String,
}

impl NamedImage {
    /// Reads it from the content of `config.dump`.
    pub fn of(config: &[u8]) -> anyhow::Result<Self> {
        let config: Value = serde_json::from_slice(config).context(names::CONFIG_DUMP)?;
        let text = |keys: [&str; 2]| {
            let found = keys.iter().find_map(|key| config.get(key)?.as_str());
            found.unwrap_or_default().to_owned()
        };
        let id = text(["rootfsImageID", "rootfsImageRef"]);
        let id = id.rsplit("sha256:").next().unwrap_or_default().to_owned();
        if id.len() != 64 || !id.bytes().all(|b| b.is_ascii_hexdigit()) {
            bail!("{}: it names no image by its id", names::CONFIG_DUMP);
        }
        Ok(Self {
            id,
            name: text(["rootfsImageName", "rootfsImage"]),
        })
    }
}

/// Loads an image from its file, unless the engine has it. The file is checked first.
pub fn load(
    file: &Path,
    named: &NamedImage,
    engine: Engine,
    limit: Duration,
) -> anyhow::Result<()> {
    let program = engine.program();
    let has = || {
        let call = EngineCall::new(program, ASK).args(["image", "inspect", "--format", "{{.Id}}"]);
        call.args([&named.id]).run().is_ok()
    };
    if has() {
        return Ok(());
    }
    carried::check(file, &named.id)?;
    EngineCall::new(program, limit)
        .args(["image", "load", "--quiet", "--input"])
        .args([file])
        .run()
        .context("the container's image in the archive cannot be loaded")?;
    if !has() {
        bail!(
            "{program} has loaded the container's image, and does not know {} now",
            named.id
        );
    }
    Ok(())
}

/// Takes the image out of an unpacked checkpoint for podman, and loads it. The checkpoint then names its image by the id,
/// if this host has no such name or has it for another image: podman would pull the name.
pub fn take(whole: &Path, limit: Duration) -> anyhow::Result<()> {
    let file = whole.join(IMAGE);
    if !file.symlink_metadata().is_ok_and(|m| m.is_file()) {
        return Ok(());
    }
    let path = whole.join(names::CONFIG_DUMP);
    let text = fs::read(&path).with_context(|| path.display().to_string())?;
    let named = NamedImage::of(&text)?;
    load(&file, &named, Engine::Podman, limit)?;
    fs::remove_file(&file).with_context(|| file.display().to_string())?;
    let call =
        EngineCall::new("podman", ASK).args(["image", "inspect", "--format", "{{.Id}}", "--"]);
    let here = call.args([&named.name]).run();
    if here.is_ok_and(|id| id.trim() == named.id) {
        return Ok(());
    }
    let mut config: Value = serde_json::from_slice(&text)?;
    config["rootfsImageName"] = named.id.into();
    fs::write(&path, serde_json::to_vec(&config)?).with_context(|| path.display().to_string())
}

/// Writes the image of an archive to a file in a directory.
pub fn extract(source: &Source, directory: &Path) -> anyhow::Result<PathBuf> {
    let path = directory.join(IMAGE);
    source.visit(&Limits::default(), &mut |entry, reader| {
        if entry.is_file() && entry.name == IMAGE {
            let copied = fs::File::create(&path).and_then(|mut to| io::copy(reader, &mut to));
            copied.map_err(ArchiveError::io(&path, "write it"))?;
        }
        Ok(())
    })?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_image_that_a_checkpoint_names() {
        let id = "a".repeat(64);
        let of = |text: String| NamedImage::of(text.as_bytes());
        let named = NamedImage {
            id: id.clone(),
            name: "busybox".into(),
        };
        let podman = format!(r#"{{"rootfsImageID": "{id}", "rootfsImageName": "busybox"}}"#);
        assert_eq!(of(podman).unwrap(), named);
        let docker = format!(r#"{{"rootfsImageRef": "sha256:{id}", "rootfsImage": "busybox"}}"#);
        assert_eq!(of(docker).unwrap(), named);
        for bad in ["--all", "", "../x", &"g".repeat(64)] {
            assert!(of(format!(r#"{{"rootfsImageID": "{bad}"}}"#)).is_err());
        }
    }
}
