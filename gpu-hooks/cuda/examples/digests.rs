//! Compares digests that a GPU makes with those of the blake3 crate, and measures how fast it makes them:
//! `digests LIBCUDA [GIB]`. `make gpu-test` runs it; with the simulated driver it tests all but the kernels.

use cryopod_cuda::copy::Copier;
use std::process::ExitCode;
use std::time::Instant;

/// Sizes at which BLAKE3's tree changes its form, up to the largest chunk.
fn sizes() -> Vec<usize> {
    let edges = [
        64,
        1 << 10,
        2 << 10,
        3 << 10,
        1 << 20,
        2 << 20,
        3 << 20,
        5 << 20,
    ];
    let around = edges.into_iter().flat_map(|n: usize| [n - 1, n, n + 1]);
    let odd = [1, 31, 100_003, 999_999, 7_654_321, 64 << 20];
    odd.into_iter().chain(around).collect()
}

fn bytes(len: usize) -> Vec<u8> {
    let mut state = len as u64;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 56) as u8
    };
    (0..len).map(|_| next()).collect()
}

fn run() -> Result<bool, Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let library = arguments.next().ok_or("digests LIBCUDA [GIB]")?;
    let gib: u64 = arguments.next().map_or(Ok(0), |gib| gib.parse())?;
    cryopod_cuda::driver::LibCuda::load_first(&[library.clone().into()]).map_err(|e| e.cause)?;
    let copier = Copier::load(library.as_ref()).map_err(|e| e.cause)?;
    let mut wrong = 0;
    for size in sizes() {
        let bytes = bytes(size);
        let digest = copier.digest_of(0, &bytes).map_err(|e| e.message)?;
        if blake3::hash(&bytes).as_bytes() != &digest {
            println!("{size} bytes: another digest");
            wrong += 1;
        }
    }
    println!("{} sizes, {wrong} wrong", sizes().len());
    for round in 0..3 {
        let from = Instant::now();
        let chunks = copier
            .hash_fresh(0, gib << 30, 1 << 20)
            .map_err(|e| e.message)?;
        let seconds = from.elapsed().as_secs_f64();
        let rate = (gib << 30) as f64 / 1e9 / seconds;
        println!("round {round}: {chunks} chunks of {gib} GiB in {seconds:.4} s, {rate:.0} GB/s");
    }
    Ok(wrong == 0)
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("digests: {error}");
            ExitCode::FAILURE
        }
    }
}
