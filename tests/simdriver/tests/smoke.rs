//! The facts of the driver that everything else rests on: what a checkpoint leaves of a process, and what the driver refuses.
#![allow(clippy::unwrap_used, reason = "a test that fails should stop")]

mod common;

use common::{Machine, gpu};

const MIB: u64 = 1 << 20;
const INVALID: &str = "CUDA_ERROR_INVALID_VALUE";
const ILLEGAL: &str = "CUDA_ERROR_ILLEGAL_STATE";

/// Whether a line of a maps file is a PROT_NONE mapping over the address.
fn is_placeholder(line: &str, address: u64) -> bool {
    let (range, rest) = line.split_once(' ').unwrap();
    let (from, to) = range.split_once('-').unwrap();
    let number = |s| u64::from_str_radix(s, 16).unwrap();
    rest.starts_with("---") && number(from) <= address && address < number(to)
}

#[test]
fn memory_moves_out_and_back() {
    let mut m = Machine::new("--gpus 2");
    let c = m.client("--threads 3 --churn");
    // Four MiB of the program, eight of the context.
    assert_eq!(m.held(c.pid), [12 * MIB, 0]);
    let mapped: Vec<String> = c
        .maps()
        .lines()
        .filter(|l| l.contains("/dev/nvidia") || l.contains("/dev/zero"))
        .map(|l| l.split(' ').next().unwrap().to_owned())
        .collect();
    assert!(mapped.len() > 20, "{}", c.maps());
    for (state, wrong, next) in [
        ("running", ["checkpoint", "restore", "unlock"], "lock"),
        ("locked", ["lock", "restore", "lock"], "checkpoint"),
    ] {
        for step in wrong {
            m.fails(c.pid, step, ILLEGAL);
            assert_eq!(m.state(c.pid), state);
        }
        m.ok(c.pid, next);
    }
    c.stands_still();
    assert_eq!(m.held(c.pid), [0, 0]);
    // Plain memory and plain files are left, and placeholders where the mappings were.
    let special = |f: &String| f.contains("/dev/nvidia") || f.starts_with("socket");
    assert!(!c.fds().iter().any(special), "{:?}", c.fds());
    let maps = c.maps();
    assert!(!maps.contains("/dev/"), "{maps}");
    for range in &mapped {
        let start = u64::from_str_radix(range.split('-').next().unwrap(), 16).unwrap();
        let found = maps.lines().any(|l| is_placeholder(l, start));
        assert!(found, "{range} in\n{maps}");
    }

    let (a, b, stranger) = (gpu(0), gpu(1), gpu(9));
    for map in [
        format!("{a}={b}"),
        format!("{a}={b},{b}={b}"),
        format!("{a}={a},{b}={stranger}"),
    ] {
        m.fails(c.pid, &format!("restore --map {map}"), INVALID);
    }
    for step in ["lock", "checkpoint", "unlock"] {
        m.fails(c.pid, step, ILLEGAL);
    }
    m.ok(c.pid, "restore --map swap");
    assert_eq!(m.state(c.pid), "locked");
    c.stands_still();
    let maps = c.maps();
    assert!(mapped.iter().all(|r| maps.contains(r.as_str())), "{maps}");
    m.ok(c.pid, "unlock");
    c.goes_on();
    assert_eq!(m.held(c.pid), [0, 12 * MIB]);
}

#[test]
fn too_little_memory_at_restore_is_for_good() {
    let mut m = Machine::new("");
    let c = m.client("");
    m.ok(c.pid, "lock checkpoint");
    m.control(&format!("reserve {} {}", gpu(0), (8 << 30) - 11 * MIB));
    m.fails(c.pid, "restore", "CUDA_ERROR_OUT_OF_MEMORY");
    assert_eq!(m.state(c.pid), "checkpointed");
    // As seen on real drivers: more memory does not help any more.
    m.control(&format!("reserve {} 0", gpu(0)));
    m.fails(c.pid, "restore", "CUDA_ERROR_OPERATING_SYSTEM");
}

#[test]
fn a_driver_before_570_has_no_checkpoints() {
    let mut m = Machine::new("--driver 565.57.01");
    let c = m.client("");
    m.fails(c.pid, "lock", "CUDA_ERROR_NOT_SUPPORTED");
    c.goes_on();
}
