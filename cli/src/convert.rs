//! `cryopod convert`: an archive of another kind.

use std::process::ExitCode;

use crate::pack::{self, How};

/// Arguments.
#[derive(clap::Args)]
pub struct Args {
    /// The archive: podman's export file, an exported containerd checkpoint, a Kubernetes checkpoint file,
    /// oci:DIR[:NAME], oci-archive:FILE, or an unpacked checkpoint.
    source: String,
    /// Where to: oci:DIR, oci-archive:FILE, or a file for `podman container restore --import` (.tar, .tar.gz, else
    /// zstd).
    #[arg(short, long)]
    output: String,
    #[command(flatten)]
    how: How,
}

/// Runs the subcommand.
///
/// # Errors
/// The library's.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    pack::write("convert", &args.source, &args.output, &args.how)
}
