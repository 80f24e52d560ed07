//! The workload: holds device memory and prints its checksum ten times a second, as gpujob.cu
//! does on a real GPU: `TICK SUM ok|CORRUPT SECONDS`. Runs on the real driver too.

use std::fs::File;
use std::io::{Read, stdout};
use std::os::fd::OwnedFd;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use clap::{Parser, ValueEnum};
use cuda_sim::abi::{CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, CuDevicePtr};
use cuda_sim::cuda::{CuError, Cuda};
use cuda_sim::noise;
use cuda_sim::ranks::{Rank, Team, Way};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use nix::sys::wait::wait;
use nix::unistd::{ForkResult, fork, pause, pipe, write};

/// What fills device memory.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Content {
    /// Pseudo-random words
    Random,
    /// Zeros
    Zero,
    /// Every other MiB random, the rest zeros
    Half,
}

/// Which context it uses.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum UsedContext {
    Primary,
    /// One of `cuCtxCreate`, without a version
    Plain,
    /// A green one, after another one that ends before memory that is allocated in it
    Green,
}

/// Holds device memory and checks it.
#[derive(Clone, Parser)]
struct Args {
    /// MiB of device memory on each GPU
    #[arg(long, default_value_t = 64)]
    mib: u64,
    /// MiB of one allocation
    #[arg(long, default_value_t = 64)]
    chunk_mib: u64,
    /// MiB more, in allocations that the preload library leaves to the driver
    #[arg(long, default_value_t = 0)]
    small_mib: u64,
    /// Ordinals of the GPUs to use, or all
    #[arg(long, value_delimiter = ',', default_value = "0")]
    gpus: Vec<String>,
    #[arg(long, value_enum, default_value = "random")]
    content: Content,
    #[arg(long, value_enum, default_value = "primary")]
    context: UsedContext,
    /// Work in this many processes; process i uses the i-th GPU of the list alone, round and round
    #[arg(long, default_value_t = 1)]
    procs: usize,
    /// Fork children that never use CUDA and keep what they inherit
    #[arg(long, default_value_t = 0)]
    fork_idle: usize,
    /// Allocate managed memory as well
    #[arg(long)]
    uvm: bool,
    /// Export an allocation to other processes; with several, the others import that of the first and sum it up
    #[arg(long)]
    ipc: bool,
    /// The processes are ranks that add up their sums as over NCCL; its variables choose the transport
    #[arg(long)]
    nccl: bool,
    /// Keep nvidiactl open outside of the driver, as NVML users do
    #[arg(long)]
    leak_fd: bool,
    /// Threads that call the driver all the time beside the main one
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Allocate and free a MiB at every tick
    #[arg(long)]
    churn: bool,
    /// Free memory at every tick in the ways that programs do beside a capture, and in the threads ask what is at an address
    #[arg(long)]
    frees: bool,
    /// Free all memory at every tick beside a capture, and allocate it again in two threads at once
    #[arg(long)]
    frees_late: bool,
    /// Fill the first so many MiB anew at every tick, as a training does with its parameters: the sum then tells the tick
    #[arg(long)]
    train_mib: Option<usize>,
    /// Take more memory, unfilled, until less than this many MiB are free on the last GPU
    #[arg(long)]
    leave_mib: Option<usize>,
    /// Milliseconds between ticks
    #[arg(long, default_value_t = 100)]
    interval_ms: u64,
    /// End after this many ticks
    #[arg(long)]
    ticks: Option<u64>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let way = match (args.nccl, args.ipc) {
        (true, _) => Some(Way::of_nccl()),
        (false, true) => Some(Way::Plain),
        (false, false) => None,
    };
    let mut team = way.map(|way| Team::new(way, args.procs)).transpose()?;
    if args.procs <= 1 {
        return run(&args, &args.gpus, "", None, team.map(|team| (team, 0)));
    }
    let (ready, filled) = pipe()?;
    for i in 0..args.procs {
        // SAFETY: this process has one thread.
        if let ForkResult::Child = unsafe { fork() }? {
            set_pdeathsig(Signal::SIGKILL)?;
            let gpu = args
                .gpus
                .get(i % args.gpus.len().max(1))
                .context("no GPU given")?;
            let others = Some((ready, filled));
            let team = team.take().map(|team| (team, i));
            return run(
                &args,
                std::slice::from_ref(gpu),
                &format!(" p{i}"),
                others,
                team,
            );
        }
    }
    drop((ready, filled, team));
    for _ in 0..args.procs {
        let status = wait()?;
        if !matches!(status, nix::sys::wait::WaitStatus::Exited(_, 0)) {
            bail!("a process ended: {status:?}");
        }
    }
    Ok(())
}

