//! Measures what the preload library allows: takes a process's GPU memory out, has the driver checkpoint and restore the
//! rest, and brings the memory back, three times.
//!
//! `LD_PRELOAD=libcryopod_preload.so ./gpujob 24 1024 0 &` and
//! `cargo run --release --package cryopod-cuda --example preload-copy -- PID THREADS GIB`, GIB at least what it has.
#![allow(
    clippy::unwrap_used,
    reason = "a measurement that fails should stop; the process goes on by itself, or waits with its memory"
)]

use cryopod_cuda::copy::{Copier, Way};
use cryopod_cuda::driver::{Driver, LibCuda, usual_libraries};
use cryopod_cuda::preload::{Library, size};
use cryopod_cuda::vram::memory::{Mapped, new_file};
use cryopod_preload_wire::Request;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);
const STOP: Request = Request::Stop {
    limit_ms: 60_000,
    hold_ms: 60_000,
};

fn main() {
    let numbers: Vec<u64> = std::env::args()
        .skip(1)
        .map(|n| n.parse().unwrap())
        .collect();
    let [pid, threads, gib] = numbers[..] else {
        eprintln!("preload-copy PID THREADS GIB");
        std::process::exit(64);
    };
    let (pid, threads) = (
        i32::try_from(pid).unwrap(),
        usize::try_from(threads).unwrap(),
    );
    let cuda = LibCuda::load_first(&usual_libraries()).unwrap();
    let copier = Copier::load(cuda.path()).unwrap();
    copier.prepare(0).unwrap();
    let library = Library::of(pid).unwrap();
    for _ in 0..3 {
        let file = new_file(gib << 30).unwrap();
        let mut map = Mapped::new(&file, gib << 30, true).unwrap();
        timed("host memory", || {
            map.populate_end(gib << 30, threads).unwrap()
        });
        let pieces = timed("gate and work", || library.ask(STOP, None, LIMIT).unwrap());
        let bytes = usize::try_from(size(&pieces).unwrap()).unwrap();
        println!("{} pieces, {} MiB", pieces.len(), bytes >> 20);
        let memory = &mut map.bytes_mut().unwrap()[..bytes];
        timed("copy out", || {
            copier
                .copy(pieces, memory, Way::Out(&|_| ()), threads)
                .unwrap()
        });
        timed("release", || {
            library.ask(Request::Release, None, LIMIT).unwrap()
        });
        timed("driver's checkpoint", || {
            cuda.lock(pid, 10_000).unwrap();
            cuda.checkpoint(pid).unwrap();
        });
        timed("driver's restore", || {
            cuda.restore(pid, &[]).unwrap();
            cuda.unlock(pid).unwrap();
        });
        let pieces = timed("allocate", || {
            library
                .ask(Request::Allocate { from: 0, bytes: 0 }, None, LIMIT)
                .unwrap()
        });
        timed("copy in", || {
            copier
                .copy(pieces, memory, Way::In(&|_| Ok(())), threads)
                .unwrap()
        });
        timed("go", || library.ask(Request::Go, None, LIMIT).unwrap());
        std::thread::sleep(Duration::from_secs(1));
    }
}

fn timed<T>(what: &str, work: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let done = work();
    println!("{what}: {:.3} s", start.elapsed().as_secs_f64());
    done
}
