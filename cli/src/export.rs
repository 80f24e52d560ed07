//! `cryopod export`: a container checkpointed by its engine, and an archive of it.

mod containerd;
mod docker;
mod podman;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use cryopod_archive::pack::Destination;
use cryopod_archive::source::Source;
use cryopod_registry::parse_reference;

use crate::bundle;
use crate::engine::Engine;
use crate::pack::{self, How};
use crate::place::stores;
use crate::push::RegistryArgs;
use crate::temp_dir::{Holds, LockedTempDir};
use crate::ui::Steps;

/// Arguments.
#[derive(clap::Args)]
pub struct Args {
    /// The container, as its engine names it.
    container: String,
    /// Its engine.
    #[arg(short, long, value_enum)]
    engine: Engine,
    /// Where to: oci:DIR, oci-archive:FILE, a file for `podman container restore --import` (.tar, .tar.gz, else zstd),
    /// or docker://REGISTRY/REPOSITORY:TAG.
    #[arg(short, long)]
    output: String,
    /// The container goes on running.
    #[arg(long)]
    leave_running: bool,
    /// Open TCP connections are kept (podman).
    #[arg(long)]
    tcp_established: bool,
    /// File locks are kept (podman).
    #[arg(long)]
    file_locks: bool,
    /// containerd's namespace.
    #[arg(long, default_value = "default")]
    namespace: String,
    /// Seconds that the engine's checkpoint may take.
    #[arg(long, default_value_t = 3600)]
    timeout: u64,
    /// Say at the end how long each step took, as JSON.
    #[arg(long)]
    timings: bool,
    /// How the image is compressed, and all else as for `pack`.
    #[command(flatten)]
    how: How,
    /// The registry's options.
    #[command(flatten)]
    registry: ExportRegistry,
}

/// The registry's options, those of `push` but for --quiet.
#[derive(clap::Args)]
struct ExportRegistry {
    /// false: any certificate, and plain HTTP where there is no TLS.
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    tls_verify: bool,
    /// Another auth file than $REGISTRY_AUTH_FILE and the usual ones.
    #[arg(long)]
    authfile: Option<PathBuf>,
}

/// What an engine has made.
pub struct Taken {
    /// What to pack.
    source: PathBuf,
    /// Files that complete it.
    extra: BTreeMap<String, Vec<u8>>,
    /// The directory that it lies in, if that is another than the one that was offered.
    directory: Option<LockedTempDir>,
}

impl Args {
    fn limit(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }
}

/// Runs the subcommand.
///
/// # Errors
/// The engine's, in its words; the library's. What the engine has made is kept then, and named.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let mut steps = Steps::new();
    let done = export(args, &mut steps);
    if args.timings && done.is_ok() {
        println!("{}", steps.json());
    }
    done
}

fn export(args: &Args, steps: &mut Steps) -> anyhow::Result<ExitCode> {
    if let Some(image) = args.output.strip_prefix("docker://") {
        parse_reference(image)?;
        let temp = LockedTempDir::anywhere(Holds::Checkpoint)?;
        let layout = temp.path().join("image");
        take(args, &Destination::Layout(layout.clone()), steps)?;
        let registry = RegistryArgs::new(
            args.registry.tls_verify,
            args.registry.authfile.clone(),
            args.how.quiet(),
        );
        let pushed = Source::open(&layout)
            .map_err(anyhow::Error::from)
            .and_then(|source| registry.push(&source, image));
        steps.done("push");
        return keep_on_error(
            pushed,
            temp,
            "image",
            &format!("cryopod push oci:PATH {image}"),
        );
    }
    let to = Destination::parse(&args.output);
    // Known before anything is frozen.
    to.check(args.how.replace())?;
    take(args, &to, steps)
}

fn take(args: &Args, to: &Destination, steps: &mut Steps) -> anyhow::Result<ExitCode> {
    let temp = LockedTempDir::beside(to.path(), Holds::Checkpoint)?;
    let taken = match args.engine {
        Engine::Podman => podman::checkpoint(args, temp.path(), steps),
        Engine::Docker => docker::checkpoint(args, temp.path(), steps),
        Engine::Containerd => containerd::checkpoint(args, temp.path(), steps),
    }?;
    let temp = taken.directory.unwrap_or(temp);
    let name = taken
        .source
        .file_name()
        .map(|n| n.to_string_lossy().into_owned());
    let packed = Source::open(&taken.source)
        .map_err(anyhow::Error::from)
        .and_then(|source| {
            let mut extra = pack::completed(&source)?;
            extra.extend(taken.extra);
            let stores = stores(&[])?;
            let stored = match stores.is_empty() {
                true => None,
                false => bundle::found(&source, &stores)?,
            };
            let Some(stored) = stored else {
                return args.how.write("export", &source, to, extra);
            };
            let threads = args.how.threads();
            let whole = bundle::whole(&source, stored.clone(), temp.path(), threads)?;
            let packed = args.how.write("export", &whole, to, extra)?;
            // Nobody else knows of it.
            if let Err(e) = std::fs::remove_dir_all(&stored.entry) {
                tracing::warn!("{}: cannot be removed: {e}", stored.entry.display());
            }
            Ok(packed)
        });
    steps.done("pack");
    let again = format!("cryopod convert PATH -o {}", args.output);
    keep_on_error(packed, temp, &name.unwrap_or_default(), &again)
}

/// The checkpoint may be all that there is of the container: it is removed only when it has arrived.
fn keep_on_error<T>(
    done: anyhow::Result<T>,
    temp: LockedTempDir,
    name: &str,
    again: &str,
) -> anyhow::Result<ExitCode> {
    match done {
        Ok(_) => Ok(ExitCode::SUCCESS),
        Err(error) => {
            let kept = temp.keep().join(name);
            let again = again.replace("PATH", &kept.display().to_string());
            Err(error.context(format!(
                "the checkpoint was made and is kept in {}; go on with: {again}",
                kept.display()
            )))
        }
    }
}
