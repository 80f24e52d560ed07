//! What the wrapper costs: the same calls of an OCI runtime with and without cryopod-runtime in front,
//! taken in turns, medians and their ratio. Runs in the test bed; `make bench` starts it.

use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const WRAPPER: &str = "cryopod-runtime";

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("bench-runtime: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let usage = "usage: bench-runtime BUNDLE ROUNDS RUNTIME...";
    let bundle = args.next().ok_or(usage)?;
    let rounds: usize = args.next().ok_or(usage)?.parse()?;
    println!("| runtime | call | bare, ms | with cryopod, ms | ratio |\n|---|---|---|---|---|");
    for low in args {
        let bench = Bench {
            bundle: Path::new(&bundle),
            rounds,
            low: &low,
        };
        bench.state()?;
        bench.create_delete()?;
    }
    Ok(())
}

struct Bench<'a> {
    bundle: &'a Path,
    rounds: usize,
    low: &'a str,
}

impl Bench<'_> {
    fn call(&self, program: &str, args: &[&str]) -> Result<()> {
        let status = Command::new(program)
            .env("CRYOPOD_LOW_LEVEL_RUNTIME", self.low)
            .current_dir(self.bundle)
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .status()?;
        if status.success() {
            Ok(())
        } else {
            Err(format!("{program} {args:?}: {status}").into())
        }
    }

    fn state(&self) -> Result<()> {
        self.call(self.low, &["create", "bench"])?;
        let result = self.compare("state", |program| self.call(program, &["state", "bench"]));
        self.call(self.low, &["delete", "--force", "bench"])?;
        result
    }

    fn create_delete(&self) -> Result<()> {
        self.compare("create + delete", |program| {
            self.call(program, &["create", "bench"])?;
            self.call(program, &["delete", "--force", "bench"])
        })
    }

    fn compare(&self, name: &str, call: impl Fn(&str) -> Result<()>) -> Result<()> {
        let (mut bare, mut wrapped) = (Vec::new(), Vec::new());
        for round in 0..self.rounds + 3 {
            // In turns, and in changing order: what disturbs the machine disturbs both.
            let pair = [(self.low, &mut bare), (WRAPPER, &mut wrapped)];
            let order: Vec<_> = if round % 2 == 0 {
                pair.into_iter().collect()
            } else {
                pair.into_iter().rev().collect()
            };
            for (program, times) in order {
                let start = Instant::now();
                call(program)?;
                // The first rounds warm the caches.
                if round >= 3 {
                    times.push(start.elapsed());
                }
            }
        }
        let (bare, wrapped) = (median(&mut bare), median(&mut wrapped));
        let ms = |d: Duration| d.as_secs_f64() * 1e3;
        println!(
            "| {} | {name} | {:.2} | {:.2} | {:.3} |",
            self.low,
            ms(bare),
            ms(wrapped),
            ms(wrapped) / ms(bare)
        );
        Ok(())
    }
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort();
    times.get(times.len() / 2).copied().unwrap_or_default()
}
