//! `bench-vram DIRECTORY [GIB]`: measures how fast VRAM files are written, verified and read back, from memory that is random, zero, and half of each.
#![allow(clippy::unwrap_used, reason = "a benchmark ends at the first error")]

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use cryopod_archive::vram::{Codec, MemorySource, ReadOptions, Vram, WriteOptions, write};

fn main() {
    let mut args = std::env::args().skip(1);
    let dir = args.next().unwrap_or_else(|| "/dev/shm".into());
    let gib: f64 = args.next().map_or(1.0, |n| n.parse().unwrap());
    let len = (gib * f64::from(1 << 30)) as usize;
    let dir = tempfile::tempdir_in(dir).unwrap();
    println!("{gib} GiB, GiB/s: data codec write verify read; stored");
    for (name, share) in [("random", 1.0), ("zero", 0.0), ("half", 0.5)] {
        let mut data = vec![0; len];
        let random = (len as f64 * share) as usize;
        fill(&mut data[..random]);
        for codec in [Codec::Auto, Codec::Lz4, Codec::Zstd] {
            one(dir.path(), name, &mut data, codec);
        }
    }
}

fn one(dir: &Path, name: &str, data: &mut [u8], codec: Codec) {
    let never = AtomicBool::new(false);
    let options = WriteOptions {
        codec,
        ..WriteOptions::default()
    };
    let gib = data.len() as f64 / f64::from(1 << 30);
    let timed = |work: &mut dyn FnMut()| {
        let start = Instant::now();
        work();
        gib / start.elapsed().as_secs_f64()
    };
    let mut stored = 0;
    let written = timed(&mut || {
        let source = [MemorySource {
            id: "a",
            bytes: data,
        }];
        let written = write(dir, &source, &options, None, &never).unwrap();
        stored = written.facts.stored_bytes;
    });
    let vram = Vram::open(dir, None).unwrap().unwrap();
    let verified = timed(&mut || vram.verify(options.threads, &never).unwrap());
    let options = ReadOptions::default();
    let read = timed(&mut || vram.read(0, data, &options, &never).unwrap());
    let share = stored as f64 / data.len() as f64;
    println!("{name:8} {codec:?} {written:8.2} {verified:8.2} {read:8.2}; {share:.3}");
}

/// Bytes that do not compress.
fn fill(to: &mut [u8]) {
    let mut x = 0x9e37_79b9_7f4a_7c15u64;
    for word in to.chunks_exact_mut(8) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        word.copy_from_slice(&x.to_le_bytes());
    }
}
