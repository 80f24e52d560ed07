//! Custom storage of CUDA 13.4, with the driver agent's own code: GPU memory leaves and comes back, and what becomes of the
//! process when a step fails.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that fails should stop"
)]

mod common;

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::{Client, Machine, gpu};
use cryopod_cuda::agent::{Agent, Limits};
use cryopod_cuda::driver::LibCuda;
use cryopod_cuda::gpu::{GpuPair, GpuUuid};
use cryopod_cuda::protocol::{Op, Outcome, StorageTo, TakenOut};
use cryopod_cuda::report::AgentOutcome;

const LIMIT_MS: u64 = 60_000;

/// An agent on a simulated machine.
struct Host {
    machine: Machine,
    libcuda: PathBuf,
    agent: Arc<Agent<LibCuda>>,
}

fn agent(libcuda: &Path) -> Arc<Agent<LibCuda>> {
    let cuda = LibCuda::load(libcuda).unwrap();
    let gpus = cuda.gpus().to_vec();
    let agent = Agent::new(cuda);
    agent.gpus().use_driver(libcuda.to_path_buf(), &gpus);
    agent
}

impl Host {
    fn new() -> Self {
        let machine = Machine::new(&["--gpus", "2", "--driver", "615.10"]);
        let libcuda = machine.path("lib").join("libcuda.so.1");
        let conf = machine.path("lib").join("cusim.conf");
        let mut conf = File::options().append(true).open(conf).unwrap();
        writeln!(conf, "dev_root={}", machine.path("dev").display()).unwrap();
        let agent = agent(&libcuda);
        Self {
            machine,
            libcuda,
            agent,
        }
    }

    /// Two GPUs, pieces larger than the agent's buffers and smaller.
    fn client(&mut self) -> Client {
        let flags = ["--mib", "50", "--chunk-mib", "18", "--gpus", "0,1"];
        let client = self.machine.client(&flags);
        client.goes_on();
        client
    }

    fn lock(&self, pid: i32) {
        let timeout_ms = 10_000;
        let locked = self.agent.perform(&Op::Lock { pid, timeout_ms });
        assert_eq!(locked, Outcome::Done);
    }

    fn checkpoint(&self, pid: i32) -> Outcome {
        self.agent.perform(&Op::Checkpoint {
            pid,
            limit_ms: LIMIT_MS,
            storage: Some(StorageTo {
                threads: 3,
                write: None,
            }),
        })
    }

    /// Locks and checkpoints a process with custom storage. Returns the buffer's file.
    fn taken(&self, pid: i32) -> File {
        self.lock(pid);
        let taken = self.checkpoint(pid);
        let Outcome::TakenOut(TakenOut::Out { buffer, bytes, .. }) = taken else {
            panic!("{taken:?}");
        };
        assert!(bytes > 100 << 20, "{bytes}");
        assert_eq!(self.machine.state(pid), "checkpointed");
        assert_eq!(self.machine.held(pid), [0, 0]);
        let mut options = File::options();
        options.read(true).write(true).open(buffer.path).unwrap()
    }

    fn restore(&self, pid: i32, gpu_map: Vec<GpuPair>) -> Outcome {
        self.agent.perform(&Op::Restore {
            pid,
            gpu_map,
            limit_ms: LIMIT_MS,
            storage: None,
        })
    }

    fn unlock(&self, pid: i32) {
        let limit_ms = LIMIT_MS;
        let unlocked = self.agent.perform(&Op::Unlock { pid, limit_ms });
        assert_eq!(unlocked, Outcome::Done);
    }

    fn back(&self, client: &Client) {
        assert_eq!(self.restore(client.pid, Vec::new()), Outcome::Done);
        self.unlock(client.pid);
        client.goes_on();
    }

    fn settle(&self) -> AgentOutcome {
        let limits = Limits::default();
        self.agent.settle(false, limits, |_| {}).outcome
    }
}

