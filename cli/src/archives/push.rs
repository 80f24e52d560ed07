//! `cryopod push`: pushes an image to a registry.

use std::process::ExitCode;

use cryopod_archive::source::ArchivePlace;

use crate::archives::confined;
use crate::archives::pack;
use crate::archives::registry_args::RegistryArgs;

#[derive(clap::Args)]
pub struct Args {
    /// The image: oci:DIR[:NAME] or oci-archive:FILE, as pack and export write it; or another archive or image
    /// directory, of which an image is packed first.
    source: String,
    /// REGISTRY/REPOSITORY:TAG.
    image: String,
    #[command(flatten)]
    registry: RegistryArgs,
}

pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let source = ArchivePlace::parse(&args.source).open(&confined::identities()?)?;
    match source.image() {
        Some(_) => args.registry.push(&source, &args.image)?,
        None => {
            let how = pack::PackMethod::plain(args.registry.quiet()).configured();
            pack::to_registry(&source, &args.image, &how, &args.registry)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
