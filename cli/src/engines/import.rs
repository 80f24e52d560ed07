//! `cryopod import`: hands an archive to an engine for a restore.

mod podman;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use cryopod_archive::container::carried::IMAGE;
use cryopod_archive::container::engine as engine_records;
use cryopod_archive::format::limits::Limits;
use cryopod_archive::format::names;
use cryopod_archive::pack::Destination;
use cryopod_archive::source::{Kind, Source};
use cryopod_archive::unpack::UnpackOptions;
use serde::{Deserialize, Serialize};

use crate::archives::confined::{self, Decoding};
use crate::archives::pack::PackMethod;
use crate::archives::signature;
use crate::archives::streams;
use crate::engines::carried::{self, NamedImage};
use crate::engines::engine::{Engine, EngineCall, which};
use crate::temp_dir::{Holds, LockedTempDir};
use crate::terminal::numbers;
use crate::terminal::ui::Steps;
use cryopod_archive::source::ArchivePlace;
use cryopod_gpu_plan::mapping::gpumap::Wish;
use cryopod_operations::config::Config;

const ASK: Duration = Duration::from_secs(60);

#[derive(clap::Args)]
pub struct Args {
    /// The archive, as for `cryopod inspect`; `-` reads it from standard input.
    source: String,
    /// The engine; else the one that made the checkpoint, or the only one on this host.
    #[arg(short, long, value_enum)]
    engine: Option<Engine>,
    /// The image's name in the engine. With --restore: the container's name. For docker: the checkpoint's name.
    #[arg(long)]
    name: Option<String>,
    /// podman: restore the container at once.
    #[arg(long)]
    restore: bool,
    /// Restore onto these GPUs: `auto`, or OLD=NEW[,OLD=NEW...], each side a UUID, a PCI address, a node or an index.
    #[arg(long, requires = "restore")]
    map: Option<ImportMap>,
    /// docker: the container for the checkpoint, created from the same image.
    #[arg(long)]
    container: Option<String>,
    /// containerd's namespace.
    #[arg(long, default_value = "default")]
    namespace: String,
    /// Time limit for the engine, in seconds.
    #[arg(long, default_value_t = 3600, value_parser = numbers::seconds)]
    timeout: u64,
    /// Print at the end how long each step of a restore took, as JSON.
    #[arg(long)]
    timings: bool,
    /// Print nothing while it runs.
    #[arg(short, long)]
    quiet: bool,
}

/// A GPU map that can be understood, as its user wrote it.
#[derive(Debug, Clone)]
struct ImportMap(String);

impl std::str::FromStr for ImportMap {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse::<Wish>().map(|_| Self(text.to_owned()))
    }
}

/// Runs `cryopod import`, and returns its exit code.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let received = (args.source == "-").then(streams::receive).transpose()?;
    let source = match &received {
        Some(received) => {
            let mut source = Source::open(&received.path)?;
            source.unlock(&confined::identities()?);
            source
        }
        None => ArchivePlace::parse(&args.source).open(&confined::identities()?)?,
    };
    signature::require_beside(&Config::load()?.restore, &source)?;
    let records = ImportRecords::of(&source)?;
    let engine = match args.engine {
        Some(engine) => engine,
        None => which::fits(records.made_by(&source)?)?,
    };
    if args.restore && engine != Engine::Podman {
        bail!(
            "--restore is for podman; {engine} restores by commands of its own, which import names"
        );
    }
    if engine == Engine::Podman && !records.files.contains_key(names::CONFIG_DUMP) {
        bail!(
            "{}: a {} without {}: podman restores only what says which image and settings its container had; `cryopod unpack --images-only` gives the images alone",
            source.path().display(),
            source.kind(),
            names::CONFIG_DUMP
        );
    }
    let mut steps = Steps::new();
    let next = match engine {
        Engine::Podman if args.restore => podman::restore(args, &source, &records, &mut steps)?,
        Engine::Podman => image(args, &source, &records)?,
        Engine::Containerd => containerd(args, &source)?,
        Engine::Docker => docker(args, &source, &records)?,
    };
    println!("{next}");
    if args.timings {
        println!("{}", steps.json());
    }
    Ok(ExitCode::SUCCESS)
}

/// What an archive says about its container.
#[derive(Serialize, Deserialize)]
struct ImportRecords {
    /// The engine's records, by name.
    files: BTreeMap<String, Vec<u8>>,
    /// The archive has the container's image.
    image: bool,
    /// cryopod's runtime made the checkpoint.
    ours: bool,
}

impl ImportRecords {
    fn of(source: &Source) -> anyhow::Result<Self> {
        let said = Decoding::of(source.path())?.run(|| {
            let (image, ours) = (Cell::new(false), Cell::new(false));
            let wanted = |name: &str| {
                image.set(image.get() || name == IMAGE);
                let inner = name.strip_prefix("checkpoint/");
                ours.set(ours.get() || inner == Some(names::METADATA));
                engine_records::FILES.contains(&name)
            };
            let limits = Limits::default();
            let files = source.reopen(&limits)?.small_files(&wanted, &limits)?;
            let (image, ours) = (image.get(), ours.get());
            Ok(serde_json::to_vec(&Self { files, image, ours })?)
        })?;
        Ok(serde_json::from_slice(&said)?)
    }