/// One process's work. It ticks when the `others` are ready, too: when nobody has the pipe open for writing.
fn run(
    args: &Args,
    gpus: &[String],
    label: &str,
    others: Option<(OwnedFd, OwnedFd)>,
    team: Option<(Team, usize)>,
) -> Result<()> {
    let cuda = Cuda::load(None)?;
    cuda.init().context("cuInit")?;
    let leaked = if args.leak_fd { Some(leak()?) } else { None };
    let gpus: Vec<i32> = if gpus == ["all"] {
        (0..cuda.device_count()?).collect()
    } else {
        gpus.iter()
            .map(|g| g.parse().with_context(|| format!("{g:?}")))
            .collect::<Result<_>>()?
    };
    let (mut chunks, mut expected) = (Vec::new(), 0u64);
    for gpu in &gpus {
        use_context(&cuda, *gpu, args.context).with_context(|| format!("GPU {gpu}"))?;
        for (at, mib) in pieces(args.mib, args.chunk_mib).chain(pieces(args.small_mib, 1)) {
            let bytes = usize::try_from(mib << 20)?;
            let p = cuda
                .alloc(bytes)
                .with_context(|| format!("{mib} MiB on GPU {gpu}"))?;
            expected = expected.wrapping_add(fill(&cuda, p, bytes, at, args.content)?);
            chunks.push((p, bytes));
        }
    }
    if let Some(leave) = args.leave_mib {
        while cuda.mem_info().context("free memory")?.0 >= (leave + 256) << 20 {
            cuda.alloc(256 << 20).context("the rest of the memory")?;
        }
    }
    if args.uvm {
        cuda.alloc_managed(1 << 20).context("managed memory")?;
    }
    if let Some((ready, filled)) = others {
        drop(filled);
        File::from(ready).read_to_end(&mut Vec::new())?;
    }
    let mut rank = None;
    if let Some((team, number)) = team {
        let [own] = chunks[..] else {
            bail!("a rank has one allocation: --mib must not be more than --chunk-mib");
        };
        rank = Some(Rank::new(team, number, label, cuda, own, expected)?);
    }
    for _ in 0..args.fork_idle {
        // SAFETY: the child only makes system calls until it is killed.
        if let ForkResult::Child = unsafe { fork() }? {
            set_pdeathsig(Signal::SIGKILL)?;
            loop {
                pause();
            }
        }
    }
    if args.frees {
        look_up(&cuda)?;
    }
    for _ in 0..args.threads {
        let first = gpus.first().copied().unwrap_or(0);
        let known = chunks.first().filter(|_| args.frees).map(|chunk| chunk.0);
        thread::spawn(move || {
            let _ = cuda.use_device(first);
            while cuda.mem_info().is_ok() {
                if let Some(Err(error)) = known.map(|p| cuda.memory_type(p)) {
                    eprintln!("Error: the first chunk: {error}");
                    std::process::exit(1);
                }
                thread::sleep(Duration::from_millis(1));
            }
        });
    }
    let mut next = Instant::now();
    for tick in 0.. {
        if args.ticks.is_some_and(|n| tick >= n) {
            break;
        }
        if let (Some(mib), Some((p, bytes))) = (args.train_mib.filter(|_| tick > 0), chunks.first())
        {
            let part = (mib << 20).min(*bytes);
            let old = cuda.sum(*p, part).context("sum")?;
            let new = fill(&cuda, *p, part, (1 << 30) + tick, Content::Random)?;
            expected = expected.wrapping_sub(old).wrapping_add(new);
        }
        let mut total = 0u64;
        for (p, bytes) in &chunks {
            total = total.wrapping_add(cuda.sum(*p, *bytes).context("sum")?);
        }
        if args.churn {
            cuda.free(cuda.alloc(1 << 20).context("alloc")?)
                .context("free")?;
        }
        if args.frees {
            free_in_all_ways(&cuda, gpus.last().copied().unwrap_or(0))?;
        }
        if args.frees_late {
            free_late(cuda, gpus.last().copied().unwrap_or(0))?;
        }
        let mut expected = expected;
        if let Some(rank) = &mut rank {
            (total, expected) = (rank.step()?, rank.expected);
        }
        let verdict = if total == expected { "ok" } else { "CORRUPT" };
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64();
        let line = format!("{tick} {total:016x} {verdict} {now:.3}{label}\n");
        write(stdout(), line.as_bytes())?;
        next = (next + Duration::from_millis(args.interval_ms)).max(Instant::now());
        thread::sleep(next - Instant::now());
    }
    drop(leaked);
    Ok(())
}

