//! `cryopod pull`: pulls an image from a registry.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::ensure;
use cryopod_archive::pack::{Destination, copy_image};
use cryopod_archive::source::Source;
use cryopod_operations::config::Config;
use cryopod_registry::parse_reference;

use crate::archives::pack::{self, PackMethod};
use crate::archives::registry_args::{RegistryArgs, said};
use crate::archives::signature::{self, Signature};
use crate::temp_dir::{Holds, LockedTempDir};
use crate::terminal::ui;

#[derive(clap::Args)]
pub struct Args {
    /// REGISTRY/REPOSITORY:TAG, or @DIGEST.
    image: String,
    /// The output: oci:DIR; or oci-archive:FILE or a podman export file, by way of a layout beside it.
    #[arg(short, long)]
    output: String,
    #[command(flatten)]
    registry: RegistryArgs,
}

/// Runs `cryopod pull`, and returns its exit code.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let to = pack::destination(&args.output)?;
    if let Destination::Layout(dir) = &to {
        pull(args, dir, dir)?;
        return Ok(ExitCode::SUCCESS);
    }
    to.check(false)?;
    let temp = LockedTempDir::beside(to.path(), Holds::Copy)?;
    let layout = temp.path().join("image");
    pull(args, &layout, to.path())?;
    let source = Source::open(&layout)?;
    if let Destination::Archive(file) = &to {
        let progress = Arc::default();
        ui::with_progress("pack", args.registry.quiet(), &progress, || {
            copy_image(&source, file, &progress)
        })?;
        if let Some(signature) = Signature::read(&layout)? {
            signature.write(file)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    ensure!(
        !source.is_encrypted(),
        "{}: is encrypted, and an engine's own file cannot be: pull it to oci:DIR; `cryopod pack oci:DIR -o {} --no-encrypt` decrypts that",
        args.image,
        args.output
    );
    let how = PackMethod::plain(args.registry.quiet());
    how.write("pack", &source, &to, Default::default())?;
    Ok(ExitCode::SUCCESS)
}

fn pull(args: &Args, layout: &Path, to: &Path) -> anyhow::Result<()> {
    let from = parse_reference(&args.image)?;
    let options = args.registry.options();
    let done = ui::with_progress("pull", args.registry.quiet(), &options.progress, || {
        cryopod_registry::pull(&from, layout, &options)
    })?;
    let found = Signature::fetch(&from, &done.digest, &options);
    match found.and_then(|found| signature::kept(&Config::load()?.restore, &done.digest, found)) {
        Ok(kept) => kept.map_or(Ok(()), |s| s.write(layout))?,
        Err(e) => tracing::warn!("no signature comes along: {e:#}"),
    }
    if !args.registry.quiet() {
        println!("{}", said(&to.display().to_string(), "received", &done));
    }
    Ok(())
}
