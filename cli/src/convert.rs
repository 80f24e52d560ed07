//! `cryopod convert`: converts an archive to another kind.

use std::process::ExitCode;

use crate::pack::{self, How};

#[derive(clap::Args)]
pub struct Args {
    /// The archive: podman's export file, an exported containerd checkpoint, a Kubernetes checkpoint file,
    /// oci:DIR[:NAME], oci-archive:FILE, or an unpacked checkpoint.
    source: String,
    /// The output: oci:DIR, oci-archive:FILE, or a file for `podman container restore --import` (.tar, .tar.gz, else
    /// zstd).
    #[arg(short, long)]
    output: String,
    #[command(flatten)]
    how: How,
}

pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    pack::write("convert", &args.source, &args.output, &args.how)
}
