//! `cryopod flatten`: makes a checkpoint that builds on others self-contained.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use cryopod_archive::flatten::{FlattenOptions, into_directory};
use cryopod_archive::format::limits::raise_open_files;
use cryopod_archive::pack::Destination;
use cryopod_archive::source::{Kind, Source};
use cryopod_host::files::sync_directory;

use crate::archives::bundle::found;
use crate::archives::confined;
use crate::archives::pack::{PackMethod, destination};
use crate::store::stores;
use crate::temp_dir::{Holds, LockedTempDir};
use crate::terminal::ui;
use cryopod_archive::source::ArchivePlace;

#[derive(clap::Args)]
pub struct Args {
    /// The checkpoint: an image directory, or an archive as for `cryopod inspect`.
    source: String,
    /// The output: for a directory a new directory, else oci:DIR, oci-archive:FILE, or a file for `podman container
    /// restore --import` (.tar, .tar.gz, .tar.zst).
    #[arg(short, long)]
    output: String,
    /// A directory to search for parent checkpoints that have moved; may be given several times.
    #[arg(long)]
    parents: Vec<PathBuf>,
    #[command(flatten)]
    how: PackMethod,
}

/// Returns true if the output is to be a directory like the source.
fn to_directory(source: &Source, output: &str) -> bool {
    let archive = ["oci:", "oci-archive:"]
        .iter()
        .any(|p| output.starts_with(p))
        || [".tar", ".tgz", ".gz", ".zst"]
            .iter()
            .any(|s| output.ends_with(s));
    matches!(source.kind(), Kind::Directory | Kind::CriuDirectory) && !archive
}

/// Runs `cryopod flatten`, and returns its exit code.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    raise_open_files();
    let mut source = ArchivePlace::parse(&args.source).open(&confined::identities()?)?;
    let stores = stores(&[])?;
    if !stores.is_empty()
        && let Some(stored) = found(&source, &stores)?
        && !source.join(stored)
    {
        bail!(
            "{}: has large files in a store; make an archive first that has them: cryopod bundle",
            source.path().display()
        );
    }
    let to = match to_directory(&source, &args.output) {
        true => None,
        false => Some(destination(&args.output)?),
    };
    let path = match &to {
        Some(to) => {
            args.how.check(to)?;
            to.path().to_owned()
        }
        None => PathBuf::from(&args.output),
    };
    if to.is_none() && path.symlink_metadata().is_ok() {
        bail!(
            "{}: exists already; choose another name or remove it",
            path.display()
        );
    }
    let temp = LockedTempDir::beside(&path, Holds::Copy)?;
    let whole = temp.path().join("whole");
    let options = FlattenOptions {
        threads: args.how.threads(),
        parents: args.parents.iter().chain(&stores).cloned().collect(),
        ..FlattenOptions::default()
    };
    let done = ui::with_progress("flatten", args.how.quiet(), &options.progress, || {
        into_directory(&source, &whole, &options)
    })?;
    match &to {
        None => put(&whole, &path)
            .with_context(|| format!("{}: cannot be put in place", path.display()))?,
        Some(to) => pack(args, &whole, to)?,
    }
    if !args.how.quiet() {
        println!(
            "{}: {} of GPU memory, stored as {} (it was {} and {} chunks of other checkpoints)",
            path.display(),
            ui::bytes(done.after.bytes),
            ui::bytes(done.after.stored_bytes),
            ui::bytes(done.before.stored_bytes),
            done.before.parent,
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Gives a directory its name, durably.
fn put(whole: &Path, path: &Path) -> io::Result<()> {
    std::fs::rename(whole, path)?;
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
    sync_directory(parent.unwrap_or(Path::new(".")))
}

fn pack(args: &Args, whole: &Path, to: &Destination) -> anyhow::Result<()> {
    let whole = Source::open(whole)?;
    args.how.write_silently("pack", &whole, to).map(drop)
}
