//! `cryopod cache ls`: lists the checkpoints in the cache.

use std::process::ExitCode;

use cryopod_operations::config::Config;

use super::directory::Cache;
use crate::terminal::ui;

#[derive(clap::Args)]
pub struct Args {
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs `cryopod cache ls`, and returns its exit code.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let entries = Cache::open(&Config::load()?.cache)?.entries()?;
    if args.json {
        let entries = entries.iter().map(|e| {
            serde_json::json!({
                "digest": e.record.origin.digest.to_string(),
                "source": e.record.source,
                "bytes": e.record.bytes,
                "seconds_since_use": e.last_use.elapsed().unwrap_or_default().as_secs(),
            })
        });
        println!("{:#}", entries.collect::<serde_json::Value>());
        return Ok(ExitCode::SUCCESS);
    }
    for e in entries {
        println!(
            "{:12.12}  {:>10}  used {} ago  {}",
            e.record.origin.digest.hex(),
            ui::bytes(e.record.bytes),
            ui::age(e.last_use),
            ui::plain(&e.record.source)
        );
    }
    Ok(ExitCode::SUCCESS)
}