fn use_context(cuda: &Cuda, gpu: i32, context: UsedContext) -> Result<()> {
    match context {
        UsedContext::Primary => cuda.use_device(gpu)?,
        UsedContext::Plain => cuda.plain_context(gpu)?,
        UsedContext::Green => {
            let first = cuda.green_context(gpu)?;
            let memory = cuda.alloc(2 << 20)?;
            cuda.destroy_green_context(first)?;
            cuda.no_context()?;
            cuda.free(memory).context("free after the context's end")?;
            cuda.green_context(gpu)?;
        }
    }
    Ok(())
}

/// What the driver lacks is nowhere, also where a library stands in front of its functions.
fn look_up(cuda: &Cuda) -> Result<()> {
    let name = c"cuMulticastBindAddr_v2";
    match (cuda.symbol(name).is_null(), Cuda::symbol_anywhere(name)) {
        (true, Ok(_)) => bail!("{name:?} is not the driver's"),
        (true, Err(false)) => bail!("{name:?} is null without an error"),
        _ => Ok(()),
    }
}

/// Frees memory in a stream's order, and in another thread while this one captures. This one may not.
fn free_in_all_ways(cuda: &Cuda, gpu: i32) -> Result<()> {
    cuda.free_async(cuda.alloc(2 << 20).context("alloc")?)
        .context("free in a stream")?;
    let (others, own) = (cuda.alloc(2 << 20)?, cuda.alloc(2 << 20)?);
    let stream = cuda.capture().context("capture")?;
    let freed = thread::scope(|scope| {
        let free = || cuda.use_device(gpu).and_then(|()| cuda.free(others));
        scope.spawn(free).join()
    });
    let forbidden = cuda.free(own);
    cuda.end_capture(stream).context("the capture's end")?;
    match freed {
        Ok(freed) => freed.context("free beside a capture")?,
        Err(_) => bail!("a thread died"),
    }
    if forbidden != Err(CuError(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)) {
        bail!("free in a capture: {forbidden:?}");
    }
    cuda.free(own).context("free after a capture")
}

/// What is freed beside a capture is there for two threads that allocate after it.
fn free_late(cuda: Cuda, gpu: i32) -> Result<()> {
    let half = cuda.mem_info()?.0 / 2 / (2 << 20) * (2 << 20);
    let in_thread = |work: fn(Cuda, u64) -> Result<(), CuError>, on: u64| {
        thread::spawn(move || cuda.use_device(gpu).and_then(|()| work(cuda, on)))
    };
    let all = cuda.alloc(2 * half).context("all memory")?;
    let stream = cuda.capture().context("capture")?;
    let freed = in_thread(|cuda, all| cuda.free(all), all).join();
    cuda.end_capture(stream).context("the capture's end")?;
    let allocate = |cuda: Cuda, half| cuda.alloc(half as usize).and_then(|p| cuda.free(p));
    let threads = [(); 2].map(|()| in_thread(allocate, half as u64));
    for result in [freed].into_iter().chain(threads.map(|one| one.join())) {
        match result {
            Ok(done) => done.context("memory that was freed late")?,
            Err(_) => bail!("a thread died"),
        }
    }
    Ok(())
}

/// Opens the control node, as a library beside the driver would.
fn leak() -> Result<File> {
    let root = std::env::var("CUSIM_DEV_ROOT").unwrap_or_else(|_| "/dev".into());
    let path = format!("{root}/nvidiactl");
    File::options()
        .read(true)
        .write(true)
        .open(&path)
        .with_context(|| path)
}

/// Offsets and sizes, in MiB, of the allocations that make up `mib`.
fn pieces(mib: u64, chunk: u64) -> impl Iterator<Item = (u64, u64)> {
    let chunk = chunk.max(1);
    (0..mib.div_ceil(chunk)).map(move |i| (i * chunk, chunk.min(mib - i * chunk)))
}

/// Fills an allocation, and says what its checksum must be.
fn fill(cuda: &Cuda, p: CuDevicePtr, bytes: usize, seed: u64, content: Content) -> Result<u64> {
    const MIB: usize = 1 << 20;
    let mut total = 0u64;
    let mut block = vec![0u8; 8 * MIB];
    let mut at = 0usize;
    while at < bytes {
        let n = block.len().min(bytes - at);
        for (k, mib) in block[..n].chunks_mut(MIB).enumerate() {
            let number = at / MIB + k;
            let random = match content {
                Content::Random => true,
                Content::Zero => false,
                Content::Half => number.is_multiple_of(2),
            };
            let first = (at + k * MIB) as u64 / 8;
            for (i, word) in (first..).zip(mib.chunks_exact_mut(8)) {
                let w = if random { noise((seed << 20) + i) } else { 0 };
                word.copy_from_slice(&w.to_le_bytes());
                total = total.wrapping_add(w.wrapping_mul(i | 1));
            }
        }
        cuda.upload(p + at as u64, &block[..n]).context("upload")?;
        at += n;
    }
    Ok(total)
}
