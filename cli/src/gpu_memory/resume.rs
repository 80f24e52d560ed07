//! `cryopod resume`: gives a suspended container its GPU memory back.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, bail};
use cryopod_archive::metadata::Gpu;
use cryopod_archive::vram::{ChunkDigest, Vram};
use cryopod_cuda::gpus::gpu::GpuPair;
use cryopod_cuda::procfs;
use cryopod_cuda::suspend::{How, SuspendError, Suspended, resume, resumed_beside};
use cryopod_gpu_plan::gpus::inventory;
use cryopod_gpu_plan::live;
use cryopod_gpu_plan::mapping::gpumap::{self, Choice, Situation, Wish};
use cryopod_host::files::Host;
use cryopod_host::nodes::Vendor;
use cryopod_operations::config::Config;
use cryopod_operations::pause::suspended::{SuspendLock, SuspendedRecord};

use crate::engines::container::Container;
use crate::gpu_memory::suspend::{RunningContainer, StartedWork, locked, steps};
use crate::terminal::ui;

#[derive(clap::Args)]
pub struct Args {
    /// The container, as for `cryopod suspend`.
    container: String,
    /// Use other GPUs: OLD=NEW[,OLD=NEW...], each side a UUID, a PCI address, a node or an index. The container must
    /// have their nodes.
    #[arg(long)]
    map: Option<Wish>,
    /// Suspend this container first. Together they take less time, for two that take turns.
    #[arg(long, value_name = "CONTAINER")]
    instead_of: Option<String>,
    /// Print only errors.
    #[arg(short, long)]
    quiet: bool,
}

