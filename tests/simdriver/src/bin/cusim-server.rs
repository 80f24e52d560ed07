//! The device server of the simulated driver.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, anyhow};
use clap::Parser;
use cuda_sim::server::config::Config;
use cuda_sim::server::events::Events;
use cuda_sim::server::faults::{Fault, HELP};
use cuda_sim::server::tree;
use cuda_sim::server::{DEFAULT_SOCKET, Server};

/// Holds the GPUs of the simulated driver.
#[derive(Parser)]
#[command(after_help = HELP)]
struct Args {
    /// Driver socket; the control socket is this path with .ctl added
    #[arg(long, env = "CUSIM_SOCKET", default_value = DEFAULT_SOCKET)]
    socket: PathBuf,
    /// TOML file: driver, context_mib, `[[gpu]]` with uuid, name, memory_mib, minor, pci, mig
    #[arg(long)]
    config: Option<PathBuf>,
    /// Number of GPUs, where the file names none
    #[arg(long, default_value_t = 1)]
    gpus: u8,
    /// Memory of every GPU in MiB, over the file
    #[arg(long)]
    memory_mib: Option<u64>,
    /// Driver version, over the file
    #[arg(long)]
    driver: Option<String>,
    /// Append events here, one JSON object a line
    #[arg(long)]
    log: Option<PathBuf>,
    /// Write a tree like /proc here: driver/nvidia and devices
    #[arg(long)]
    proc_root: Option<PathBuf>,
    /// Make device nodes in this directory
    #[arg(long)]
    dev_root: Option<PathBuf>,
    /// A switch to set at the start, may be repeated
    #[arg(long = "set", value_name = "SWITCH")]
    faults: Vec<Fault>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let text = match &args.config {
        Some(p) => fs::read_to_string(p).with_context(|| format!("cannot read {}", p.display()))?,
        None => String::new(),
    };
    let mut config = Config::parse(&text, args.gpus)?;
    if let Some(driver) = args.driver {
        config.driver = driver;
    }
    if let Some(mib) = args.memory_mib {
        for g in &mut config.gpus {
            g.bytes = mib << 20;
        }
    }
    if let Some(root) = &args.proc_root {
        tree::write_proc(root, &config)
            .with_context(|| format!("cannot write {}", root.display()))?;
    }
    if let Some(root) = &args.dev_root {
        tree::write_dev(root, &config)
            .with_context(|| format!("cannot make nodes in {}", root.display()))?;
    }
    let events = Events::to(args.log.as_deref()).context("cannot open the event log")?;
    let server = Server::new(config, events);
    for fault in args.faults {
        server.world().faults.set(fault);
    }
    server.serve(&args.socket)?;
    Err(anyhow!("the driver socket was closed"))
}
