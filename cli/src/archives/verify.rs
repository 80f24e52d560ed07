//! `cryopod verify`: verifies that an archive is complete and undamaged.

use std::path::PathBuf;
use std::process::ExitCode;

use cryopod_archive::format::limits::raise_open_files;
use cryopod_archive::verify::{Verified, VerifyOptions, table, verify_with};
use cryopod_archive::vram::parent::WantedParent;

use crate::archives::confined::{Decoding, identities};
use crate::store::stores;
use crate::terminal::numbers;
use crate::terminal::ui;
use cryopod_archive::source::ArchivePlace;

#[derive(clap::Args)]
pub struct Args {
    /// The archive, as for `cryopod inspect`.
    source: String,
    /// A directory to search for parent checkpoints that have moved; may be given several times.
    #[arg(long)]
    parents: Vec<PathBuf>,
    /// A store to search for the large files before the configured ones; may be given several times.
    #[arg(long)]
    store: Vec<PathBuf>,
    /// Threads, up to 32; 0: one per core, at most 16.
    #[arg(long, default_value_t = 0, value_parser = numbers::threads)]
    threads: usize,
    /// Print only errors.
    #[arg(short, long)]
    quiet: bool,
}

/// Runs `cryopod verify`, and returns its exit code.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    raise_open_files();
    let place = ArchivePlace::parse(&args.source);
    let stores = stores(&args.store)?;
    let options = VerifyOptions {
        threads: args.threads,
        parents: args.parents.clone(),
        ..VerifyOptions::default()
    };
    let identities = identities()?;
    let mut decoding = Decoding::of(place.path())?;
    decoding.read.extend(args.parents.iter().cloned());
    decoding.read.extend(stores.iter().cloned());
    // Where it builds upon others, they are read, too.
    let table = decoding.run(|| {
        let source = place.open(&identities)?;
        let Some(table) = table(&source, &options.limits)? else {
            return Ok(Vec::new());
        };
        let wanted = WantedParent::of(&table, source.images_directory().as_deref());
        // A damaged table is verify's to report.
        let mut said = serde_json::to_vec(&wanted.ok().flatten())?;
        said.push(b'\n');
        said.extend(table);
        Ok(said)
    })?;
    let table = table.iter().position(|b| *b == b'\n').map(|end| {
        let wanted = serde_json::from_slice(&table[..end]).ok().flatten();
        decoding.add_parents(wanted, &[&args.parents[..], &stores].concat());
        table[end + 1..].to_vec()
    });
    let options = VerifyOptions { stores, ..options };
    let verifying = decoding.start(|| {
        let done = verify_with(&place.open(&identities)?, table, &options)?;
        Ok(said(&place, &done).into_bytes())
    })?;
    let said = ui::with_progress("verify", args.quiet, &options.progress, || {
        verifying.finish()
    })?;
    if !args.quiet {
        println!("{}", String::from_utf8_lossy(&said));
    }
    Ok(ExitCode::SUCCESS)
}

fn said(place: &ArchivePlace, done: &Verified) -> String {
    let mut parts = vec![format!("{} files", done.files), ui::bytes(done.bytes)];
    if done.layers > 0 {
        parts.push(format!("{} layers with their digests", done.layers));
    }
    if let Some(stored) = &done.stored {
        let entry = stored.entry.display();
        parts.push(format!("{} in the store's {entry}", stored.reference));
    }
    if done.chunks > 0 {
        parts.push(format!("{} chunks of GPU memory", done.chunks));
    }
    if let Some(metadata) = &done.metadata {
        parts.push(format!("cryopod.json {}", ui::plain(&metadata.schema)));
    }
    format!(
        "{}: whole: {}, {}",
        place.path().display(),
        done.kind,
        parts.join(", ")
    )
}
