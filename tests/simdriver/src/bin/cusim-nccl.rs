//! Ranks that work together over NCCL, as a training does: `TICK SUM ok|CORRUPT pRANK`. The library is found with
//! `dlopen` and `dlsym`, as vLLM finds it.

use std::ffi::{CStr, c_int, c_void};
use std::io::Write;
use std::mem::transmute;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use clap::Parser;
use cuda_sim::abi::CuDevicePtr;
use cuda_sim::cuda::Cuda;
use cuda_sim::ranks::Shared;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitStatus, wait};
use nix::unistd::{ForkResult, fork};

const REDUCE_SUM: c_int = 0;
const UINT64: c_int = 5;
const IN_PROGRESS: c_int = 7;

/// Ranks over NCCL.
#[derive(Clone, Parser)]
struct Args {
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// MiB of GPU memory of each rank
    #[arg(long, default_value_t = 4)]
    mib: usize,
    /// GPUs, taken in turn
    #[arg(long, default_value_t = 2)]
    gpus: usize,
    /// Also communicators of some of the ranks, which overlap, and a ring of sends and receives
    #[arg(long)]
    mixed: bool,
    /// Results are looked at only every so many ticks: ranks may be so far out of step
    #[arg(long, default_value_t = 1)]
    every: u64,
    /// Milliseconds that the last rank sleeps at every tick
    #[arg(long, default_value_t = 0)]
    slow_ms: u64,
    /// The last rank stops working at this tick while there is a file `nccl-stay` in `/dev/shm`
    #[arg(long)]
    stay_at: Option<u64>,
    /// Milliseconds between ticks
    #[arg(long, default_value_t = 20)]
    interval_ms: u64,
    /// Do this once: `window` registers a window, `novelty` asks for a function that nobody knows
    #[arg(long)]
    hinder: Option<String>,
}

/// `ncclUniqueId`
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

#[derive(Clone, Copy)]
struct Nccl(*mut c_void);

/// Calls a function of the library by name, with arguments that have its types.
macro_rules! call {
    ($nccl:expr, $name:literal $(, $argument:expr)*) => {{
        let function = $nccl.symbol($name)?;
        // SAFETY: a function of this type, and the arguments that it takes.
        let code = unsafe {
            let function: unsafe extern "C" fn($(cuda_sim::infer!($argument)),*) -> c_int = transmute(function);
            function($($argument),*)
        };
        match code {
            0 => Ok(()),
            code => Err(anyhow!("{}: NCCL's error {code}", $name.to_string_lossy())),
        }
    }};
}

impl Nccl {
    fn load() -> Result<Self> {
        // SAFETY: a C string.
        let handle = unsafe { libc::dlopen(c"libnccl.so.2".as_ptr(), libc::RTLD_NOW) };
        if handle.is_null() {
            bail!("no libnccl.so.2");
        }
        Ok(Self(handle))
    }

    fn symbol(self, name: &CStr) -> Result<*mut c_void> {
        // SAFETY: a live handle and a C string.
        let found = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        if found.is_null() {
            bail!("no {}", name.to_string_lossy());
        }
        Ok(found)
    }

    fn error(self, comm: usize) -> Result<c_int> {
        let mut error: c_int = 0;
        call!(self, c"ncclCommGetAsyncError", comm, &mut error)?;
        Ok(error)
    }

    fn check(self, comm: usize) -> Result<()> {
        match self.error(comm)? {
            0 => Ok(()),
            error => Err(anyhow!("NCCL's error {error}")),
        }
    }

    fn all_reduce(self, from: u64, to: u64, comm: usize) -> Result<()> {
        let (count, stream) = (2usize, 0usize);
        call!(
            self,
            c"ncclAllReduce",
            from,
            to,
            count,
            UINT64,
            REDUCE_SUM,
            comm,
            stream
        )
    }

    fn ring(self, from: u64, to: u64, next: c_int, last: c_int, comm: usize) -> Result<()> {
        let (count, stream) = (1usize, 0usize);
        call!(self, c"ncclGroupStart")?;
        call!(self, c"ncclSend", from, count, UINT64, next, comm, stream)?;
        call!(self, c"ncclRecv", to, count, UINT64, last, comm, stream)?;
        call!(self, c"ncclGroupEnd")
    }

