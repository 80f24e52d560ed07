//! `cryopod pull`: pulls an image from a registry.

use std::path::Path;
use std::process::ExitCode;

use cryopod_archive::pack::Destination;
use cryopod_archive::source::Source;
use cryopod_registry::parse_reference;

use crate::archives::confined;
use crate::archives::pack::{self, PackMethod};
use crate::archives::registry_args::{RegistryArgs, said};
use crate::archives::signature::Signature;
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
    match pack::destination(&args.output)? {
        Destination::Layout(dir) => pull(args, &dir)?,
        to => {
            to.check(false)?;
            let temp = LockedTempDir::beside(to.path(), Holds::Copy)?;
            let layout = temp.path().join("image");
            pull(args, &layout)?;
            let how = PackMethod::plain(args.registry.quiet());
            let mut source = Source::open(&layout)?;
            source.unlock(&confined::identities()?);
            how.write("pack", &source, &to, Default::default())?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn pull(args: &Args, layout: &Path) -> anyhow::Result<()> {
    let from = parse_reference(&args.image)?;
    let options = args.registry.options();
    let done = ui::with_progress("pull", args.registry.quiet(), &options.progress, || {
        cryopod_registry::pull(&from, layout, &options)
    })?;
    match Signature::fetch(&from, &done.digest, &options) {
        Ok(found) => found.first().map_or(Ok(()), |s| s.write(layout))?,
        Err(e) => tracing::warn!("no signature comes along: {e:#}"),
    }
    if !args.registry.quiet() {
        println!("{}", said(&layout.display().to_string(), "received", &done));
    }
    Ok(())
}
