//! A process with `libcryopod_preload.so` goes on when the agent and the library lose each other.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that fails should stop"
)]

mod common;

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Client, Machine, wait_for};
use cryopod_cuda::copy::{Copier, Way};
use cryopod_cuda::messages::protocol::{Hold, TakenOut};
use cryopod_cuda::preload::process::Preloads;
use cryopod_cuda::preload::{Library, size};
use cryopod_preload_wire::{Card, MEMFD, Request};
use cuda_sim::cuda::Cuda;
use nix::sys::signal::Signal;
use nix::sys::socket::{Shutdown, shutdown};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

const LIMIT: Duration = Duration::from_secs(60);
const STOP: Request = Request::Stop {
    limit_ms: 50_000,
    hold_ms: 3_000_000,
};

/// Ends the connection to a process's library.
fn cut_off(pid: i32) {
    let is_card = |path: &fs::DirEntry| {
        let to = fs::read_link(path.path()).unwrap_or_default();
        to.to_string_lossy().contains(MEMFD)
    };
    let all = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let card = all.flatten().find(is_card).unwrap();
    let mut bytes = [0; Card::BYTES];
    File::open(card.path())
        .unwrap()
        .read_exact(&mut bytes)
        .unwrap();
    let card = Card::decode(&bytes).unwrap();
    let process = pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap();
    let socket = pidfd_getfd(process, card.agent_end, PidfdGetfdFlags::empty()).unwrap();
    shutdown(std::os::fd::AsRawFd::as_raw_fd(&socket), Shutdown::Both).unwrap();
}

/// One test: the environment of this process names the simulated machine.
#[test]
fn agent_and_library_lose_each_other() {
    let mut machine = Machine::new("--gpus 1");
    // SAFETY: no other thread runs.
    unsafe { std::env::set_var("CUSIM_DEV_ROOT", machine.path("dev")) };
    let libcuda = machine.path("lib").join("libcuda.so.1");
    Cuda::load(Some(&libcuda)).unwrap().init().unwrap();
    let copier = Copier::load(&libcuda).unwrap();
    let mut start = || -> (Client, Library) {
        let client = common::preloaded(&mut machine, "--mib 8 --chunk-mib 4");
        let library = Library::of(client.pid).unwrap();
        (client, library)
    };

    // The memory is here.
    let (client, library) = start();
    drop(library.ask(STOP, None, LIMIT).unwrap());
    client.stands_still();
    cut_off(client.pid);
    let began = Instant::now();
    client.goes_on();
    assert!(began.elapsed() < LIMIT);

    // It is in a file that the process keeps.
    let (client, library) = start();
    let pieces = library.ask(STOP, None, LIMIT).unwrap();
    let bytes = size(&pieces).unwrap();
    let mut memory = vec![0; usize::try_from(bytes).unwrap()];
    let pieces = copier.import(&pieces, bytes).unwrap();
    let copied = copier.copy(&pieces, &mut memory, Way::Out(&|_| ()), 1);
    copied.unwrap();
    let file = tempfile::tempfile().unwrap();
    std::io::Write::write_all(&mut &file, &memory).unwrap();
    let release = library.ask(Request::Release, Some(file.as_fd()), LIMIT);
    release.unwrap();
    drop(pieces);
    cut_off(client.pid);
    client.goes_on();

    // Nobody has it: the process has the driver's error, also for what is allocated again without contents.
    let (client, library) = start();
    drop(library.ask(STOP, None, LIMIT).unwrap());
    library.ask(Request::Release, None, LIMIT).unwrap();
    let all = Request::Allocate { from: 0, bytes: 0 };
    drop(library.ask(all, None, LIMIT).unwrap());
    cut_off(client.pid);
    wait_for("the driver's error", || client.text().contains("Error"));
    assert!(!client.text().contains("CORRUPT"));

    late_answer(&mut machine);
    for context in ["primary", "plain", "green"] {
        endless_work(&mut machine, context);
    }
}

/// The agent sends what lets it go on, although it has not answered.
fn late_answer(machine: &mut Machine) {
    let client = common::preloaded(machine, "");
    let send = |signal| nix::sys::signal::kill(nix::unistd::Pid::from_raw(client.pid), signal);
    send(Signal::SIGSTOP).unwrap();
    let (preloads, files) = (Arc::new(Preloads::default()), Arc::default());
    let limit = Duration::from_millis(100);
    let taken = preloads.take_out(client.pid, 1, limit, Hold::No, None, &files);
    assert!(matches!(taken, Ok(TakenOut::LeftOut(_))), "{taken:?}");
    send(Signal::SIGCONT).unwrap();
    let began = Instant::now();
    client.goes_on();
    assert!(began.elapsed() < LIMIT);
}

/// A wait for the GPU's work cannot be ended; there is one at a time. All contexts are waited for.
fn endless_work(machine: &mut Machine, context: &str) {
    let client = common::preloaded(machine, &format!("--context {context}"));
    let library = Library::of(client.pid).unwrap();
    let threads = || {
        let all = fs::read_dir(format!("/proc/{}/task", client.pid)).unwrap();
        let name = |thread: fs::DirEntry| fs::read_to_string(thread.path().join("comm"));
        let names = all.flatten().filter_map(|thread| name(thread).ok());
        names.filter(|name| name.trim() == "cryopod-wait").count()
    };
    let stop = |limit_ms| {
        let hold_ms = 60_000;
        library.ask(Request::Stop { limit_ms, hold_ms }, None, LIMIT)
    };
    let set = format!("set hang-synchronize@{}", client.pid);
    machine.control(&set);
    for _ in 0..3 {
        let busy = stop(300).unwrap_err();
        assert_eq!(busy.kind(), std::io::ErrorKind::ResourceBusy, "{busy}");
        assert_eq!(threads(), 1);
        client.goes_on();
    }
    machine.control("clear hang-synchronize");
    drop(stop(50_000).unwrap());
    client.stands_still();
    assert_eq!(threads(), 0);
    library.ask(Request::Go { filled: 0 }, None, LIMIT).unwrap();
    client.goes_on();
}
