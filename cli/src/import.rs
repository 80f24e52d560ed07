//! `cryopod import`: hands an archive to an engine for a restore.

mod podman;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use cryopod_archive::limits::Limits;
use cryopod_archive::names;
use cryopod_archive::pack::Destination;
use cryopod_archive::source::{Kind, Source};
use cryopod_archive::unpack::{UnpackOptions, unpack};

use crate::engine::{Call, Engine};
use crate::pack::How;
use crate::temp_dir::{Holds, LockedTempDir};
use crate::ui::Steps;
use cryopod_archive::source::Place;

const ASK: Duration = Duration::from_secs(60);

#[derive(clap::Args)]
pub struct Args {
    /// The archive, as for `cryopod inspect`.
    source: String,
    /// The engine.
    #[arg(short, long, value_enum)]
    engine: Engine,
    /// The image's name in the engine. With --restore: the container's name. For docker: the checkpoint's name.
    #[arg(long)]
    name: Option<String>,
    /// podman: restore the container at once.
    #[arg(long)]
    restore: bool,
    /// docker: the container for the checkpoint, created from the same image.
    #[arg(long)]
    container: Option<String>,
    /// containerd's namespace.
    #[arg(long, default_value = "default")]
    namespace: String,
    /// Time limit for the engine, in seconds.
    #[arg(long, default_value_t = 3600)]
    timeout: u64,
    /// Print at the end how long each step of a restore took, as JSON.
    #[arg(long)]
    timings: bool,
    /// Print nothing while it runs.
    #[arg(short, long)]
    quiet: bool,
}

pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.restore && args.engine != Engine::Podman {
        bail!(
            "--restore is for podman; the others restore by commands of their own, which import names"
        );
    }
    let source = Place::parse(&args.source).open()?;
    if args.engine == Engine::Podman {
        for_podman(&source)?;
    }
    let mut steps = Steps::new();
    let next = match args.engine {
        Engine::Podman if args.restore => podman::restore(args, &source, &mut steps)?,
        Engine::Podman => image(args, &source)?,
        Engine::Containerd => containerd(args, &source)?,
        Engine::Docker => docker(args, &source)?,
    };
    println!("{next}");
    if args.timings {
        println!("{}", steps.json());
    }
    Ok(ExitCode::SUCCESS)
}

/// podman needs to know the image of a container.
fn for_podman(source: &Source) -> anyhow::Result<()> {
    let config = |name: &str| name == names::CONFIG_DUMP;
    if source.small_files(&config, &Limits::default())?.is_empty() {
        bail!(
            "{}: a {} without {}: podman restores only what says which image and settings its container had; `cryopod unpack --images-only` gives the images alone",
            source.path().display(),
            source.kind(),
            names::CONFIG_DUMP
        );
    }
    Ok(())
}

impl Args {
    fn call(&self, program: &'static str) -> Call {
        Call::new(program, Duration::from_secs(self.timeout))
    }

    fn write(&self, source: &Source, to: &Destination) -> anyhow::Result<()> {
        let how = How::plain(self.quiet).named(self.name.as_deref());
        how.write_silently("pack", source, to)
    }
}

fn image(args: &Args, source: &Source) -> anyhow::Result<String> {
    let temp = LockedTempDir::anywhere(Holds::Copy)?;
    let layout = layout(args, source, temp.path())?;
    let said = args
        .call("podman")
        .args(["pull", "--quiet", &format!("oci:{}", layout.display())])
        .run()?;
    let id = said.lines().last().unwrap_or_default().trim().to_owned();
    if let Some(name) = &args.name {
        args.call("podman").args(["tag", &id, name]).run()?;
    }
    let image = args.name.as_deref().unwrap_or(&id);
    Ok(format!(
        "{id}\nrestore it with: podman container restore {image}"
    ))
}

fn layout(args: &Args, source: &Source, temp: &Path) -> anyhow::Result<PathBuf> {
    if source.kind() == Kind::OciLayout {
        return Ok(fs::canonicalize(source.path())?);
    }
    let layout = temp.join("image");
    args.write(source, &Destination::Layout(layout.clone()))?;
    Ok(layout)
}

fn containerd(args: &Args, source: &Source) -> anyhow::Result<String> {
    let temp = LockedTempDir::anywhere(Holds::Copy)?;
    let own = matches!(source.kind(), Kind::Containerd { archive: true });
    let file = if own || (source.kind() == Kind::OciArchive && args.name.is_none()) {
        fs::canonicalize(source.path())?
    } else {
        if args.name.is_none() {
            bail!(
                "containerd's images have names: give one with --name, as in --name localhost/job:1"
            );
        }
        let file = temp.path().join("image.tar");
        args.write(source, &Destination::Archive(file.clone()))?;
        file
    };
    let said = args
        .call("ctr")
        .args(["--namespace", &args.namespace, "images", "import"])
        // The CRI wants a snapshot of an image, but the parts of its own checkpoint are not an image.
        .flag(own, "--no-unpack")
        .args([&file])
        .run()?;
    let how = if own {
        "restore it with: ctr containers restore --rw --live NAME IMAGE"
    } else {
        "restore it in a pod whose container has this image (containerd 2.1 to 2.3, in the namespace k8s.io; from 2.3.4 on with enable_experimental_restore_via_create)"
    };
    Ok(format!("{}\n{how}", said.trim()))
}

fn docker(args: &Args, source: &Source) -> anyhow::Result<String> {
    let container = args
        .container
        .as_deref()
        .context("docker restores a checkpoint into a container that exists: name it with --container; make it with `docker create`, from the image that `cryopod inspect` names")?;
    let name = args.name.as_deref().unwrap_or("cryopod");
    if name.contains('/') || name.starts_with('.') {
        bail!("--name {name}: the name of a docker checkpoint has no `/` and no dot ahead");
    }
    let ask = |words: &[&str]| -> anyhow::Result<String> {
        Ok(Call::new("docker", ASK)
            .args(words)
            .run()?
            .trim()
            .to_owned())
    };
    let id = ask(&["container", "inspect", "--format", "{{.Id}}", container])?;
    let root = ask(&["info", "--format", "{{.DockerRootDir}}"])?;
    let directory = Path::new(&root)
        .join("containers")
        .join(&id)
        .join("checkpoints");
    fs::create_dir_all(&directory).with_context(|| {
        format!(
            "{}: cannot be made; run it as root, on the daemon's host",
            directory.display()
        )
    })?;
    let options = UnpackOptions {
        images_only: true,
        ..UnpackOptions::default()
    };
    unpack(source, &directory.join(name), &options)?;
    Ok(format!(
        "restore it with: docker start --checkpoint {name} {container}"
    ))
}
