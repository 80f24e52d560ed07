//! GPU memory of a process with `libcryopod_preload.so`, taken out and brought back by what the driver agent uses.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that fails should stop"
)]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::Machine;
use cryopod_cuda::copy::{Copier, Imported, Way};
use cryopod_cuda::preload::{Library, size};
use cryopod_preload_wire::{FILLED as HAS_CONTENTS, Request, UNFILLED};
use cuda_sim::cuda::Cuda;

const LIMIT: Duration = Duration::from_secs(60);
const STOP: Request = Request::Stop {
    limit_ms: 50_000,
    hold_ms: 120_000,
};

/// Takes the memory out; the contents.
fn take_out(copier: &Arc<Copier>, library: &Library) -> Vec<u8> {
    hold(copier, library).0
}

/// The same, and the pieces, which stay on the GPU.
fn hold(copier: &Arc<Copier>, library: &Library) -> (Vec<u8>, Vec<Imported>) {
    let pieces = library.ask(STOP, None, LIMIT).unwrap();
    let bytes = size(&pieces).unwrap();
    let mut memory = vec![0; usize::try_from(bytes).unwrap()];
    let pieces = copier.import(&pieces, bytes).unwrap();
    copier
        .copy(&pieces, &mut memory, Way::Out(&|_| ()), 3)
        .unwrap();
    library.ask(Request::Release, None, LIMIT).unwrap();
    (memory, pieces)
}

const FILLED: Request = Request::Go {
    filled: HAS_CONTENTS,
};
const GO: Request = Request::Go { filled: UNFILLED };
/// What agents sent before they said whether memory is filled.
const OLD_GO: Request = Request::Go { filled: 0 };
const ALL: Request = Request::Allocate { from: 0, bytes: 0 };

fn bring_back(copier: &Arc<Copier>, library: &Library, memory: &mut [u8]) {
    let pieces = library.ask(ALL, None, LIMIT).unwrap();
    let pieces = copier.import(&pieces, memory.len() as u64).unwrap();
    copier
        .copy(&pieces, memory, Way::In(&|_| Ok(())), 3)
        .unwrap();
    library.ask(FILLED, None, LIMIT).unwrap();
}

/// Whether as much is held, but for the MiB that the client allocates and frees at every tick.
fn same(now: &[u64], before: &[u64]) -> bool {
    now.iter()
        .zip(before)
        .all(|(now, before)| now.abs_diff(*before) <= 1 << 20)
}

