//! `cryopod bundle`: turns a checkpoint with large files in a store into a self-contained archive or directory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use cryopod_archive::format::limits::Limits;
use cryopod_archive::format::names;
use cryopod_archive::pack::{Destination, complete};
use cryopod_archive::source::Source;
use cryopod_archive::store::{Found, Reference, find, find_in, gather};
use cryopod_archive::unpack::{UnpackOptions, unpack};
use cryopod_archive::verify::{VerifyOptions, verify};

use crate::archives::confined;
use crate::archives::pack::{PackMethod, completed, destination};
use crate::store::stores;
use crate::temp_dir::{Holds, LockedTempDir};
use crate::terminal::ui;
use cryopod_archive::source::ArchivePlace;

#[derive(clap::Args)]
pub struct Args {
    /// The checkpoint: an image directory, or an archive as for `cryopod inspect`.
    source: String,
    /// The output: oci:DIR, oci-archive:FILE, or a file for `podman container restore --import` (.tar, .tar.gz, else
    /// zstd). The first two keep containerd's own checkpoint in its form, for `ctr images import`.
    #[arg(short, long, required_unless_present = "in_place")]
    output: Option<String>,
    /// Put the files into the image directory SOURCE itself, such as docker's directory of a checkpoint.
    #[arg(long, conflicts_with = "output")]
    in_place: bool,
    /// A store to search for the large files before the configured ones; may be given several times.
    #[arg(long)]
    store: Vec<PathBuf>,
    /// A directory to search for parent checkpoints that have moved; may be given several times. (The result still
    /// builds on them; see cryopod flatten.)
    #[arg(long)]
    parents: Vec<PathBuf>,
    #[command(flatten)]
    how: PackMethod,
}

/// Runs `cryopod bundle`, and returns its exit code.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let to = args.output.as_deref().map(destination).transpose()?;
    if let Some(to) = &to {
        args.how.check(to)?;
    }
    let source = ArchivePlace::parse(&args.source).open(&confined::identities()?)?;
    let stores = stores(&args.store)?;
    let found = found(&source, &stores)?.with_context(|| {
        format!(
            "{}: has no files in a store; `cryopod pack` makes an archive of it",
            source.path().display()
        )
    })?;
    // Verifies all digests before it writes a byte.
    let options = VerifyOptions {
        threads: args.how.threads(),
        parents: args.parents.clone(),
        stores,
        ..VerifyOptions::default()
    };
    ui::with_progress("verify", args.how.quiet(), &options.progress, || {
        verify(&source, &options)
    })?;
    let Some(to) = to else {
        let images = source
            .images_directory()
            .with_context(|| format!("{}: no image directory", source.path().display()))?;
        gather(&images, &found, args.how.threads())?;
        if !args.how.quiet() {
            println!("{}: whole, {}", source.path().display(), found.reference);
        }
        return Ok(ExitCode::SUCCESS);
    };
    if source.containerd().is_some() && !matches!(to, Destination::Tar(..)) {
        // containerd restores only its own form.
        let options = args.how.options(BTreeMap::new())?;
        let packed = ui::with_progress("bundle", args.how.quiet(), &options.progress, || {
            complete(&source, &found, &to, &options)
        })?;
        args.how.say(&to, &packed);
        return Ok(ExitCode::SUCCESS);
    }
    let extra = completed(&source)?;
    let temp = LockedTempDir::beside(to.path(), Holds::Copy)?;
    let whole = whole(&source, found, temp.path(), args.how.threads())?;
    args.how.write("bundle", &whole, &to, extra)?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the checkpoint with the files of its store's entry. Unpacks it into a directory if necessary.
pub fn whole(
    source: &Source,
    stored: Found,
    temp: &Path,
    threads: usize,
) -> anyhow::Result<Source> {
    let mut whole = source.clone();
    if whole.join(stored.clone()) {
        return Ok(whole);
    }
    let directory = temp.join("small");
    let options = UnpackOptions {
        threads,
        ..UnpackOptions::default()
    };
    unpack(source, &directory, &options)?;
    whole = Source::open(&directory)?;
    whole.join(stored);
    Ok(whole)
}

/// Finds the store's entry that a checkpoint refers to; `None` if it refers to none. An entry that is missing or
/// incomplete is an error.
pub fn found(source: &Source, stores: &[PathBuf]) -> anyhow::Result<Option<Found>> {
    if let Some(images) = source.images_directory() {
        return Ok(find(&images, stores)?);
    }
    let name = format!("{}/{}", names::CHECKPOINT_DIR, names::STORE_REFERENCE);
    let mut files = source.small_files(&|n| n == name, &Limits::default())?;
    let Some(text) = files.remove(&name) else {
        return Ok(None);
    };
    let path = source.path().join(name);
    let reference = Reference::parse(&text, &path)?;
    Ok(Some(find_in(reference, &path, stores)?))
}
