//! Takes the container's image along, for a host that does not have it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use cryopod_archive::container::carried::{self, IMAGE};
use cryopod_archive::format::names;
use cryopod_archive::source::{Kind, Source};
use cryopod_archive::unpack::{UnpackOptions, unpack};

use super::{Args, Taken};
use crate::engines::engine::{Engine, EngineCall};

const ASK: Duration = Duration::from_secs(60);

/// Saves the image, before the container is touched. The file has no name of an image in it, only its digest.
pub fn save(args: &Args, engine: Engine, temp: &Path) -> anyhow::Result<PathBuf> {
    let file = temp.join(IMAGE);
    let program = engine.program();
    // An image of docker's own format has another digest in the other one.
    let formats: &[&[&str]] = match engine {
        Engine::Podman => &[
            &["image", "save", "--quiet", "--format", "oci-archive"],
            &["image", "save", "--quiet", "--format", "docker-archive"],
        ],
        Engine::Docker => &[&["image", "save"]],
        Engine::Containerd => bail!(
            "--with-image is for podman and docker: a checkpoint of `ctr` goes to containerd, which takes the image from `ctr images export`"
        ),
    };
    let image = EngineCall::new(program, ASK)
        .args(["container", "inspect", "--format", "{{.Image}}", "--"])
        .args([&args.container])
        .run()?;
    let image = image.trim();
    let mut checked = Ok(());
    for format in formats {
        // podman does not write over a file.
        let _ = fs::remove_file(&file);
        EngineCall::new(program, args.limit())
            .args(*format)
            .args(["--output"])
            .args([&file])
            .args([image])
            .run()
            .context("--with-image: the image cannot be saved; nothing was touched")?;
        checked = carried::check(&file, image);
        if checked.is_ok() {
            break;
        }
    }
    checked.with_context(|| {
        format!("--with-image: {program} saves another image; nothing was touched")
    })?;
    Ok(file)
}

/// Puts the image beside the checkpoint, which becomes a directory for that.
pub fn add(taken: Taken, image: &Path, temp: &Path) -> anyhow::Result<Taken> {
    let source = Source::open(&taken.source)?;
    let whole = match source.kind() {
        Kind::Directory => taken.source.clone(),
        Kind::CriuDirectory => {
            let whole = temp.join("with-image");
            fs::create_dir(&whole).with_context(|| whole.display().to_string())?;
            fs::rename(&taken.source, whole.join(names::CHECKPOINT_DIR))
                .with_context(|| taken.source.display().to_string())?;
            whole
        }
        _ => {
            let whole = temp.join("with-image");
            unpack(&source, &whole, &UnpackOptions::default())?;
            // What was unpacked has all of it.
            fs::remove_file(&taken.source).with_context(|| taken.source.display().to_string())?;
            whole
        }
    };
    let to = whole.join(IMAGE);
    // The checkpoint may be on another file system than the image.
    fs::rename(image, &to)
        .or_else(|_| fs::copy(image, &to).map(drop))
        .with_context(|| to.display().to_string())?;
    Ok(Taken {
        source: whole,
        ..taken
    })
}
