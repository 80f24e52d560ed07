//! `cryopod export`: lets the engine checkpoint a container, and makes an archive of the checkpoint.

pub mod containerd;
mod docker;
mod image;
mod podman;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use cryopod_archive::Compression;
use cryopod_archive::pack::Destination;
use cryopod_archive::source::Source;
use cryopod_operations::images::handover::ExportRequest;
use cryopod_registry::parse_reference;

use crate::archives::bundle;
use crate::archives::pack::{self, PackMethod};
use crate::archives::registry_args::RegistryAccess;
use crate::archives::streams;
use crate::engines::engine::{Engine, EngineCall, Interrupted, which};
use crate::store::stores;
use crate::temp_dir::{Holds, LockedTempDir};
use crate::terminal::numbers;
use crate::terminal::ui::Steps;

#[derive(clap::Args)]
pub struct Args {
    /// The container, as its engine names it.
    container: String,
    /// Its engine, where two engines have a container of this name.
    #[arg(short, long, value_enum)]
    engine: Option<Engine>,
    /// The output: oci:DIR, oci-archive:FILE, a file for `podman container restore --import` (.tar, .tar.gz, else
    /// zstd), docker://REGISTRY/REPOSITORY:TAG, or `-`: such a file to standard output, for `cryopod import -`.
    #[arg(short, long)]
    output: String,
    /// Take the container's image along, for a host that does not have it (podman, docker).
    #[arg(long)]
    with_image: bool,
    /// Leave the container running.
    #[arg(long)]
    leave_running: bool,
    /// Keep open TCP connections (podman).
    #[arg(long)]
    tcp_established: bool,
    /// Keep file locks (podman).
    #[arg(long)]
    file_locks: bool,
    /// containerd's namespace.
    #[arg(long, default_value = "default")]
    namespace: String,
    /// Time limit of the engine's checkpoint, in seconds.
    #[arg(long, default_value_t = 3600, value_parser = numbers::seconds)]
    timeout: u64,
    /// Print at the end how long each step took, as JSON.
    #[arg(long)]
    timings: bool,
    /// Compression and other options of `pack`.
    #[command(flatten)]
    how: PackMethod,
    /// The registry's options.
    #[command(flatten)]
    registry: RegistryAccess,
}

pub struct Taken {
    source: PathBuf,
    /// Files that complete it.
    extra: BTreeMap<String, Vec<u8>>,
    /// By which the large files come from the runtime, and go back into podman's own checkpoint.
    request: Option<ExportRequest>,
}

impl Args {
    fn limit(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }

    /// Refuses what only podman has options for.
    fn without_options_of_podman(&self, engine: &str) -> anyhow::Result<()> {
        if self.tcp_established || self.file_locks {
            anyhow::bail!(
                "{engine} has no option for TCP connections and file locks: for a container with GPUs set `tcp-established = true` under [criu.options] in {} (file locks are on), for another one put the option into /etc/criu/runc.conf",
                cryopod_operations::config::PATH
            );
        }
        Ok(())
    }
}

/// Runs the subcommand. On an error it keeps what the engine has made, and names it.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let mut steps = Steps::new();
    let name = streams::to_stdout(&args.output)?;
    let done = match name {
        Some(name) => export_to_stdout(args, name, &mut steps),
        None => export(args, &mut steps),
    };
    if args.timings && done.is_ok() {
        match name {
            // Nothing but the archive is on standard output.
            Some(_) => eprintln!("{}", steps.json()),
            None => println!("{}", steps.json()),
        }
    }
    done
}

fn export_to_stdout(args: &Args, name: &str, steps: &mut Steps) -> anyhow::Result<ExitCode> {
    let temp = LockedTempDir::anywhere(Holds::Checkpoint)?;
    let file = temp.path().join(name);
    let to = match name.ends_with(".oci.tar") {
        true => Destination::Archive(file.clone()),
        false => Destination::Tar(file.clone(), Compression::Zstd),
    };
    take(args, &to, temp.path(), &args.how.silent(), steps)?;
    let sent = streams::send(&file);
    steps.done("send");
    keep_on_error(sent, temp, name, |kept| format!("cat {kept} | ..."))
}

fn export(args: &Args, steps: &mut Steps) -> anyhow::Result<ExitCode> {
    if let Some(image) = args.output.strip_prefix("docker://") {
        parse_reference(image)?;
        let temp = LockedTempDir::anywhere(Holds::Checkpoint)?;
        let layout = temp.path().join("image");
        let to = Destination::Layout(layout.clone());
        take(args, &to, temp.path(), &args.how.to_be(image), steps)?;
        let registry = args.registry.with(args.how.quiet());
        let pushed = Source::open(&layout)
            .map_err(anyhow::Error::from)
            .and_then(|source| registry.push(&source, image));
        steps.done("push");
        let again = |kept: &str| format!("cryopod push oci:{kept} {image}");
        return keep_on_error(pushed, temp, "image", again);
    }
    let to = Destination::parse(&args.output);
    take(args, &to, to.path(), &args.how, steps)
}

