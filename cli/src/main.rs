//! `cryopod`: what a person asks of GPU container checkpoints. One subcommand a file.

mod check;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Checkpoint and restore of GPU containers.
#[derive(Parser)]
#[command(name = "cryopod", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Says what this host can do, and what is missing.
    Check(check::Args),
}

fn main() -> anyhow::Result<ExitCode> {
    match Cli::parse().command {
        Command::Check(args) => check::run(&args),
    }
}
