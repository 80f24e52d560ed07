//! `cryopod cache`: the unpacked checkpoints from which containers are created on this host.

mod directory;
mod known;
mod ls;
mod prune;
mod pull;

use std::process::ExitCode;

#[derive(clap::Subcommand)]
pub enum Args {
    /// Lists the checkpoints in the cache.
    Ls(ls::Args),
    /// Removes checkpoints that no container is being created from.
    Prune(prune::Args),
    /// Brings an archive or a registry's image into the cache, unless it is there.
    Pull(pull::Args),
}

/// Runs `cryopod cache`, and returns its exit code.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    match args {
        Args::Ls(args) => ls::run(args),
        Args::Prune(args) => prune::run(args),
        Args::Pull(args) => pull::run(args),
    }
}
