//! `cryopod store`: the stores of this host, with the large files of checkpoints.

mod ls;
mod prune;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::bail;
use cryopod_archive::store::{Entry, list};
use cryopod_operations::config::Config;

#[derive(clap::Subcommand)]
pub enum Args {
    /// Lists the entries of the stores.
    Ls(ls::Args),
    /// Removes entries. Their checkpoints cannot be restored any more.
    Prune(prune::Args),
}

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
fn entries(named: &[PathBuf]) -> anyhow::Result<Vec<Entry>> {
    let stores = stores(named)?;
    if stores.is_empty() {
        bail!("no store is configured; name one with --store, or in [store] of the configuration");
    }
    let mut entries = Vec::new();
    for store in stores {
        entries.extend(list(&store)?);
    }
    Ok(entries)
}
