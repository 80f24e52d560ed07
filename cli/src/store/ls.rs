//! `cryopod store ls`: lists the entries of the stores.

use std::path::PathBuf;
use std::process::ExitCode;

use crate::ui;

#[derive(clap::Args)]
pub struct Args {
    /// A store beside those of the configuration.
    #[arg(long)]
    store: Vec<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let entries = super::entries(&args.store)?;
    if args.json {
        let entries = entries.iter().map(|e| {
            serde_json::json!({
                "id": e.reference.id,
                "path": e.path,
                "container": e.reference.container,
                "created": e.reference.created,
                "bytes": e.reference.bytes(),
            })
        });
        println!("{:#}", entries.collect::<serde_json::Value>());
        return Ok(ExitCode::SUCCESS);
    }
    for e in entries {
        println!(
            "{}  {:>10}  {}  {:.12}",
            e.reference.id,
            ui::bytes(e.reference.bytes()),
            ui::plain(&e.reference.created),
            ui::plain(&e.reference.container)
        );
    }
    Ok(ExitCode::SUCCESS)
}
