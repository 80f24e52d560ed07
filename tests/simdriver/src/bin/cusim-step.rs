//! Does steps of the checkpoint API to a process, by hand: a `cuda-checkpoint` of our own, for
//! experiments and shell tests. Works with the real driver too.

use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::Parser;
use cuda_sim::cuda::{CuOutcome, Cuda};
use cuda_sim::uuid::GpuUuid;

/// Steps: tid, state, lock, checkpoint, restore, unlock; done in the order given
#[derive(Parser)]
struct Args {
    pid: i32,
    #[arg(required = true)]
    steps: Vec<String>,
    /// Milliseconds that a lock may take, 0 for no limit
    #[arg(long, default_value_t = 10_000)]
    timeout_ms: u32,
    /// GPU map for a restore: OLD=NEW,... of UUIDs, or `swap` for every GPU onto the next
    #[arg(long)]
    map: Option<String>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let cuda = Cuda::load(None)?;
    cuda.init().context("cuInit")?;
    let pairs = pairs(&cuda, args.map.as_deref())?;
    for step in &args.steps {
        let start = Instant::now();
        let done: CuOutcome<String> = match step.as_str() {
            "tid" => cuda.restore_thread(args.pid).map(|t| t.to_string()),
            "state" => cuda.state(args.pid).map(|s| match s {
                0 => "running".into(),
                1 => "locked".into(),
                2 => "checkpointed".into(),
                3 => "failed".into(),
                n => format!("{n}"),
            }),
            "lock" => cuda.lock(args.pid, args.timeout_ms).map(|()| String::new()),
            "checkpoint" => cuda.checkpoint(args.pid).map(|()| String::new()),
            "restore" => cuda.restore(args.pid, &pairs).map(|()| String::new()),
            "unlock" => cuda.unlock(args.pid).map(|()| String::new()),
            _ => bail!("no such step: {step}"),
        };
        match done {
            Ok(text) => println!("{step} {:.3} {text}", start.elapsed().as_secs_f64()),
            Err(e) => bail!("{step}: {e} after {:.3} s", start.elapsed().as_secs_f64()),
        }
    }
    Ok(())
}

/// The GPU map.
fn pairs(cuda: &Cuda, map: Option<&str>) -> Result<Vec<(GpuUuid, GpuUuid)>> {
    match map {
        None => Ok(Vec::new()),
        Some("swap") => {
            let n = cuda.device_count()?;
            (0..n)
                .map(|i| Ok((cuda.uuid(i)?, cuda.uuid((i + 1) % n)?)))
                .collect()
        }
        Some(list) => list
            .split(',')
            .map(|pair| {
                let (old, new) = pair.split_once('=').context("a pair is OLD=NEW")?;
                let read = |s: &str| s.parse::<GpuUuid>();
                Ok((read(old)?, read(new)?))
            })
            .collect(),
    }
}
