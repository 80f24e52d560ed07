//! `cryopod store ls`: lists the entries of the stores.

use std::path::PathBuf;
use std::process::ExitCode;

use cryopod_archive::format::names;
use cryopod_archive::store::{Holders, StoreEntry};
use cryopod_operations::config::Config;
use cryopod_operations::images::store::places;

use crate::terminal::ui;

#[derive(clap::Args)]
pub struct Args {
    /// A store beside those of the configuration.
    #[arg(long)]
    store: Vec<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs `cryopod store ls`, and returns its exit code.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let entries = super::entries(&args.store)?;
    let places = places(&Config::load()?);
    // Where a place cannot be searched, the entry may be needed there.
    let holders = places
        .map_err(anyhow::Error::msg)
        .and_then(|places| Ok(Holders::find(&entries, &places)?));
    let holders = holders.unwrap_or_else(|e| {
        eprintln!("warning: who needs the entries is not known: {e:#}");
        Holders::default()
    });
    if args.json {
        let entries = entries.iter().map(|e| {
            serde_json::json!({
                "id": e.reference.id,
                "path": e.path,
                "container": e.reference.container,
                "created": e.reference.created,
                "bytes": e.reference.bytes(),
                "held_by": holders.of(e).map(|h| &h.path).collect::<Vec<_>>(),
                "kept": kept(e),
            })
        });
        println!("{:#}", entries.collect::<serde_json::Value>());
        return Ok(ExitCode::SUCCESS);
    }
    for e in &entries {
        let mut held: Vec<String> = holders
            .of(e)
            .map(|h| match h.path.join(names::ONLY_COPY).exists() {
                true => format!("{} (its container's only checkpoint)", h.path.display()),
                false => h.path.display().to_string(),
            })
            .collect();
        if held.is_empty() {
            held.push(kept(e).unwrap_or("nothing refers to it").into());
        }
        println!(
            "{}  {:>10}  {}  {:.12}  {}",
            e.reference.id,
            ui::bytes(e.reference.bytes()),
            ui::plain(&e.reference.created),
            ui::plain(&e.reference.container),
            ui::plain(&held.join(", "))
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Why an entry is never removed by itself.
fn kept(entry: &StoreEntry) -> Option<&'static str> {
    match &entry.origin {
        None => Some("kept until it is pruned: its engine does not say where the checkpoint is"),
        Some(origin) if origin.elsewhere => Some(
            "kept until it is pruned: the checkpoint is in a directory that store.used_in does not name",
        ),
        Some(_) => None,
    }
}