    fn split(self, comm: usize, color: c_int, key: c_int) -> Result<usize> {
        let mut new = 0usize;
        type Split = unsafe extern "C" fn(usize, c_int, c_int, *mut usize, usize) -> c_int;
        let split = self.symbol(c"ncclCommSplit")?;
        // SAFETY: a function of this type; what it writes stays here until it has.
        let mut code = unsafe {
            let split: Split = transmute(split);
            split(comm, color, key, &mut new, 0)
        };
        while code == IN_PROGRESS {
            thread::sleep(Duration::from_micros(300));
            code = self.error(comm)?;
        }
        match code {
            0 => Ok(new),
            code => Err(anyhow!("ncclCommSplit: NCCL's error {code}")),
        }
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    // Memory that all ranks see: whether there is a unique id, and the id.
    let shared = Shared::map(1, None)?;
    let board = shared.words;
    for rank in 0..args.ranks {
        // SAFETY: this process has one thread.
        if let ForkResult::Child = unsafe { fork() }? {
            set_pdeathsig(Signal::SIGKILL)?;
            let done = work(&args, rank, board);
            if let Err(error) = &done {
                say(&format!("# Error p{rank}: {error:#}\n"));
            }
            return done;
        }
    }
    let mut failed = false;
    for _ in 0..args.ranks {
        failed |= !matches!(wait()?, WaitStatus::Exited(_, 0));
    }
    match failed {
        true => bail!("a rank has ended"),
        false => Ok(()),
    }
}

fn say(line: &str) {
    // One write for a line, as several processes write.
    let _ = std::io::stdout().write_all(line.as_bytes());
}

/// A place in GPU memory for a value and its tick, and for the result.
struct Exchange {
    comm: usize,
    from: CuDevicePtr,
    to: CuDevicePtr,
    /// Ranks of the whole job that take part.
    ranks: Vec<usize>,
}

fn value(rank: usize, tick: u64) -> u64 {
    (tick + 1)
        .wrapping_mul(0x9E37_79B9_7F4A_7C15)
        .rotate_left(rank as u32 * 7)
}

fn work(args: &Args, rank: usize, board: &[AtomicU64]) -> Result<()> {
    let cuda = Cuda::load(None)?;
    cuda.init().context("cuInit")?;
    cuda.use_device(i32::try_from(rank % args.gpus)?)?;
    let memory = cuda.alloc(args.mib << 20)?;
    let nccl = Nccl::load()?;
    let mut id = UniqueId([0; 128]);
    if rank == 0 {
        call!(nccl, c"ncclGetUniqueId", &mut id)?;
        for (word, bytes) in board[1..].iter().zip(id.0.chunks_exact(8)) {
            word.store(u64::from_le_bytes(bytes.try_into()?), SeqCst);
        }
        board[0].store(1, SeqCst);
    }
    while board[0].load(SeqCst) == 0 {
        thread::sleep(Duration::from_millis(1));
    }
    for (word, bytes) in board[1..].iter().zip(id.0.chunks_exact_mut(8)) {
        bytes.copy_from_slice(&word.load(SeqCst).to_le_bytes());
    }
    let (ranks, own) = (c_int::try_from(args.ranks)?, c_int::try_from(rank)?);
    let mut world = 0usize;
    call!(nccl, c"ncclCommInitRank", &mut world, ranks, id, own)?;
    let (mut registered, bytes) = (0usize, 4096usize);
    call!(
        nccl,
        c"ncclCommRegister",
        world,
        memory,
        bytes,
        &mut registered
    )?;
    let place = |n: u64| (memory + 64 * n, memory + 64 * n + 32);
    let exchange = |n: u64, comm: usize, ranks: Vec<usize>| Exchange {
        comm,
        from: place(n).0,
        to: place(n).1,
        ranks,
    };
    let mut all = vec![exchange(0, world, (0..args.ranks).collect())];
    if args.mixed {
        let pair = nccl.split(world, own / 2, own)?;
        let first = rank / 2 * 2;
        let ranks = first..(first + 2).min(args.ranks);
        all.push(exchange(1, pair, ranks.collect()));
        let inner = rank > 0;
        let others = nccl.split(world, if inner { 0 } else { -1 }, own)?;
        if inner {
            all.push(exchange(2, others, (1..args.ranks).collect()));
        }
    }
    match args.hinder.as_deref() {
        Some("window") => {
            let (mut window, flags): (usize, c_int) = (0, 0);
            call!(
                nccl,
                c"ncclCommWindowRegister",
                world,
                memory,
                bytes,
                &mut window,
                flags
            )?;
        }
        Some("novelty") => call!(nccl, c"ncclCommNovelty", world)?,
        Some(other) => bail!("{other}?"),
        None => {}
    }
    let root = std::env::var("CUSIM_DEV_ROOT").unwrap_or_else(|_| "/dev".into());
    let stay = std::path::Path::new(&root).join("shm/nccl-stay");
    let (next, last) = ((own + 1) % ranks, (own + ranks - 1) % ranks);
    let ring = place(3);
    for tick in 0.. {
        let is_last = rank + 1 == args.ranks;
        if is_last && args.slow_ms > 0 {
            thread::sleep(Duration::from_millis(args.slow_ms));
        }
        while is_last && args.stay_at == Some(tick) && stay.exists() {
            thread::sleep(Duration::from_millis(20));
        }
        let look = tick % args.every == 0;
        // What is not looked at yet is not overwritten.
        let place = 256 * (tick % args.every);
        for one in &all {
            let one = &Exchange {
                from: one.from + place,
                to: one.to + place,
                ranks: one.ranks.clone(),
                ..*one
            };
            upload(&cuda, one.from, [value(rank, tick), tick + 1])?;
            nccl.all_reduce(one.from, one.to, one.comm)?;
            if args.stay_at == Some(tick) {
                say(&format!("launched p{rank}\n"));
            }
            if args.every > 1 && !look {
                continue;
            }
            wait_for(nccl, &cuda, one, tick)?;
        }
        if args.mixed {
            upload(&cuda, ring.0, [value(rank, tick), 0])?;
            upload(&cuda, ring.1, [0, 0])?;
            nccl.ring(ring.0, ring.1, next, last, world)?;
            wait_for_word(nccl, &cuda, world, ring.1, 1)?;
            let got = download(&cuda, ring.1)?[0];
            if got != value(usize::try_from(last)?, tick) {
                say(&format!("{tick} {got:016x} CORRUPT p{rank}\n"));
            }
        }
        if look {
            let total = download(&cuda, all[0].to + place)?[0];
            say(&format!("{tick} {total:016x} ok p{rank}\n"));
        }
        thread::sleep(Duration::from_millis(args.interval_ms));
    }
    Ok(())
}

fn wait_for(nccl: Nccl, cuda: &Cuda, one: &Exchange, tick: u64) -> Result<()> {
    wait_for_word(nccl, cuda, one.comm, one.to, tick + 1)?;
    let total = download(cuda, one.to)?[0];
    let values = one.ranks.iter().map(|rank| value(*rank, tick));
    if total != values.fold(0, u64::wrapping_add) {
        say(&format!("{tick} {total:016x} CORRUPT\n"));
    }
    Ok(())
}

/// Waits until the second word of a result is this.
fn wait_for_word(nccl: Nccl, cuda: &Cuda, comm: usize, at: CuDevicePtr, word: u64) -> Result<()> {
    while download(cuda, at)?[1] != word {
        nccl.check(comm)?;
        thread::sleep(Duration::from_micros(300));
    }
    Ok(())
}

fn upload(cuda: &Cuda, to: CuDevicePtr, words: [u64; 2]) -> Result<()> {
    Ok(cuda.upload(to, &words.map(u64::to_le_bytes).concat())?)
}

fn download(cuda: &Cuda, from: CuDevicePtr) -> Result<[u64; 2]> {
    let mut bytes = [0; 16];
    cuda.download(&mut bytes, from)?;
    let word =
        |at: usize| Ok::<_, anyhow::Error>(u64::from_le_bytes(bytes[at..at + 8].try_into()?));
    Ok([word(0)?, word(8)?])
}
