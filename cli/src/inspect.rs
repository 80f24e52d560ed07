//! `cryopod inspect`: shows what a checkpoint holds.

mod page;
mod report;
mod table;

use std::io::Write;
use std::process::ExitCode;

use cryopod_archive::source::ArchivePlace;
use cryopod_gpu_plan::mapping::gpumap::Wish;

use crate::archives::confined::{Decoding, identities};
use crate::terminal::output;

#[derive(clap::Args)]
pub struct Args {
    /// The checkpoint: podman's export file, a Kubernetes checkpoint file, an exported containerd checkpoint, a
    /// directory of CRIU images, oci:DIR[:NAME] or oci-archive:FILE.
    source: String,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
    /// Write one self-contained HTML page to this file: times, memory, processes, GPUs. `-` is standard output.
    #[arg(long, value_name = "FILE", conflicts_with = "json")]
    html: Option<String>,
    /// On the page: where the GPUs would go on this host, `auto` or OLD=NEW[,OLD=NEW...].
    #[arg(long, requires = "html")]
    map: Option<Wish>,
}

/// Runs `cryopod inspect`, and returns its exit code.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let place = ArchivePlace::parse(&args.source);
    // The driver and the host's files are out of the decoder's reach.
    let here = args.map.as_ref().map(|_| page::gpus::here());
    let identities = identities()?;
    let text = Decoding::of(place.path())?.run(|| {
        let report = report::of(&place.open(&identities)?)?;
        if args.html.is_some() {
            let places = match (&args.map, &here) {
                (Some(wish), Some(here)) => page::gpus::places(&report.gpu.gpus, here, wish)?,
                _ => Vec::new(),
            };
            return Ok(page::html(&report, &places).into_bytes());
        }
        if args.json {
            let mut text = serde_json::to_vec_pretty(&report)?;
            text.push(b'\n');
            return Ok(text);
        }
        Ok(table::text(&report).into_bytes())
    })?;
    match &args.html {
        Some(file) => output::write(file, &text)?,
        None => std::io::stdout().lock().write_all(&text)?,
    }
    Ok(ExitCode::SUCCESS)
}