    fn made_by(&self, source: &Source) -> anyhow::Result<Option<&'static str>> {
        if source.containerd().is_some() {
            return Ok(Some("containerd-ctr"));
        }
        let facts = engine_records::read(&self.files);
        let facts = facts.with_context(|| source.path().display().to_string())?;
        Ok(facts.engine)
    }
}

impl Args {
    fn limit(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }

    /// Whether an engine may read the image itself: it is the only one there, is not encrypted, and nobody asked for a
    /// signature, which what the engine opens once more might not have.
    fn alone(&self, source: &Source) -> anyhow::Result<bool> {
        let alone = source.image().is_some_and(|image| image.alone);
        Ok(alone && !source.is_encrypted() && Config::load()?.restore.require.is_none())
    }

    /// The name that was asked for, or else the image's own.
    fn name<'a>(&'a self, source: &'a Source) -> Option<&'a str> {
        let own = || source.image().and_then(|image| image.name.as_deref());
        self.name.as_deref().or_else(own)
    }

    fn call(&self, program: &'static str) -> EngineCall {
        EngineCall::new(program, self.limit())
    }

    fn write(&self, source: &Source, to: &Destination) -> anyhow::Result<()> {
        let how = PackMethod::plain(self.quiet).named(self.name(source));
        how.write_silently("pack", source, to).map(drop)
    }
}

/// Unpacks an archive with its container's image, and loads the image. The rest is what podman gets.
fn without_image(args: &Args, source: &Source, temp: &Path) -> anyhow::Result<Source> {
    let whole = temp.join("whole");
    let options = UnpackOptions::default();
    confined::unpack(args.quiet, source, &whole, &options)?;
    carried::take(&whole, args.limit())?;
    Ok(Source::open(&whole)?)
}

fn image(args: &Args, source: &Source, records: &ImportRecords) -> anyhow::Result<String> {
    let temp = LockedTempDir::anywhere(Holds::Copy)?;
    let layout = match records.image {
        true => layout(
            args,
            &without_image(args, source, temp.path())?,
            temp.path(),
        )?,
        false => layout(args, source, temp.path())?,
    };
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
    if source.kind() == Kind::OciLayout && args.alone(source)? {
        return Ok(fs::canonicalize(source.path())?);
    }
    let layout = temp.join("image");
    args.write(source, &Destination::Layout(layout.clone()))?;
    Ok(layout)
}

fn containerd(args: &Args, source: &Source) -> anyhow::Result<String> {
    let temp = LockedTempDir::anywhere(Holds::Copy)?;
    let own = matches!(source.kind(), Kind::Containerd { archive: true });
    let name = args.name(source);
    let names = match source.containerd() {
        Some(parts) => parts.names.clone(),
        None => name.into_iter().map(str::to_owned).collect(),
    };
    if own || args.name.is_none() {
        // The archive's own word, which may be the name of an image that pods run.
        let found = args
            .call("ctr")
            .args(["--namespace", &args.namespace, "images", "ls", "-q"])
            .run()?;
        if let Some(name) = names.iter().find(|name| found.lines().any(|l| l == *name)) {
            let or = if own {
                ""
            } else {
                ", or choose a name with --name"
            };
            bail!("containerd has an image {name} already: remove it{or}");
        }
    }
    // `ctr` takes all images of a file with their names.
    let image = args.alone(source)? && source.kind() == Kind::OciArchive;
    let file = if own || (image && args.name.is_none()) {
        fs::canonicalize(source.path())?
    } else {
        if name.is_none() {
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

fn docker(args: &Args, source: &Source, records: &ImportRecords) -> anyhow::Result<String> {
    if records.image {
        let temp = LockedTempDir::anywhere(Holds::Copy)?;
        let config = records.files.get(names::CONFIG_DUMP);
        let named = NamedImage::of(config.map_or(&[], Vec::as_slice))?;
        let file = carried::extract(source, temp.path())?;
        carried::load(&file, &named, Engine::Docker, args.limit())?;
        if args.container.is_none() {
            return Ok(format!(
                "{0}\nthe container's image is loaded; make the container with: docker create --name NAME ... {0}\nand import again with --container NAME",
                named.id
            ));
        }
    }
    let container = args
        .container
        .as_deref()
        .context("docker restores a checkpoint into a container that exists: name it with --container; make it with `docker create`, from the image that `cryopod inspect` names")?;
    let name = args.name.as_deref().unwrap_or("cryopod");
    if name.contains('/') || name.starts_with('.') {
        bail!("--name {name}: the name of a docker checkpoint has no `/` and no dot ahead");
    }
    let ask = |words: &[&str]| -> anyhow::Result<String> {
        Ok(EngineCall::new("docker", ASK)
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
    confined::unpack(true, source, &directory.join(name), &options)?;
    Ok(format!(
        "restore it with: docker start --checkpoint {name} {container}"
    ))
}
