//! `cryopod export`: lets the engine checkpoint a container, and makes an archive of the checkpoint.

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
use crate::push::RegistryArgs;
use crate::store::stores;
use crate::temp_dir::{Holds, LockedTempDir};
use crate::ui::Steps;

#[derive(clap::Args)]
pub struct Args {
    /// The container, as its engine names it.
    container: String,
    /// Its engine.
    #[arg(short, long, value_enum)]
    engine: Engine,
    /// The output: oci:DIR, oci-archive:FILE, a file for `podman container restore --import` (.tar, .tar.gz, else
    /// zstd), or docker://REGISTRY/REPOSITORY:TAG.
    #[arg(short, long)]
    output: String,
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
    #[arg(long, default_value_t = 3600)]
    timeout: u64,
    /// Print at the end how long each step took, as JSON.
    #[arg(long)]
    timings: bool,
    /// Compression and other options of `pack`.
    #[command(flatten)]
    how: How,
    /// The registry's options.
    #[command(flatten)]
    registry: ExportRegistry,
}

/// The registry's options: those of `push` without --quiet.
#[derive(clap::Args)]
struct ExportRegistry {
    /// false: accept any certificate, and plain HTTP if there is no TLS.
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    tls_verify: bool,
    /// The auth file, instead of $REGISTRY_AUTH_FILE and the usual ones.
    #[arg(long)]
    authfile: Option<PathBuf>,
}

pub struct Taken {
    source: PathBuf,
    /// Files that complete it.
    extra: BTreeMap<String, Vec<u8>>,
    /// The directory with the checkpoint, if it is not the one that was offered.
    directory: Option<LockedTempDir>,
}

impl Args {
    fn limit(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }
}

/// Runs the subcommand. On an error it keeps what the engine has made, and names it.
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
    // Checked before anything is frozen.
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
            // Nothing else refers to it.
            if let Err(e) = std::fs::remove_dir_all(&stored.entry) {
                tracing::warn!("{}: cannot be removed: {e}", stored.entry.display());
            }
            Ok(packed)
        });
    steps.done("pack");
    let again = format!("cryopod pack PATH -o {}", args.output);
    keep_on_error(packed, temp, &name.unwrap_or_default(), &again)
}

/// The checkpoint may be all that is left of the container, so it is removed only after the archive is complete.
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
