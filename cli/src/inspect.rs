//! `cryopod inspect`: shows what a checkpoint holds.

mod report;
mod table;

use std::io::Write;
use std::process::ExitCode;

use cryopod_archive::source::Place;

#[derive(clap::Args)]
pub struct Args {
    /// The checkpoint: podman's export file, a Kubernetes checkpoint file, an exported containerd checkpoint, a
    /// directory of CRIU images, oci:DIR[:NAME] or oci-archive:FILE.
    source: String,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let source = Place::parse(&args.source).open()?;
    let report = report::of(&source)?;
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &report)?;
        writeln!(out)?;
    } else {
        out.write_all(table::text(&report).as_bytes())?;
    }
    Ok(ExitCode::SUCCESS)
}
