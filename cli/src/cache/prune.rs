//! `cryopod cache prune`: removes checkpoints from the cache.

use std::process::ExitCode;
use std::time::Duration;

use cryopod_operations::config::Config;

use super::directory::Cache;
use crate::terminal::ui;

#[derive(clap::Args)]
pub struct Args {
    /// Remove only what was not used for so many days.
    #[arg(long, value_name = "DAYS", default_value_t = 0)]
    unused_for: u64,
    /// Print only errors.
    #[arg(short, long)]
    quiet: bool,
}

/// Runs `cryopod cache prune`, and returns its exit code.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let cache = Cache::open(&Config::load()?.cache)?;
    cache.sweep(Duration::ZERO);
    let unused = Duration::from_secs(args.unused_for.saturating_mul(24 * 3600));
    let mut freed = 0;
    for entry in cache.entries()? {
        let long = entry.last_use.elapsed().unwrap_or_default() >= unused;
        if long && cache.remove(&entry.key) {
            freed += entry.record.bytes;
        }
    }
    if !args.quiet {
        println!("{} freed", ui::bytes(freed));
    }
    Ok(ExitCode::SUCCESS)
}
