//! The main path: lock, checkpoint, restore, unlock, and what the process looks like in between.
#![allow(clippy::unwrap_used, reason = "a test that fails should stop")]

mod common;

use std::fs;
use std::thread;

use common::{Machine, children, fds, wait_for};

const MIB: u64 = 1 << 20;
const NODES: usize = 6;

fn nodes(fds: &[String]) -> usize {
    fds.iter().filter(|f| f.contains("/dev/nvidia")).count()
}

#[test]
fn memory_moves_out_and_back() {
    let mut m = Machine::new("");
    let c = m.client("");
    assert_eq!(m.state(c.pid), "running");
    // Four MiB of the program, eight of the context.
    assert_eq!(m.held(c.pid), [12 * MIB]);
    let open = nodes(&c.fds());
    assert_eq!(open, NODES);
    let mapped: Vec<String> = c
        .maps()
        .lines()
        .filter(|l| l.contains("/dev/nvidia") || l.contains("/dev/zero"))
        .map(|l| l.split(' ').next().unwrap().to_owned())
        .collect();
    assert!(mapped.len() > 20, "{}", c.maps());

    m.ok(c.pid, "lock");
    assert_eq!(m.state(c.pid), "locked");
    c.stands_still();
    m.ok(c.pid, "checkpoint");
    assert_eq!(m.state(c.pid), "checkpointed");
    assert_eq!(m.held(c.pid), [0]);
    wait_for("the server to notice", || {
        m.control("status")["clients"]
            .as_array()
            .unwrap()
            .is_empty()
    });
    // Nothing is left that is not plain memory or a plain file.
    let fds = c.fds();
    assert!(
        nodes(&fds) == 0 && fds.iter().all(|f| !f.starts_with("socket")),
        "{fds:?}"
    );
    let maps = c.maps();
    assert!(!maps.contains("/dev/"), "{maps}");
    // The placeholders are where the mappings were.
    for range in &mapped {
        let start = u64::from_str_radix(range.split('-').next().unwrap(), 16).unwrap();
        assert!(
            maps.lines().any(|l| placeholder_over(l, start)),
            "{range} in\n{maps}"
        );
    }

    m.ok(c.pid, "restore");
    assert_eq!(m.state(c.pid), "locked");
    c.stands_still();
    let maps = c.maps();
    assert!(mapped.iter().all(|r| maps.contains(r.as_str())), "{maps}");
    m.ok(c.pid, "unlock");
    assert_eq!(m.state(c.pid), "running");
    c.goes_on();
    assert_eq!(m.held(c.pid), [12 * MIB]);
    assert_eq!(nodes(&c.fds()), open);
    // And again, in one go.
    m.ok(c.pid, "lock checkpoint restore unlock");
    c.goes_on();
    let done = m.events("checkpoint");
    assert_eq!(done.len(), 2);
    assert_eq!(done[1]["bytes"], 12 * MIB);
}

/// Whether this line of a maps file is a PROT_NONE mapping over the address.
fn placeholder_over(line: &str, address: u64) -> bool {
    let mut words = line.split(' ');
    let (range, mode) = (words.next().unwrap(), words.next().unwrap());
    let (from, to) = range.split_once('-').unwrap();
    let number = |s| u64::from_str_radix(s, 16).unwrap();
    mode.starts_with("---") && number(from) <= address && address < number(to)
}

#[test]
fn a_job_without_memory_of_its_own() {
    let mut m = Machine::new("");
    let c = m.client("--mib 0");
    m.ok(c.pid, "lock checkpoint restore unlock");
    c.goes_on();
}

#[test]
fn zeros_halves_churn_and_threads() {
    let mut m = Machine::new("--gpus 2");
    for content in ["zero", "half"] {
        let flags = format!("--content {content} --gpus all --churn --threads 3");
        let c = m.client(&flags);
        assert_eq!(m.held(c.pid), [12 * MIB, 12 * MIB]);
        for _ in 0..3 {
            m.ok(c.pid, "lock checkpoint restore unlock");
            c.goes_on();
        }
        m.kill(&c);
    }
}