/// `place`: the engine's checkpoint goes beside it, and may stay there after an error.
fn take(
    args: &Args,
    to: &Destination,
    place: &Path,
    how: &PackMethod,
    steps: &mut Steps,
) -> anyhow::Result<ExitCode> {
    // Before anything is frozen.
    how.check(to)?;
    let engine = match args.engine {
        Some(engine) => engine,
        None => which::knows(&args.container, &args.namespace)?,
    };
    // podman keeps a checkpoint of its own, and its file may have only a part.
    let podman = engine == Engine::Podman;
    let holds = match podman {
        true => Holds::Copy,
        false => Holds::Checkpoint,
    };
    let temp = LockedTempDir::beside(place, holds)?;
    let image = args
        .with_image
        .then(|| image::save(args, engine, temp.path()));
    let image = image.transpose()?;
    if image.is_some() {
        steps.done("image save");
    }
    let taken = match engine {
        Engine::Podman => podman::checkpoint(args, temp.path(), steps),
        Engine::Docker => docker::checkpoint(args, temp.path(), steps),
        Engine::Containerd => containerd::checkpoint(args, temp.path(), steps),
    };
    let mut taken = match taken {
        Ok(taken) => taken,
        Err(error) => return Err(keep_if_last(error, args, engine, temp)),
    };
    if let Some(image) = &image {
        let before = taken.source.clone();
        match image::add(taken, image, temp.path()) {
            Ok(with_image) => taken = with_image,
            Err(e) if podman => return Err(podmans(e, args)),
            Err(e) => {
                let name = before.file_name().unwrap_or_default();
                let name = name.to_string_lossy().into_owned();
                return keep_on_error::<()>(Err(e), temp, &name, packing(args));
            }
        }
    }
    let name = taken
        .source
        .file_name()
        .map(|n| n.to_string_lossy().into_owned());
    let packed = Source::open(&taken.source)
        .map_err(anyhow::Error::from)
        .and_then(|source| {
            let mut extra = pack::completed(&source)?;
            extra.extend(taken.extra);
            let mut stores = stores(&[])?;
            stores.extend(taken.request.iter().map(|r| r.store().to_owned()));
            let stored = match stores.is_empty() {
                true => None,
                false => bundle::found(&source, &stores)?,
            };
            let Some(stored) = stored else {
                return how.write("export", &source, to, extra);
            };
            let threads = how.threads();
            let whole = bundle::whole(&source, stored.clone(), temp.path(), threads)?;
            if stored.reference.handed {
                steps.done("podman's file, without the large files");
            }
            let packed = how.write("export", &whole, to, extra)?;
            // Nothing else refers to it, but podman's own checkpoint.
            if !podman && let Err(e) = fs::remove_dir_all(&stored.entry) {
                tracing::warn!("{}: cannot be removed: {e}", stored.entry.display());
            }
            Ok(packed)
        });
    steps.done("pack");
    if podman {
        drop(taken.request);
        return packed.map_or_else(|e| Err(podmans(e, args)), |_| Ok(ExitCode::SUCCESS));
    }
    keep_on_error(packed, temp, &name.unwrap_or_default(), packing(args))
}

/// After an error of the engine: it may have made the checkpoint, ended the container, and failed in what follows. Keeps
/// the checkpoint unless the container runs, and says where it is.
fn keep_if_last(
    error: anyhow::Error,
    args: &Args,
    engine: Engine,
    temp: LockedTempDir,
) -> anyhow::Error {
    let interrupted = error.downcast_ref::<Interrupted>().is_some();
    let runs = || {
        EngineCall::new(engine.program(), Duration::from_secs(60))
            .args(["container", "inspect", "--format", "{{.State.Running}}"])
            .args([&args.container])
            .run()
            .is_ok_and(|said| said.trim() == "true")
    };
    if engine == Engine::Containerd || !interrupted && (args.leave_running || runs()) {
        return error;
    }
    if engine == Engine::Podman {
        return podmans(error, args);
    }
    if fs::read_dir(temp.path()).is_ok_and(|mut items| items.next().is_none()) {
        return error;
    }
    error.context(format!(
        "{} may not run any more; what {} has made of its checkpoint is kept in {}",
        args.container,
        engine.program(),
        temp.keep().display()
    ))
}

/// Adds how podman's own checkpoint is restored, if the container does not run and has one.
fn podmans(error: anyhow::Error, args: &Args) -> anyhow::Error {
    if !podman::has_checkpoint(&args.container) {
        return error;
    }
    error.context(format!(
        "the container was checkpointed and does not run; go on with: podman container restore {}",
        args.container
    ))
}

/// The checkpoint may be all that is left of the container, so it is removed only after the archive is complete. `again`: the
/// command with which a user goes on with what is kept.
fn keep_on_error<T>(
    done: anyhow::Result<T>,
    temp: LockedTempDir,
    name: &str,
    again: impl Fn(&str) -> String,
) -> anyhow::Result<ExitCode> {
    match done {
        Ok(_) => Ok(ExitCode::SUCCESS),
        Err(error) => {
            let kept = temp.keep().join(name).display().to_string();
            let again = again(&kept);
            Err(error.context(format!(
                "the checkpoint was made and is kept in {kept}; go on with: {again}"
            )))
        }
    }
}

/// Returns what makes the archive of a checkpoint that is kept.
fn packing(args: &Args) -> impl Fn(&str) -> String {
    let output = match streams::to_stdout(&args.output) {
        Ok(None) => args.output.clone(),
        _ => "FILE".into(),
    };
    move |kept| match entry_of(Path::new(kept)) {
        None => format!("cryopod pack {kept} -o {output}"),
        Some(entry) => {
            let entry = entry.display();
            let to = match output.starts_with("docker://") {
                true => format!("oci:DIR, and: cryopod push DIR {output}"),
                false => output.clone(),
            };
            format!("cryopod bundle {kept} -o {to} (its large files are in {entry})")
        }
    }
}

/// Returns the store's entry with the large files of a checkpoint that is kept, if there is one. The entry stays from now on.
fn entry_of(kept: &Path) -> Option<PathBuf> {
    let source = Source::open(kept).ok()?;
    let found = bundle::found(&source, &stores(&[]).ok()?).ok()??;
    if let Err(error) = found.keep() {
        tracing::warn!("{error}");
    }
    Some(found.entry)
}