/// One test: the environment of this process names the simulated machine.
#[test]
fn memory_leaves_and_comes_back() {
    let mut machine = Machine::new("--gpus 2");
    // SAFETY: no other thread runs.
    unsafe { std::env::set_var("CUSIM_DEV_ROOT", machine.path("dev")) };
    let libcuda = machine.path("lib").join("libcuda.so.1");
    Cuda::load(Some(&libcuda)).unwrap().init().unwrap();
    let copier = Copier::load(&libcuda).unwrap();

    // Two GPUs, pieces larger than a buffer and smaller, threads that call the driver, allocations that come and go.
    let flags = "--mib 50 --chunk-mib 18 --gpus 0,1 --threads 3 --churn --fork-idle 1";
    let client = common::preloaded(&mut machine, flags);
    client.goes_on();
    let library = Library::of(client.pid).unwrap();
    // A forked child has the descriptors, and not the library's thread.
    for child in common::children(client.pid) {
        assert!(Library::of(child).is_none());
    }
    let before = machine.held(client.pid);
    for _ in 0..3 {
        let mut memory = take_out(&copier, &library);
        assert_eq!(memory.len(), 100 << 20);
        client.stands_still();
        let left = machine.held(client.pid);
        let left: Vec<u64> = left.iter().map(|left| left + (50 << 20)).collect();
        assert!(same(&left, &before), "{left:?} of {before:?}");
        // The driver has only the rest to move.
        machine.ok(client.pid, "lock checkpoint restore unlock");
        bring_back(&copier, &library, &mut memory);
        client.goes_on();
        assert!(same(&machine.held(client.pid), &before));
    }

    // What was held on the GPU comes back without the copy in host memory.
    for _ in 0..2 {
        let (memory, held) = hold(&copier, &library);
        machine.ok(client.pid, "lock checkpoint restore unlock");
        let new = library.ask(ALL, None, LIMIT).unwrap();
        let new = copier.import(&new, memory.len() as u64).unwrap();
        let of = |piece: &Imported| new.iter().find(|n| n.place() == piece.place()).unwrap();
        let pairs: Vec<_> = held.iter().map(|piece| (piece, of(piece))).collect();
        assert_eq!(pairs.len(), new.len());
        copier.copy_on_gpus(&pairs).unwrap();
        drop((held, new));
        assert!(
            library.ask(GO, None, LIMIT).is_err(),
            "it may not be filled"
        );
        library.ask(OLD_GO, None, LIMIT).unwrap();
        client.goes_on();
        assert!(same(&machine.held(client.pid), &before));
    }

    // Copied while it works; a piece that has changed since has another digest. Places are kept until it goes on.
    let first = library.ask(Request::Export, None, LIMIT).unwrap();
    let places = |pieces: &[cryopod_cuda::copy::Piece]| -> Vec<u64> {
        pieces.iter().map(|piece| piece.offset).collect()
    };
    let imported = copier.import(&first, size(&first).unwrap()).unwrap();
    let chunk = 1 << 20;
    let copied = copier.digests(&imported, chunk).unwrap();
    assert_eq!(copied.len() as u64, size(&first).unwrap() / chunk);
    let stopped = library.ask(STOP, None, LIMIT).unwrap();
    let kept = places(&stopped)
        .iter()
        .filter(|at| places(&first).contains(at))
        .count();
    assert!(kept > 0 && size(&stopped).unwrap() >= size(&first).unwrap().min(100 << 20));
    library.ask(GO, None, LIMIT).unwrap();
    drop(imported);
    client.goes_on();
    for size in [
        0,
        1,
        63,
        64,
        1 << 10,
        (1 << 10) + 1,
        12_345,
        1 << 20,
        (3 << 20) + 7,
        5 << 20,
    ] {
        let bytes: Vec<u8> = (0..size)
            .map(|i: u32| (i.wrapping_mul(i) >> 7) as u8)
            .collect();
        let digest = copier.digest_of(0, &bytes).unwrap();
        assert_eq!(blake3::hash(&bytes).as_bytes(), &digest, "{size} bytes");
    }

    // Nothing happened: after the pieces were given, and when the agent has died by then.
    drop(library.ask(STOP, None, LIMIT).unwrap());
    client.stands_still();
    library.ask(GO, None, LIMIT).unwrap();
    client.goes_on();
    drop(
        library
            .ask(
                Request::Stop {
                    limit_ms: 60_000,
                    hold_ms: 1500,
                },
                None,
                LIMIT,
            )
            .unwrap(),
    );
    client.goes_on();
    assert!(
        library.ask(Request::Release, None, LIMIT).is_err(),
        "it went on"
    );
    client.goes_on();

    // It takes the driver's own way as well.
    machine.ok(client.pid, "lock checkpoint restore unlock");
    client.goes_on();

    // Without an agent it brings its memory back itself; what the driver still locks is waited for.
    let memory = take_out(&copier, &library);
    let file = tempfile::tempfile().unwrap();
    std::io::Write::write_all(&mut &file, &memory).unwrap();
    machine.ok(client.pid, "lock checkpoint");
    library
        .go_on_alone(Vec::new(), Some(std::os::fd::AsFd::as_fd(&file)))
        .unwrap();
    machine.ok(client.pid, "restore unlock");
    client.goes_on();
    assert!(same(&machine.held(client.pid), &before));

    // The same from memory that is still on the GPU, of which only descriptors are left.
    let pieces = library.ask(STOP, None, LIMIT).unwrap();
    library.ask(Request::Release, None, LIMIT).unwrap();
    machine.ok(client.pid, "lock checkpoint");
    library.go_on_alone(pieces, None).unwrap();
    machine.ok(client.pid, "restore unlock");
    client.goes_on();
    assert!(same(&machine.held(client.pid), &before));

    // Contents that are not brought back are noticed.
    let library = Library::of(client.pid).unwrap();
    let mut memory = take_out(&copier, &library);
    memory[7 << 20] ^= 1;
    bring_back(&copier, &library, &mut memory);
    common::wait_for("a wrong sum", || client.text().contains("CORRUPT"));
    machine.kill(&client);

    // Frees beside a capture, and questions about memory that is away: the client ends if one fails.
    for gpu in [0, 1] {
        let flags =
            format!("--mib 32 --chunk-mib 16 --threads 3 --frees --gpus {gpu} --interval-ms 20");
        let client = common::preloaded(&mut machine, &flags);
        let library = Library::of(client.pid).unwrap();
        let before = machine.held(client.pid)[gpu];
        for _ in 0..3 {
            let mut memory = take_out(&copier, &library);
            client.stands_still();
            bring_back(&copier, &library, &mut memory);
            client.goes_on();
        }
        common::wait_for("many frees", || client.ticks() > 50);
        // What one round allocates.
        let more = machine.held(client.pid)[gpu].saturating_sub(before);
        assert!(more <= 6 << 20, "{more} bytes are not freed");
        machine.kill(&client);
    }

    // The wait for memory that is freed late is one that other threads see. The client allocates all that is free, beside
    // which no other may run.
    machine.control("set slow-synchronize=100");
    let client = common::preloaded(&mut machine, "--frees-late");
    client.goes_on();
    machine.control("clear slow-synchronize");
    machine.kill(&client);

    // No memory is left on the GPU: nothing is lost, and it comes back when there is some again.
    let client = common::preloaded(&mut machine, "--mib 64 --chunk-mib 32");
    let library = Library::of(client.pid).unwrap();
    let mut memory = take_out(&copier, &library);
    // A part of it, and again: it has no contents yet.
    for _ in 0..2 {
        let first = library.ask(Request::Allocate { from: 0, bytes: 1 }, None, LIMIT);
        let first: Vec<u64> = first.unwrap().iter().map(|piece| piece.offset).collect();
        assert_eq!(first, [0]);
    }
    assert!(library.ask(FILLED, None, LIMIT).is_err());
    let uuid = common::gpu(0);
    machine.control(&format!("reserve {uuid} {}", 1u64 << 50));
    assert!(library.ask(ALL, None, LIMIT).is_err());
    assert!(library.ask(FILLED, None, LIMIT).is_err());
    machine.control(&format!("reserve {uuid} 0"));
    bring_back(&copier, &library, &mut memory);
    client.goes_on();

    // A process that dies at any step is told at once, and its memory does not stay.
    for step in 0..4 {
        let client = common::preloaded(&mut machine, "--mib 32 --chunk-mib 16");
        let library = Library::of(client.pid).unwrap();
        let mut die = |now| {
            if step == now {
                machine.kill(&client);
            }
        };
        die(0);
        let ask = |request| library.ask(request, None, LIMIT);
        let mut failed = None;
        let pieces = ask(STOP).unwrap_or_else(|error| {
            failed = Some(error);
            Vec::new()
        });
        die(1);
        let mut memory = vec![0; usize::try_from(size(&pieces).unwrap()).unwrap()];
        let pieces = copier.import(&pieces, memory.len() as u64);
        let copied =
            pieces.and_then(|pieces| copier.copy(&pieces, &mut memory, Way::Out(&|_| ()), 2));
        assert!(copied.is_ok() || step < 2, "{copied:?}");
        for (now, request) in [(2, Request::Release), (3, ALL)] {
            die(now);
            failed = failed.or(ask(request).err());
        }
        let failed = failed.unwrap();
        assert!(failed.kind() != std::io::ErrorKind::TimedOut, "{failed}");
        assert!(Library::of(client.pid).is_none());
        common::wait_for("its memory to be free", || {
            machine.held(client.pid).iter().all(|bytes| *bytes == 0)
        });
    }
}