#[test]
fn the_restore_thread_is_named_and_counted() {
    let mut m = Machine::new("");
    let c = m.client("");
    let tid = m.ok(c.pid, "tid");
    assert_ne!(tid, c.pid.to_string());
    let comm = fs::read_to_string(format!("/proc/{}/task/{tid}/comm", c.pid)).unwrap();
    let hex = comm.trim().strip_prefix("cuda").unwrap();
    assert!(u64::from_str_radix(hex, 16).is_ok(), "{comm}");
    // A thread's id does for a process's, as with the real driver.
    assert_eq!(m.state(tid.parse().unwrap()), "running");
}

#[test]
fn forked_children_keep_descriptors_and_mappings_but_those_of_uvm() {
    let mut m = Machine::new("");
    let c = m.client("--fork-idle 2");
    let idle = children(c.pid);
    assert_eq!(idle.len(), 2);
    for pid in &idle {
        // The child closes the driver's connection itself.
        let closed = || fds(*pid).iter().all(|f| !f.starts_with("socket"));
        wait_for("a child without the connection", closed);
        let fds = fds(*pid);
        assert_eq!(nodes(&fds), NODES, "{fds:?}");
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
        assert!(maps.contains("/dev/nvidia0"), "{maps}");
        assert!(!maps.contains("nvidia-uvm"), "{maps}");
        // It has the page of its parent, but is no CUDA process.
        m.fails(*pid, "tid", "CUDA_ERROR_INVALID_VALUE");
        m.fails(*pid, "state", "CUDA_ERROR_INVALID_VALUE");
    }
    m.ok(c.pid, "lock checkpoint restore unlock");
    c.goes_on();
    assert_eq!(nodes(&fds(idle[0])), NODES);
}

#[test]
fn two_processes_overlap() {
    let mut m = Machine::new("--gpus 2");
    let clients = [m.client("--gpus 0"), m.client("--gpus 1")];
    for c in &clients {
        m.ok(c.pid, "lock");
    }
    m.set("slow-checkpoint=3000");
    thread::scope(|s| {
        for c in &clients {
            let m = &m;
            s.spawn(move || m.ok(c.pid, "checkpoint"));
        }
    });
    // Both had begun before one was done.
    let times = |event: &str| -> Vec<f64> {
        m.events(event)
            .iter()
            .map(|e| e["t"].as_f64().unwrap())
            .collect()
    };
    let (begun, done) = (times("fault"), times("checkpoint"));
    assert_eq!((begun.len(), done.len()), (2, 2));
    assert!(
        begun.iter().all(|b| done.iter().all(|d| b < d)),
        "{begun:?} {done:?}"
    );
    for c in &clients {
        m.ok(c.pid, "restore unlock");
        c.goes_on();
    }
}

#[test]
fn calls_on_one_process_queue() {
    let mut m = Machine::new("");
    let c = m.client("");
    m.set("slow-lock=400");
    thread::scope(|s| {
        s.spawn(|| m.ok(c.pid, "lock"));
        wait_for("the lock to begin", || !m.events("fault").is_empty());
        // Waits for the lock, and then sees it done.
        assert_eq!(m.state(c.pid), "locked");
    });
    m.ok(c.pid, "unlock");
    c.goes_on();
}

#[test]
fn what_a_dead_process_held_is_free() {
    let mut m = Machine::new("");
    let c = m.client("");
    m.kill(&c);
    wait_for("the server to notice", || m.held(c.pid) == [0]);
    m.fails(c.pid, "state", "CUDA_ERROR_INVALID_VALUE");
}

#[test]
fn one_program_many_processes() {
    let mut m = Machine::new("--gpus 2");
    let c = m.client("--procs 4 --gpus 0,1");
    wait_for("all four", || {
        (0..4).all(|i| c.text().contains(&format!(" p{i}\n")))
    });
    let pids = children(c.pid);
    assert_eq!(pids.len(), 4);
    for pid in &pids {
        m.ok(*pid, "lock checkpoint");
    }
    c.stands_still();
    for pid in &pids {
        m.ok(*pid, "restore unlock");
    }
    c.goes_on();
}
