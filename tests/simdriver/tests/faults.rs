//! The switches: each does what it says, and the process is usable after it where that is promised.
#![allow(clippy::unwrap_used, reason = "a test that fails should stop")]

mod common;

use std::thread;
use std::time::{Duration, Instant};

use common::{Client, Machine, gpu, wait_for};

fn with_client() -> (Machine, Client) {
    let mut m = Machine::new("");
    let c = m.client("");
    (m, c)
}

fn timed(f: impl FnOnce()) -> Duration {
    let start = Instant::now();
    f();
    start.elapsed()
}

#[test]
fn real_managed_memory_is_refused() {
    let mut m = Machine::new("");
    let c = m.client("--uvm");
    m.ok(c.pid, "lock");
    m.fails(c.pid, "checkpoint", "CUDA_ERROR_NOT_SUPPORTED");
    m.ok(c.pid, "unlock");
    c.goes_on();
}

#[test]
fn memory_that_nobody_imports_comes_back() {
    let mut m = Machine::new("");
    let c = m.client("--mib 2 --ipc");
    m.ok(c.pid, "lock checkpoint restore unlock");
    c.goes_on();
}

#[test]
fn a_hanging_lock_ends_at_its_timeout() {
    let (m, c) = with_client();
    m.set("hang-lock");
    let took = timed(|| m.fails(c.pid, "lock --timeout-ms 300", "CUDA_ERROR_NOT_READY"));
    assert!((300..30_000).contains(&took.as_millis()), "{took:?}");
    assert_eq!(m.state(c.pid), "running");
    c.goes_on();
    m.control("clear");
    m.ok(c.pid, "lock unlock");
}

#[test]
fn a_lock_can_hang_for_ever() {
    let (m, c) = with_client();
    m.set("hang-lock-forever");
    let mut caller = m
        .step_command(c.pid, "lock --timeout-ms 100")
        .spawn()
        .unwrap();
    wait_for("the lock", || !m.events("fault").is_empty());
    thread::sleep(Duration::from_millis(700));
    assert!(caller.try_wait().unwrap().is_none());
    c.stands_still();
    // The caller is killed; the lock goes on, and ends once nothing holds it up.
    caller.kill().unwrap();
    caller.wait().unwrap();
    m.control("clear");
    assert_eq!(m.state(c.pid), "locked");
    m.ok(c.pid, "unlock");
    c.goes_on();
}

#[test]
fn failures_with_a_count_and_a_code() {
    let (m, c) = with_client();
    m.set("fail-lock=CUDA_ERROR_TIMEOUT:1");
    m.fails(c.pid, "lock", "CUDA_ERROR_TIMEOUT");
    m.set("fail-get-state=CUDA_ERROR_NOT_PERMITTED:1");
    m.fails(c.pid, "state", "CUDA_ERROR_NOT_PERMITTED");
    m.set("cuinit-race");
    m.fails(c.pid, "lock", "CUDA_ERROR_ILLEGAL_STATE");
    c.goes_on();
    m.ok(c.pid, "lock");
    m.set("fail-checkpoint:2");
    for _ in 0..2 {
        m.fails(c.pid, "checkpoint", "CUDA_ERROR_OPERATING_SYSTEM");
        assert_eq!(m.state(c.pid), "locked");
    }
    m.ok(c.pid, "checkpoint");
    m.set("fail-restore:1");
    m.fails(c.pid, "restore", "CUDA_ERROR_UNKNOWN");
    assert_eq!(
        (m.state(c.pid).as_str(), m.held(c.pid)),
        ("checkpointed", vec![0])
    );
    m.ok(c.pid, "restore");
    m.set("fail-unlock:1");
    m.fails(c.pid, "unlock", "CUDA_ERROR_UNKNOWN");
    assert_eq!(m.state(c.pid), "locked");
    m.ok(c.pid, "unlock");
    c.goes_on();
    assert_eq!(m.events("fault").len(), 7);
}

#[test]
fn broken_processes_stay_failed() {
    for (switch, steps, fails) in [
        ("break-checkpoint", "lock", "checkpoint"),
        (
            "break-restore=CUDA_ERROR_UNKNOWN",
            "lock checkpoint",
            "restore",
        ),
    ] {
        let (m, c) = with_client();
        m.set(switch);
        m.ok(c.pid, steps);
        m.fails(c.pid, fails, "CUDA_ERROR_UNKNOWN");
        assert_eq!(m.state(c.pid), "failed");
        for step in ["lock", "checkpoint", "restore", "unlock"] {
            m.fails(c.pid, step, "CUDA_ERROR_ILLEGAL_STATE");
        }
        c.stands_still();
    }
}

#[test]
fn too_little_memory_at_restore_is_for_good() {
    let (m, c) = with_client();
    m.ok(c.pid, "lock checkpoint");
    let taken = (8u64 << 30) - (11 << 20);
    m.control(&format!("reserve {} {taken}", gpu(0)));
    m.fails(c.pid, "restore", "CUDA_ERROR_OUT_OF_MEMORY");
    assert_eq!(m.state(c.pid), "checkpointed");
    wait_for("the server to notice", || m.held(c.pid) == [0]);
    // As seen on real drivers: more memory does not help any more.
    m.control(&format!("reserve {} 0", gpu(0)));
    m.fails(c.pid, "restore", "CUDA_ERROR_OPERATING_SYSTEM");
    m.fails(c.pid, "unlock", "CUDA_ERROR_ILLEGAL_STATE");
    assert!(
        c.fds()
            .iter()
            .all(|f| !f.contains("nvidia") && !f.starts_with("socket"))
    );
}

#[test]
fn a_switch_for_one_process_of_two() {
    let mut m = Machine::new("");
    let (a, b) = (m.client(""), m.client(""));
    m.set(&format!("fail-checkpoint@{}", b.pid));
    for c in [&a, &b] {
        m.ok(c.pid, "lock");
    }
    m.ok(a.pid, "checkpoint");
    m.fails(b.pid, "checkpoint", "CUDA_ERROR_OPERATING_SYSTEM");
    m.ok(a.pid, "restore unlock");
    m.ok(b.pid, "unlock");
    a.goes_on();
    b.goes_on();
}
