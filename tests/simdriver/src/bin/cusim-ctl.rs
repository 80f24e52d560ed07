//! Talks to the device server, and installs the simulated driver into a directory.

use std::path::PathBuf;

use anyhow::Result;
use clap::{Parser, Subcommand};
use cuda_sim::server::faults::HELP;
use cuda_sim::server::{DEFAULT_SOCKET, control};

/// Switches and state of the simulated driver.
#[derive(Parser)]
#[command(after_help = HELP)]
struct Args {
    /// Driver socket of the server
    #[arg(long, env = "CUSIM_SOCKET", default_value = DEFAULT_SOCKET)]
    socket: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Print GPUs, clients and switches as JSON
    Status,
    /// Set switches
    Set {
        #[arg(required = true)]
        switches: Vec<String>,
    },
    /// Unset a switch, or all
    Clear { name: Option<String> },
    /// Take memory away from a GPU, as another user of it would (0 gives it back)
    Reserve { uuid: String, bytes: u64 },
    /// Copy libcuda.so.1, the client and the tools into a directory, with a cusim.conf
    Install { directory: PathBuf },
}

fn main() -> Result<()> {
    let args = Args::parse();
    let lines = match args.command {
        Command::Status => vec!["status".to_owned()],
        Command::Set { switches } => switches.iter().map(|s| format!("set {s}")).collect(),
        Command::Clear { name } => vec![format!("clear {}", name.unwrap_or_default())],
        Command::Reserve { uuid, bytes } => vec![format!("reserve {uuid} {bytes}")],
        Command::Install { directory } => {
            for path in cuda_sim::install::install(&directory, &args.socket)? {
                println!("{}", path.display());
            }
            return Ok(());
        }
    };
    for line in lines {
        println!("{}", control::send(&args.socket, &line)?);
    }
    Ok(())
}
