//! `cryopod store prune`: removes entries from the stores.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use cryopod_archive::store::{Reference, remove};
use cryopod_operations::config::Config;
use cryopod_operations::images::store::clean;

use crate::terminal::ui;

#[derive(clap::Args)]
#[command(arg_required_else_help = true)]
pub struct Args {
    /// The entries to remove, as `cryopod store ls` shows them.
    #[arg(value_name = "ID")]
    ids: Vec<String>,
    /// Remove all entries that are older than so many days.
    #[arg(long, value_name = "DAYS", conflicts_with = "ids")]
    older_than: Option<u64>,
    /// Remove the entries that nothing refers to, of this host's own store. Checkpoints and a timer do the same.
    #[arg(long, conflicts_with_all = ["ids", "older_than", "store"])]
    unused: bool,
    /// A store beside those of the configuration.
    #[arg(long)]
    store: Vec<PathBuf>,
    /// Print only errors.
    #[arg(short, long)]
    quiet: bool,
}

/// Runs `cryopod store prune`, and returns its exit code.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.unused {
        let freed = clean(&Config::load()?)?.iter().map(Reference::bytes).sum();
        return Ok(said(args, freed));
    }
    let entries = super::entries(&args.store)?;
    let unknown = |id: &&String| !entries.iter().any(|e| e.reference.id == **id);
    if let Some(id) = args.ids.iter().find(unknown) {
        bail!("{id}: no store has such an entry");
    }
    let age = args
        .older_than
        .map(|days| Duration::from_secs(days.saturating_mul(24 * 3600)));
    let mut freed = 0;
    for entry in entries {
        let old = age.is_some_and(|age| entry.made.elapsed().unwrap_or_default() >= age);
        if old || args.ids.contains(&entry.reference.id) {
            remove(&entry)?;
            freed += entry.reference.bytes();
        }
    }
    Ok(said(args, freed))
}

fn said(args: &Args, freed: u64) -> ExitCode {
    if !args.quiet {
        println!("{} freed", ui::bytes(freed));
    }
    ExitCode::SUCCESS
}