fn message(outcome: Outcome) -> String {
    match outcome {
        Outcome::Error(error) => error.message,
        other => panic!("{other:?}"),
    }
}

fn left_out(outcome: Outcome) -> String {
    match outcome {
        Outcome::TakenOut(TakenOut::LeftOut(reason)) => reason,
        other => panic!("{other:?}"),
    }
}

fn memory_leaves_and_comes_back(host: &mut Host) {
    let client = host.client();
    let before = host.machine.held(client.pid);
    for _ in 0..3 {
        host.taken(client.pid);
        client.stands_still();
        host.back(&client);
        assert_eq!(host.machine.held(client.pid), before);
    }
    // Onto the other GPUs, and back again.
    let uuid = |n: u8| GpuUuid(gpu(n).0);
    let swap = || {
        let pair = |(old, new)| GpuPair {
            old: uuid(old),
            new: uuid(new),
        };
        [(0, 1), (1, 0)].map(pair).to_vec()
    };
    host.taken(client.pid);
    assert_eq!(host.restore(client.pid, swap()), Outcome::Done);
    host.unlock(client.pid);
    client.goes_on();
    // The driver's own way still works.
    host.machine
        .ok(client.pid, &["lock", "checkpoint", "restore", "unlock"]);
    client.goes_on();
    // Nothing was left over that the agent would undo.
    assert_eq!(host.settle(), AgentOutcome::Clean);
}

/// Before the driver has begun anything can fail; the driver then copies itself.
fn what_fails_before_leaves_it_to_the_driver(host: &mut Host) {
    let client = host.client();
    // There is no memory for a context on a GPU.
    for n in [0, 1] {
        host.machine
            .control(&format!("reserve {} {}", gpu(n), 1u64 << 50));
    }
    host.lock(client.pid);
    let reason = left_out(host.checkpoint(client.pid));
    assert!(reason.contains("a context"), "{reason}");
    for n in [0, 1] {
        host.machine.control(&format!("reserve {} 0", gpu(n)));
    }
    host.back(&client);
    host.machine.set("fail-checkpoint:1");
    host.lock(client.pid);
    let reason = left_out(host.checkpoint(client.pid));
    assert!(reason.contains("OPERATING_SYSTEM"), "{reason}");
    host.back(&client);
    host.machine.kill(&client);
}

/// A copy that fails is tried once more, either way.
fn a_copy_that_fails_once_is_no_loss(host: &mut Host) {
    let client = host.client();
    let faults = host.machine.events("fault").len();
    host.machine.set("fail-copy:1/2");
    host.taken(client.pid);
    host.machine.set("fail-copy:1/2");
    host.back(&client);
    assert_eq!(host.machine.events("fault").len(), faults + 2);
    host.machine.kill(&client);
}

/// What the driver cannot take back is told.
fn an_operation_that_cannot_be_completed_is_told(host: &mut Host) {
    for switch in ["fail-copy", "fail-complete:1"] {
        let client = host.client();
        host.lock(client.pid);
        host.machine.set(switch);
        let error = message(host.checkpoint(client.pid));
        assert!(error.contains("the process cannot go on"), "{error}");
        assert_eq!(host.machine.state(client.pid), "4");
        assert_eq!(host.settle(), AgentOutcome::RollbackFailed);
        client.stands_still();
        host.machine.control("clear");
        host.machine.kill(&client);
    }
    for switch in ["fail-copy", "fail-complete:1"] {
        let client = host.client();
        host.taken(client.pid);
        host.machine.set(switch);
        let error = message(host.restore(client.pid, Vec::new()));
        assert!(error.contains("the process cannot go on"), "{error}");
        assert_eq!(host.machine.state(client.pid), "5");
        client.stands_still();
        host.machine.control("clear");
        host.machine.kill(&client);
    }
}

