//! `cryopod store`: the stores of this host, with the large files of checkpoints.

mod ls;
mod prune;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use cryopod_archive::store::{StoreEntry, list};
use cryopod_operations::config::Config;
use cryopod_operations::config::store::DEFAULT;

#[derive(clap::Subcommand)]
pub enum Args {
    /// Lists the entries of the stores.
    Ls(ls::Args),
    /// Removes entries. Their checkpoints cannot be restored any more.
    Prune(prune::Args),
}

/// Runs `cryopod store`, and returns its exit code.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    match args {
        Args::Ls(args) => ls::run(args),
        Args::Prune(args) => prune::run(args),
    }
}

/// Returns the given stores, then those of this host's configuration.
pub fn stores(named: &[PathBuf]) -> anyhow::Result<Vec<PathBuf>> {
    let configured = Config::load()?.store.directories();
    Ok(named.iter().cloned().chain(configured).collect())
}

/// The entries of the named stores and of those that are configured, the oldest of each store first.
fn entries(named: &[PathBuf]) -> anyhow::Result<Vec<StoreEntry>> {
    let mut entries = Vec::new();
    for store in stores(named)? {
        // The usual store is made by the first checkpoint that needs it.
        if store != Path::new(DEFAULT) || store.exists() {
            entries.extend(list(&store)?);
        }
    }
    Ok(entries)
}
