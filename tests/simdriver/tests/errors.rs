//! Calls that the driver refuses, and GPU maps.
#![allow(clippy::unwrap_used, reason = "a test that fails should stop")]

mod common;

use std::fs;

use common::{Machine, gpu, remove_node};
use cuda_sim::cuda::{CuError, Cuda};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const INVALID: &str = "CUDA_ERROR_INVALID_VALUE";
const ILLEGAL: &str = "CUDA_ERROR_ILLEGAL_STATE";

#[test]
fn steps_in_the_wrong_state() {
    let mut m = Machine::new("");
    let c = m.client("");
    for (state, wrong, next) in [
        ("running", ["checkpoint", "restore", "unlock"], "lock"),
        ("locked", ["lock", "restore", "lock"], "checkpoint"),
        ("checkpointed", ["lock", "checkpoint", "unlock"], "restore"),
    ] {
        for step in wrong {
            m.fails(c.pid, step, ILLEGAL);
            assert_eq!(m.state(c.pid), state);
        }
        m.ok(c.pid, next);
    }
    m.ok(c.pid, "unlock");
    c.goes_on();
}

#[test]
fn processes_without_cuda() {
    let mut m = Machine::new("");
    let pid = m.bystander();
    for step in ["tid", "state", "lock", "checkpoint", "restore", "unlock"] {
        m.fails(pid, step, INVALID);
        m.fails(i32::MAX, step, INVALID);
        m.fails(0, step, INVALID);
    }
}

#[test]
fn a_caller_that_did_not_init() {
    let m = Machine::new("");
    let cuda = Cuda::load(Some(&m.path("lib/libcuda.so.1"))).unwrap();
    let pid = i32::try_from(std::process::id()).unwrap();
    assert_eq!(cuda.state(pid), Err(CuError(3)));
    assert_eq!(cuda.restore_thread(pid), Err(CuError(3)));
    assert_eq!(cuda.alloc(1), Err(CuError(3)));
    assert_eq!(cuda.version(), Ok(13_000));
}

#[test]
fn no_nodes_or_no_server_is_no_device() {
    let mut m = Machine::new("");
    remove_node(&m.path("dev"), "nvidia0");
    assert!(m.client("").text().contains("CUDA_ERROR_NO_DEVICE"));
    let c = m.client_env("", &[("CUSIM_SOCKET", "/nonexistent")]);
    assert!(c.text().contains("CUDA_ERROR_NO_DEVICE"), "{}", c.text());
}

#[test]
fn a_stopped_process_does_not_answer() {
    let mut m = Machine::new("");
    let c = m.client("");
    let tid = m.ok(c.pid, "tid");
    kill(Pid::from_raw(c.pid), Signal::SIGSTOP).unwrap();
    assert_eq!(m.ok(c.pid, "tid"), tid);
    m.fails(c.pid, "lock --timeout-ms 200", "CUDA_ERROR_NOT_READY");
    kill(Pid::from_raw(c.pid), Signal::SIGCONT).unwrap();
    // The lock was withdrawn.
    c.goes_on();
    assert_eq!(m.state(c.pid), "running");
}

#[test]
fn a_driver_before_570_has_no_checkpoints() {
    let mut m = Machine::new("--driver 565.57.01");
    let c = m.client("");
    m.fails(c.pid, "tid", "CUDA_ERROR_NOT_SUPPORTED");
    m.fails(c.pid, "lock", "CUDA_ERROR_NOT_SUPPORTED");
    c.goes_on();
}

#[test]
fn a_driver_before_580_has_no_maps() {
    let mut m = Machine::new("--driver 570.86.10 --gpus 2");
    let c = m.client("");
    m.ok(c.pid, "lock checkpoint");
    m.fails(c.pid, "restore --map swap", INVALID);
    assert_eq!(m.state(c.pid), "checkpointed");
    m.ok(c.pid, "restore unlock");
    c.goes_on();
}

#[test]
fn onto_the_other_gpu_and_back() {
    let mut m = Machine::new("--gpus 2");
    let c = m.client("");
    let all = 12 << 20;
    assert_eq!(m.held(c.pid), [all, 0]);
    m.ok(c.pid, "lock checkpoint restore unlock --map swap");
    assert_eq!(m.held(c.pid), [0, all]);
    c.goes_on();
    let moved = m.events("restore").pop().unwrap();
    assert_eq!(moved["gpus"][gpu(1).to_string()], all);
    m.ok(c.pid, "lock checkpoint restore unlock --map swap");
    assert_eq!(m.held(c.pid), [all, 0]);
    c.goes_on();
    // Without a map it stays where it is.
    m.ok(c.pid, "lock checkpoint restore unlock");
    assert_eq!(m.held(c.pid), [all, 0]);
}

#[test]
fn the_whole_hosts_map_does_for_a_process_that_sees_less() {
    let mut m = Machine::new("--gpus 2");
    let c = m.client_env("", &[("CUDA_VISIBLE_DEVICES", "1")]);
    assert_eq!(m.held(c.pid), [0, 12 << 20]);
    m.ok(c.pid, "lock checkpoint restore unlock --map swap");
    assert_eq!(m.held(c.pid), [12 << 20, 0]);
    c.goes_on();
}

#[test]
fn maps_that_are_refused() {
    let mut m = Machine::new("--gpus 2");
    let c = m.client("");
    m.ok(c.pid, "lock checkpoint");
    let (a, b, stranger) = (gpu(0), gpu(1), gpu(9));
    for map in [
        format!("{a}={b}"),
        format!("{a}={b},{b}={b}"),
        format!("{a}={a},{b}={stranger}"),
        format!("{stranger}={a}"),
    ] {
        m.fails(c.pid, &format!("restore --map {map}"), INVALID);
        assert_eq!(m.state(c.pid), "checkpointed");
    }
    // More than the process had is fine.
    let more = format!("restore unlock --map {stranger}={a},{a}={b},{b}={a}");
    m.ok(c.pid, &more);
    c.goes_on();
}

#[test]
fn a_target_of_another_kind_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("gpus.toml");
    fs::write(&config, "[[gpu]]\n[[gpu]]\nname = 'NVIDIA L4'\n").unwrap();
    let mut m = Machine::new(&format!("--config {}", config.display()));
    let c = m.client("");
    m.ok(c.pid, "lock checkpoint");
    m.fails(c.pid, "restore --map swap", "CUDA_ERROR_NOT_SUPPORTED");
    m.ok(c.pid, "restore unlock");
    c.goes_on();
}

#[test]
fn a_target_without_a_node_is_refused() {
    let mut m = Machine::new("--gpus 2");
    remove_node(&m.path("dev"), "nvidia1");
    let c = m.client("");
    m.ok(c.pid, "lock checkpoint");
    let (a, b) = (gpu(0), gpu(1));
    let restore = format!("restore --map {a}={b}");
    m.fails(c.pid, &restore, "CUDA_ERROR_NOT_SUPPORTED");
    // A regular file of that name, left by a restored /dev, is no node either.
    fs::write(m.path("dev/nvidia1"), "").unwrap();
    m.fails(c.pid, &restore, "CUDA_ERROR_NOT_SUPPORTED");
    assert_eq!(m.state(c.pid), "checkpointed");
    fs::rename(m.path("dev/nvidia0"), m.path("dev/nvidia1")).unwrap();
    m.ok(c.pid, &format!("{restore} unlock"));
    assert_eq!(m.held(c.pid), [0, 12 << 20]);
    c.goes_on();
}