fn a_restore_that_does_not_begin_can_be_tried_again(host: &mut Host) {
    let client = host.client();
    host.taken(client.pid);
    host.machine.set("fail-restore:1");
    message(host.restore(client.pid, Vec::new()));
    assert_eq!(host.machine.state(client.pid), "checkpointed");
    host.back(&client);
}

fn what_was_taken_is_put_back_at_the_end(host: &mut Host) {
    let client = host.client();
    host.taken(client.pid);
    assert_eq!(host.settle(), AgentOutcome::RolledBack);
    client.goes_on();
}

/// The process keeps its memory when the agent has gone, and another agent finds it there.
fn another_agent_restores_what_the_process_keeps(host: &mut Host) {
    let client = host.client();
    let pid = client.pid;
    host.taken(pid);
    let deleted = |client: &Client| client.maps().matches("(deleted)").count();
    let without = deleted(&client);
    assert_eq!(host.agent.perform(&Op::StorageKeep { pid }), Outcome::Done);
    assert_eq!(deleted(&client), without + 1);
    host.agent.keep();
    host.agent = agent(&host.libcuda);
    host.back(&client);
    assert_eq!(deleted(&client), without);
    // It has none of its own now.
    message(host.agent.perform(&Op::StorageKeep { pid }));
}

fn flip(file: &File, at: u64) {
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
}

/// Contents that are not those of the checkpoint are noticed here, and a table that does not fit by the agent.
fn what_is_wrong_is_noticed(host: &mut Host) {
    let client = host.client();
    let file = host.taken(client.pid);
    flip(&file, 0);
    let error = message(host.restore(client.pid, Vec::new()));
    assert!(error.contains("its table is damaged"), "{error}");
    assert_eq!(host.machine.state(client.pid), "checkpointed");
    flip(&file, 0);
    flip(&file, 20 << 20);
    assert_eq!(host.restore(client.pid, Vec::new()), Outcome::Done);
    host.unlock(client.pid);
    common::wait_for("a wrong sum", || client.text().contains("CORRUPT"));
    host.machine.kill(&client);
    // The first GPU's size: the process must not go on with memory that nobody has filled.
    let client = host.client();
    let file = host.taken(client.pid);
    flip(&file, 16 + 16 + 2);
    let error = message(host.restore(client.pid, Vec::new()));
    assert!(error.contains("other memory than was taken"), "{error}");
    assert_eq!(host.machine.state(client.pid), "5");
    host.machine.kill(&client);
}

/// A process that dies at any step ends the step.
fn a_process_that_dies_ends_the_step(host: &mut Host) {
    let client = host.client();
    host.lock(client.pid);
    let faults = host.machine.events("fault").len();
    host.machine.set("slow-copy=300");
    std::thread::scope(|scope| {
        let checkpoint = scope.spawn(|| host.checkpoint(client.pid));
        let copies = || host.machine.events("fault").len() > faults;
        common::wait_for("the copy", copies);
        // SAFETY: a number.
        unsafe { libc::kill(client.pid, libc::SIGKILL) };
        message(checkpoint.join().unwrap());
    });
    host.machine.kill(&client);
    host.machine.control("clear");
    common::wait_for("its memory to be free", || {
        host.machine.held(client.pid) == [0, 0]
    });
    assert_eq!(host.settle(), AgentOutcome::Clean);
}

/// One test, on one machine: a process can have one simulated driver only.
#[test]
fn custom_storage() {
    let host = &mut Host::new();
    what_fails_before_leaves_it_to_the_driver(host);
    memory_leaves_and_comes_back(host);
    a_copy_that_fails_once_is_no_loss(host);
    an_operation_that_cannot_be_completed_is_told(host);
    a_restore_that_does_not_begin_can_be_tried_again(host);
    what_was_taken_is_put_back_at_the_end(host);
    another_agent_restores_what_the_process_keeps(host);
    what_is_wrong_is_noticed(host);
    a_process_that_dies_ends_the_step(host);
}
