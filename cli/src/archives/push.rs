//! `cryopod push`: pushes an image to a registry.

use std::process::ExitCode;

use anyhow::ensure;
use cryopod_archive::source::ArchivePlace;
use cryopod_operations::config::Config;

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

/// Runs `cryopod push`, and returns its exit code.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let source = ArchivePlace::parse(&args.source).open(&confined::identities()?)?;
    match source.image() {
        Some(_) => {
            ensure!(
                source.is_encrypted() || Config::load()?.encrypt.recipients.is_empty(),
                "{0}: is not encrypted, and encrypt.recipients are set; `cryopod pack {0} -o docker://{1}` encrypts it, or not with --no-encrypt",
                args.source,
                args.image
            );
            args.registry.push(&source, &args.image)?;
        }
        None => {
            let how = pack::PackMethod::plain(args.registry.quiet()).configured();
            pack::to_registry(&source, &args.image, &how, &args.registry)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