/// Runs the subcommand. After an error the container stays suspended, unless the message says that it runs.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let host = Host::system();
    let config = Config::load()?;
    let work = StartedWork::new(&config, &host);
    let FoundContainer {
        record,
        processes,
        map,
        other,
        _lock,
    } = found(args, &host, &config)?;
    // Once nobody else suspends or resumes them: what the agent is told of memory stays true.
    let mut work = work?.begin(&config)?;
    let directory = record.as_ref().and_then(|record| record.directory.clone());
    let mut how: How = work.how(&config, directory)?;
    how.vram.digest = record.as_ref().and_then(|record| record.digest.clone());
    let mut client = work.connect()?;
    if let Some(other) = other {
        // What is in files is read first.
        let meanwhile = match &how.directory {
            Some(_) => Vec::new(),
            None => resumed_beside(&processes, &map, &work.agent.ready.gpus),
        };
        let said;
        (said, work, client) =
            other.suspend(&host, &config, work, client, None, Some(meanwhile))?;
        if !args.quiet {
            print!("{said}");
        }
    }
    let started = Instant::now();
    let done = resume(&mut client, &processes, &map, &how);
    drop(client);
    match done {
        Ok(_) => work.leave(),
        Err(_) => work.end(),
    }
    let done = match (done, &record) {
        (Ok(done), _) => done,
        // Another tool has resumed it, or a suspend was interrupted.
        (Err(error @ SuspendError::Running), Some(record)) => {
            forget(record);
            bail!("{}: not resumed: {error}", args.container);
        }
        (Err(error @ SuspendError::Nccl(_)), record) => {
            record.as_ref().inspect(|record| forget(record));
            bail!(
                "{}: resumed, and its GPU memory is back, but {error}",
                args.container
            );
        }
        (Err(error), Some(record)) => bail!(
            "{}: not resumed; it stays suspended, with its GPU memory {}: {error}",
            args.container,
            record.place()
        ),
        (Err(error), None) => bail!("{}: not resumed: {error}", args.container),
    };
    if let Some(record) = record {
        forget(&record);
    }
    if !args.quiet {
        println!(
            "{}: resumed in {:.2} s ({})",
            args.container,
            started.elapsed().as_secs_f64(),
            steps(&done)
        );
        if done.kept > 0 {
            println!(
                "{} of host memory keep the copy for the next suspend",
                ui::bytes(done.kept)
            );
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn forget(record: &SuspendedRecord) {
    record.remove();
    if let Some(directory) = &record.directory {
        cryopod_archive::vram::remove(directory);
        let _ = std::fs::remove_dir(directory);
    }
}

fn unknown(pid: i32) -> Suspended {
    Suspended {
        pid,
        start_time: procfs::stat(pid).map_or(0, |stat| stat.start_time),
        comm: procfs::comm(pid),
        gpus: Vec::new(),
        buffers: Vec::new(),
    }
}

fn whole(record: &SuspendedRecord) -> anyhow::Result<()> {
    let Some(directory) = &record.directory else {
        return Ok(());
    };
    let digest = record.digest.as_deref().map(str::parse::<ChunkDigest>);
    let digest = digest.transpose().map_err(anyhow::Error::msg)?;
    let why = match Vram::open(directory, digest) {
        Ok(Some(_)) => return Ok(()),
        Ok(None) => "the files are missing".to_owned(),
        Err(error) => error.to_string(),
    };
    bail!(
        "{}: the GPU memory of {} is not whole there, and without it the container cannot go on: put the files back, or remove the container: {why}",
        directory.display(),
        record.name
    )
}

struct FoundContainer {
    record: Option<SuspendedRecord>,
    processes: Vec<Suspended>,
    map: Vec<GpuPair>,
    /// That is to be suspended first.
    other: Option<RunningContainer>,
    _lock: SuspendLock,
}

/// Finds the containers, and checks what can be checked without the driver.
fn found(args: &Args, host: &Host, config: &Config) -> anyhow::Result<FoundContainer> {
    let names: Vec<&str> = std::iter::once(&args.container)
        .chain(&args.instead_of)
        .map(String::as_str)
        .collect();
    let mut all = Container::find_all(host, &names).into_iter();
    let container = all.next().context("it was not looked for")??;
    let (record, lock) = locked(host, &container, &args.container)?;
    container.is_unpaused(host, &args.container)?;
    if let Some(record) = &record {
        whole(record)?;
    }
    let processes = match &record {
        Some(record) => record.processes.clone(),
        // Another tool suspended it, or the record is gone.
        None => container.processes(host).into_iter().map(unknown).collect(),
    };
    let map = map(args, host, &container, &processes)?;
    if args.instead_of.is_some() && record.is_none() {
        bail!("{}: it is not suspended by cryopod", args.container);
    }
    let other = args.instead_of.as_deref().zip(all.next());
    let other = other.map(|(name, other)| {
        let other = other?;
        if other.init == container.init {
            bail!("{name}: it is suspended already, and cannot give way to itself");
        }
        RunningContainer::of(host, config, other, name)
    });
    Ok(FoundContainer {
        record,
        processes,
        map,
        other: other.transpose()?,
        _lock: lock,
    })
}

/// Builds the driver's map; empty if all GPUs stay.
fn map(
    args: &Args,
    host: &Host,
    container: &Container,
    processes: &[Suspended],
) -> anyhow::Result<Vec<GpuPair>> {
    let Some(wish) = &args.map else {
        return Ok(Vec::new());
    };
    let here = inventory::here(host, Vendor::Nvidia);
    let had: BTreeSet<String> = processes
        .iter()
        .flat_map(|p| &p.gpus)
        .map(ToString::to_string)
        .collect();
    // If its GPUs are unknown, use all: the driver accepts a map with more GPUs.
    let recorded: Vec<Gpu> = here
        .iter()
        .filter(|gpu| had.is_empty() || had.contains(&gpu.id))
        .cloned()
        .collect();
    let situation = Situation {
        recorded,
        here,
        wished_by: "--map",
        ..Situation::default()
    };
    let told = |refusals: Vec<cryopod_gpu_plan::refusal::Refusal>| {
        let words: Vec<_> = refusals
            .iter()
            .map(|r| format!("{}; {}", r.what, r.remedy))
            .collect();
        anyhow::anyhow!("{}: {}", args.container, words.join(" | "))
    };
    // If a GPU is not named and its place is taken, it changes places.
    let chosen = gpumap::decide(&situation, wish)
        .or_else(|refusals| gpumap::decide(&situation, &swapped(wish)).map_err(|_| refusals))
        .map_err(told)?;
    let nodes = live::nodes(host, container.init);
    for Choice { new, .. } in chosen.iter().filter(|choice| choice.moved()) {
        let path = format!("/dev/nvidia{}", new.minor.unwrap_or(u64::from(new.index)));
        if !nodes.iter().any(|node| node.path == path) {
            bail!(
                "{}: the container has no {path}, the node of {}; give it that GPU when it is started, or resume it without --map, checkpoint it and restore it with a map",
                args.container,
                new.id
            );
        }
    }
    gpumap::driver_map(&chosen).map_err(told)
}

/// Adds the reverse of each pair.
fn swapped(wish: &Wish) -> Wish {
    let Wish::Pairs(pairs) = wish else {
        return wish.clone();
    };
    let back = pairs
        .iter()
        .filter(|(_, new)| !pairs.iter().any(|(old, _)| old == new))
        .map(|(old, new)| (new.clone(), old.clone()));
    Wish::Pairs(pairs.iter().cloned().chain(back).collect())
}
