//! The workload of the property test: threads change GPU memory at random, each with a model of it in host memory, and
//! compare the two before each change. A restore must bring both back from one moment. A line for each time that all
//! threads have found all of their memory as it should be: `TICK STEPS ok|CORRUPT SECONDS`.

use std::io::stdout;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use clap::Parser;
use cuda_sim::abi::CuDevicePtr;
use cuda_sim::cuda::Cuda;
use cuda_sim::noise;
use nix::unistd::write;

const MIB: usize = 1 << 20;
const STEPS: u64 = 20;

static CORRUPT: AtomicBool = AtomicBool::new(false);

#[derive(Clone, Parser)]
struct Args {
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Threads, which use the GPUs by turns
    #[arg(long, default_value_t = 3)]
    threads: u64,
    #[arg(long, value_delimiter = ',', default_value = "0")]
    gpus: Vec<i32>,
    /// MiB of device memory that a thread has at most
    #[arg(long, default_value_t = 40)]
    mib: usize,
}

struct Allocation {
    at: CuDevicePtr,
    /// What it must hold.
    model: Vec<u8>,
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(1);
        usize::try_from(noise(self.0) >> 1).unwrap_or(0) % n.max(1)
    }

    /// A range, at times all.
    fn range(&mut self, n: usize) -> std::ops::Range<usize> {
        let start = self.below(2) * self.below(n);
        start..start + 1 + self.below(n - start)
    }
}

struct Worker {
    cuda: Cuda,
    random: Random,
    most: usize,
    memory: Vec<Allocation>,
}

impl Worker {
    /// One change.
    fn step(&mut self) -> Result<()> {
        let held: usize = self.memory.iter().map(|a| a.model.len()).sum();
        let kind = self.random.below(10);
        if self.memory.is_empty() || kind < 3 && held < self.most {
            // Below and above the size from which cryopod copies memory.
            let most = (10 * MIB) >> (self.random.below(4) * 2);
            let bytes = 1 + self.random.below(most);
            let value = u8::try_from(self.random.below(256))?;
            let at = self.cuda.alloc(bytes).context("alloc")?;
            self.cuda.fill(at, value, bytes).context("fill")?;
            let model = vec![value; bytes];
            self.memory.push(Allocation { at, model });
            return Ok(());
        }
        let which = self.random.below(self.memory.len());
        self.compare(which)?;
        if kind < 4 {
            let freed = self.memory.swap_remove(which);
            return self.cuda.free(freed.at).context("free");
        }
        let Allocation { at, model } = &mut self.memory[which];
        let range = self.random.range(model.len());
        let to = *at + range.start as u64;
        if kind < 7 {
            let value = u8::try_from(self.random.below(256))?;
            self.cuda.fill(to, value, range.len()).context("fill")?;
            model[range].fill(value);
        } else {
            let first = self.random.below(usize::MAX) as u64;
            for (n, byte) in (first..).zip(&mut model[range.clone()]) {
                *byte = noise(n).to_le_bytes()[0];
            }
            self.cuda.upload(to, &model[range]).context("upload")?;
        }
        Ok(())
    }

    fn compare(&self, which: usize) -> Result<()> {
        let Allocation { at, model } = &self.memory[which];
        let mut found = vec![0; model.len()];
        self.cuda.download(&mut found, *at).context("download")?;
        if let Some(wrong) = (0..model.len()).find(|i| found[*i] != model[*i]) {
            CORRUPT.store(true, Ordering::Release);
            eprintln!("byte {wrong} of {} at {at:#x} is another", model.len());
        }
        Ok(())
    }

    fn work(mut self, ticks: &AtomicU64) -> Result<()> {
        loop {
            for _ in 0..STEPS {
                self.step()?;
                thread::sleep(Duration::from_millis(1));
            }
            (0..self.memory.len()).try_for_each(|which| self.compare(which))?;
            ticks.fetch_add(1, Ordering::AcqRel);
        }
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    let cuda = Cuda::load(None)?;
    cuda.init().context("cuInit")?;
    let ticks: Vec<AtomicU64> = (0..args.threads).map(|_| AtomicU64::new(0)).collect();
    thread::scope(|scope| {
        for ((n, ticks), gpu) in (1..).zip(&ticks).zip(args.gpus.iter().cycle()) {
            let random = Random(args.seed.wrapping_mul(n << 32));
            scope.spawn(move || {
                let worker = Worker {
                    cuda,
                    random,
                    most: args.mib * MIB,
                    memory: Vec::new(),
                };
                let used = cuda.use_device(*gpu).context("use_device");
                if let Err(error) = used.and_then(|()| worker.work(ticks)) {
                    eprintln!("Error: {error:#}");
                    std::process::exit(1);
                }
            });
        }
        for tick in 0.. {
            while ticks.iter().any(|n| n.load(Ordering::Acquire) <= tick) {
                thread::sleep(Duration::from_millis(5));
            }
            let verdict = match CORRUPT.load(Ordering::Acquire) {
                true => "CORRUPT",
                false => "ok",
            };
            let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64();
            let line = format!("{tick} {} {verdict} {now:.3}\n", tick * STEPS);
            write(stdout(), line.as_bytes())?;
        }
        bail!("no tick is left")
    })
}
