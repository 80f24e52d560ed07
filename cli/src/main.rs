//! `cryopod`: the command line for GPU container checkpoints. Each subcommand has a file.

// The comments on arguments are the command's help, where `[:NAME]` is no link.
#![allow(rustdoc::broken_intra_doc_links)]

mod bundle;
mod cache;
mod check;
mod container;
mod engine;
mod export;
mod flatten;
mod generate;
mod import;
mod inspect;
mod output;
mod pack;
mod pull;
mod push;
mod resume;
mod store;
mod suspend;
mod temp_dir;
mod ui;
mod unpack;
mod verify;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use cryopod_archive::text::printable;

/// Checkpoints and restores GPU containers.
#[derive(Parser)]
#[command(name = "cryopod", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Shows what this host can do and what is missing, or whether a checkpoint would restore here.
    Check(check::Args),
    /// Packs a checkpoint into an archive.
    Pack(pack::Args),
    /// Unpacks an archive into a directory.
    Unpack(unpack::Args),
    /// Reads a whole archive and verifies it.
    Verify(verify::Args),
    /// Makes a self-contained archive of a checkpoint whose large files are in a store.
    Bundle(bundle::Args),
    /// Makes a checkpoint self-contained whose GPU memory builds on earlier ones.
    Flatten(flatten::Args),
    /// Shows what a checkpoint holds.
    Inspect(inspect::Args),
    /// Checkpoints a container through its engine, and makes an archive of it.
    Export(export::Args),
    /// Moves a container's GPU memory to host memory or into files, and leaves it there.
    Suspend(suspend::Args),
    /// Moves a suspended container's GPU memory back to its GPUs.
    Resume(resume::Args),
    /// Hands an archive to an engine.
    Import(import::Args),
    /// The unpacked checkpoints from which containers are created on this host.
    #[command(subcommand)]
    Cache(cache::Args),
    /// The stores of this host, with the large files of checkpoints.
    #[command(subcommand)]
    Store(store::Args),
    /// Pushes an image to a registry.
    Push(push::Args),
    /// Pulls an image from a registry.
    Pull(pull::Args),
    /// Writes man pages and completions.
    #[command(hide = true)]
    Generate(generate::Args),
}

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(error) => {
            // The message may hold names from archives and containers.
            eprintln!("Error: {}", printable(&one_line(&error)));
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<ExitCode> {
    let filter = tracing_subscriber::EnvFilter::try_from_env("CRYOPOD_LOG").unwrap_or_else(|_| {
        tracing_subscriber::EnvFilter::new("cryopod=warn,cryopod_registry=warn")
    });
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .without_time()
        .init();
    match Cli::parse().command {
        Command::Check(args) => check::run(&args),
        Command::Pack(args) => pack::run(&args),
        Command::Unpack(args) => unpack::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Bundle(args) => bundle::run(&args),
        Command::Flatten(args) => flatten::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Export(args) => export::run(&args),
        Command::Suspend(args) => suspend::run(&args),
        Command::Resume(args) => resume::run(&args),
        Command::Import(args) => import::run(&args),
        Command::Cache(args) => cache::run(&args),
        Command::Store(args) => store::run(&args),
        Command::Push(args) => push::run(&args),
        Command::Pull(args) => pull::run(&args),
        Command::Generate(args) => generate::run(&args),
    }
}

/// Joins an error with its causes. A cause that the text names already is left out.
fn one_line(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::one_line;

    #[test]
    fn a_cause_is_named_once() {
        let cause = std::io::Error::other("disk full");
        let error = anyhow!(cause).context("a: cannot be written: disk full");
        assert_eq!(one_line(&error), "a: cannot be written: disk full");
        assert_eq!(
            one_line(&error.context("pack")),
            "pack: a: cannot be written: disk full"
        );
    }
}
