//! What the archive benchmark is made of.
//!
//! `bench-pages fill KIND DIRECTORY FILES MIB`: files 0, 1, ... of MIB each, with pages of a KIND: `noise`; `half`,
//! 256 KiB of noise and 256 KiB of numbers in text, by turns; `mixed`, half of each page noise and half zero.
//! `bench-pages hold DIRECTORY FILES`: a process for each file, with its content in memory, until it is ended. DIRECTORY/ready
//! appears when all are there.
#![allow(clippy::unwrap_used, reason = "a benchmark ends at the first error")]

use std::fs::{self, File};
use std::io::{BufWriter, Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["fill", kind, directory, files, mib] => {
            for n in 0..files.parse().unwrap() {
                fill(
                    kind,
                    &Path::new(directory).join(format!("{n}")),
                    n,
                    mib.parse().unwrap(),
                );
            }
        }
        ["hold", directory, files] => hold(Path::new(directory), files.parse().unwrap()),
        ["one", file] => one(Path::new(file)),
        _ => {
            eprintln!(
                "usage: bench-pages fill noise|half|mixed DIRECTORY FILES MIB, bench-pages hold DIRECTORY FILES"
            );
            std::process::exit(2);
        }
    }
}

struct Noise(u64);

impl Noise {
    fn put(&mut self, to: &mut [u8]) {
        for word in to.chunks_exact_mut(8) {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            word.copy_from_slice(&self.0.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes());
        }
    }
}

fn fill(kind: &str, path: &Path, seed: u64, mib: u64) {
    let mut out = BufWriter::with_capacity(1 << 20, File::create(path).unwrap());
    let mut noise = Noise(0x9e37_79b9_7f4a_7c15 ^ (seed << 32));
    let mut number = 1_000_000_000 * (seed + 1);
    let mut block = vec![0; 1 << 20];
    for _ in 0..mib {
        match kind {
            "noise" => noise.put(&mut block),
            "half" => {
                for part in block.chunks_mut(512 << 10) {
                    let (left, mut right) = part.split_at_mut(256 << 10);
                    noise.put(left);
                    while !right.is_empty() {
                        let text = format!("{number}\n");
                        let n = text.len().min(right.len());
                        right[..n].copy_from_slice(&text.as_bytes()[..n]);
                        right = &mut right[n..];
                        number += 1;
                    }
                }
            }
            "mixed" => {
                for page in block.chunks_mut(4096) {
                    noise.put(&mut page[..2048]);
                }
            }
            other => panic_kind(other),
        }
        out.write_all(&block).unwrap();
    }
    out.flush().unwrap();
}

fn panic_kind(kind: &str) {
    eprintln!("bench-pages: no kind {kind}");
    std::process::exit(2);
}

fn hold(directory: &Path, files: u64) {
    let me = std::env::current_exe().unwrap();
    let mut children = Vec::new();
    for n in 0..files {
        let mut child = Command::new(&me)
            .arg("one")
            .arg(directory.join(n.to_string()))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut byte = [0];
        child.stdout.take().unwrap().read_exact(&mut byte).unwrap();
        children.push(child);
    }
    fs::write(directory.join("ready"), "").unwrap();
    for child in &mut children {
        child.wait().unwrap();
    }
}

fn one(file: &Path) {
    let len = fs::metadata(file).unwrap().len();
    let mut content = Vec::with_capacity(usize::try_from(len).unwrap());
    File::open(file).unwrap().read_to_end(&mut content).unwrap();
    println!();
    std::io::stdout().flush().unwrap();
    loop {
        std::thread::sleep(Duration::from_secs(1000));
        std::hint::black_box(&content);
    }
}
