//! `cryopod unpack`: unpacks an archive into a directory.

use std::path::PathBuf;
use std::process::ExitCode;

use cryopod_archive::unpack::UnpackOptions;

use crate::terminal::numbers;
use crate::{archives::confined, terminal::ui};
use cryopod_archive::source::ArchivePlace;

#[derive(clap::Args)]
pub struct Args {
    /// The archive, as for `cryopod inspect`.
    source: String,
    /// A directory that does not exist yet, or is empty.
    #[arg(short, long)]
    output: PathBuf,
    /// Only CRIU's images, directly in the directory, as a runtime's --image-path wants them.
    #[arg(long)]
    images_only: bool,
    /// Threads, up to 32; 0: one per core, at most 16.
    #[arg(long, default_value_t = 0, value_parser = numbers::threads)]
    threads: usize,
    /// Print nothing while it runs.
    #[arg(short, long)]
    quiet: bool,
}

/// Runs `cryopod unpack`, and returns its exit code.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let source = ArchivePlace::parse(&args.source).open(&confined::identities()?)?;
    let options = UnpackOptions {
        images_only: args.images_only,
        threads: args.threads,
        ..UnpackOptions::default()
    };
    let done = confined::unpack(args.quiet, &source, &args.output, &options)?;
    if !args.quiet {
        println!(
            "{}: {} files, {}",
            args.output.display(),
            done.files,
            ui::bytes(done.bytes)
        );
    }
    Ok(ExitCode::SUCCESS)
}
