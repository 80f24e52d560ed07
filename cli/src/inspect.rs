//! `cryopod inspect`: shows what a checkpoint holds.

mod page;
mod report;
mod table;

use std::io::Write;
use std::process::ExitCode;

use cryopod_archive::source::Place;
use cryopod_gpu_plan::gpumap::Wish;

use crate::output;

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

pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let source = Place::parse(&args.source).open()?;
    let report = report::of(&source)?;
    if let Some(file) = &args.html {
        let places = match &args.map {
            Some(wish) => page::gpus::places(&report.gpu.gpus, wish)?,
            None => Vec::new(),
        };
        output::write(file, page::html(&report, &places).as_bytes())?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &report)?;
        writeln!(out)?;
    } else {
        out.write_all(table::text(&report).as_bytes())?;
    }
    Ok(ExitCode::SUCCESS)
}
