//! Reads the few facts of `/proc/PID` that plugin and agent need, each read once and bounded.
//!
//! Unlike the plan, they look at live processes by pid, on this host only.

use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

const MAX_BYTES: u64 = 1 << 20;

const PF_EXITING: u64 = 0x4;

fn text(path: &str) -> io::Result<String> {
    let bytes = cryopod_host::files::read_bounded(Path::new(path), MAX_BYTES)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    pub state: char,
    /// Exiting, zombie or dead.
    pub exiting: bool,
    /// A zombie that a signal ended. The kernel shows this to root.
    pub killed: bool,
    /// Its start time; with the pid it identifies a process.
    pub start_time: u64,
}

pub fn parse_stat(text: &str) -> Option<Stat> {
    let rest = &text[text.rfind(')')? + 1..];
    let mut fields = rest.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    let flags: u64 = fields.nth(5)?.parse().ok()?;
    let start_time = fields.nth(12)?.parse().ok()?;
    let exit_code: u32 = fields
        .nth(29)
        .and_then(|code| code.parse().ok())
        .unwrap_or(0);
    Some(Stat {
        state,
        exiting: matches!(state, 'Z' | 'X' | 'x') || flags & PF_EXITING != 0,
        killed: state == 'Z' && exit_code & 0x7f != 0,
        start_time,
    })
}

pub fn stat(pid: i32) -> Option<Stat> {
    parse_stat(&text(&format!("/proc/{pid}/stat")).ok()?)
}

/// The number and the first two arguments of the system call that a sleeping process is in.
pub fn system_call(pid: i32) -> Option<(i64, [u64; 2])> {
    let line = text(&format!("/proc/{pid}/syscall")).ok()?;
    let mut words = line.split_ascii_whitespace();
    let number = words.next()?.parse().ok()?;
    let mut argument = || u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok();
    Some((number, [argument()?, argument()?]))
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Status {
    pub comm: String,
    pub tgid: i32,
    /// The tracer's pid; 0: none.
    pub tracer: i32,
    /// Its pid in each namespace, the reader's first.
    pub ns_pids: Vec<i32>,
    /// Seccomp mode; 0: none.
    pub seccomp: u32,
    /// Resident anonymous and shared memory in bytes.
    pub rss: u64,
}

pub fn parse_status(text: &str) -> Status {
    let mut status = Status::default();
    for line in text.lines() {
        let Some((key, value)) = line.split_once(':') else {
            continue;
        };
        let value = value.trim();
        match key {
            "Name" => status.comm = value.to_owned(),
            "Tgid" => status.tgid = value.parse().unwrap_or(0),
            "TracerPid" => status.tracer = value.parse().unwrap_or(0),
            "NSpid" => {
                status.ns_pids = value
                    .split_ascii_whitespace()
                    .filter_map(|pid| pid.parse().ok())
                    .collect();
            }
            "Seccomp" => status.seccomp = value.parse().unwrap_or(0),
            "RssAnon" | "RssShmem" => {
                let kib: u64 = value
                    .split_ascii_whitespace()
                    .next()
                    .and_then(|kib| kib.parse().ok())
                    .unwrap_or(0);
                status.rss = status.rss.saturating_add(kib.saturating_mul(1024));
            }
            _ => {}
        }
    }
    status
}

pub fn status(pid: i32) -> io::Result<Status> {
    Ok(parse_status(&text(&format!("/proc/{pid}/status"))?))
}

pub fn comm(pid: i32) -> String {
    text(&format!("/proc/{pid}/comm"))
        .map(|comm| comm.trim_end().to_owned())
        .unwrap_or_else(|_| "?".to_owned())
}

pub fn pids() -> Vec<i32> {
    numbers("/proc")
}

/// Every thread of a process, the main one included.
pub fn threads(pid: i32) -> Vec<i32> {
    numbers(&format!("/proc/{pid}/task"))
}

fn numbers(directory: &str) -> Vec<i32> {
    let Ok(entries) = std::fs::read_dir(directory) else {
        return Vec::new();
    };
    let mut pids: Vec<i32> = entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect();
    pids.sort_unstable();
    pids
}

pub fn driver_version() -> Option<String> {
    if let Ok(version) = text("/sys/module/nvidia/version") {
        return Some(version.trim().to_owned());
    }
    parse_driver_version(&text("/proc/driver/nvidia/version").ok()?)
}

/// Parses the version in `/proc/driver/nvidia/version`: the first word of its first line that is digits and dots.
pub fn parse_driver_version(text: &str) -> Option<String> {
    let digits =
        |word: &&str| word.contains('.') && word.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    let first = text.lines().next()?;
    Some(first.split_ascii_whitespace().find(digits)?.to_owned())
}

/// The minors of the GPU nodes (`/dev/nvidia0`, …) that a process has open.
pub fn open_gpu_minors(pid: i32) -> Vec<u32> {
    let Ok(entries) = std::fs::read_dir(format!("/proc/{pid}/fd")) else {
        return Vec::new();
    };
    let mut minors: Vec<u32> = entries
        .flatten()
        .filter_map(|entry| {
            let target = std::fs::read_link(entry.path()).ok()?;
            let number = target.to_str()?.strip_prefix("/dev/nvidia")?;
            number.parse::<u32>().ok()?;
            let meta = std::fs::metadata(entry.path()).ok()?;
            meta.file_type()
                .is_char_device()
                .then(|| libc::minor(meta.rdev()))
        })
        .collect();
    minors.sort_unstable();
    minors.dedup();
    minors
}

/// The GPUs of the host by device minor, from `/proc/driver/nvidia/gpus/*/information`.
pub fn gpus_by_minor() -> Vec<(u32, crate::gpus::gpu::GpuUuid)> {
    let Ok(entries) = std::fs::read_dir("/proc/driver/nvidia/gpus") else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|entry| {
            let path = entry.path().join("information");
            parse_gpu_information(&text(path.to_str()?).ok()?)
        })
        .collect()
}

pub fn parse_gpu_information(text: &str) -> Option<(u32, crate::gpus::gpu::GpuUuid)> {
    let field = |name: &str| {
        text.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            (key.trim() == name).then(|| value.trim())
        })
    };
    let minor = field("Device Minor")?.parse().ok()?;
    Some((minor, field("GPU UUID")?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn stat_with_a_hostile_name() {
        let text = "12 (a) R (x y) S 1 12 12 0 -1 4194564 1 2 3 4 5 6 7 8 20 0 1 0 777 0";
        let stat = parse_stat(text).unwrap();
        assert_eq!((stat.state, stat.start_time), ('S', 777));
        assert!(stat.exiting, "flag PF_EXITING is set");
    }

    #[test]
    fn a_zombie_that_a_signal_ended() {
        for (arg, killed) in [("100", true), ("0", false)] {
            let mut child = std::process::Command::new("sleep")
                .arg(arg)
                .spawn()
                .unwrap();
            let pid = child.id() as i32;
            if killed {
                assert!(!stat(pid).unwrap().killed);
                child.kill().unwrap();
            }
            while stat(pid).unwrap().state != 'Z' {
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            assert_eq!(stat(pid).unwrap().killed, killed);
            child.wait().unwrap();
        }
    }

    #[test]
    fn own_process_is_alive() {
        let pid = std::process::id() as i32;
        assert!(!stat(pid).unwrap().exiting);
        let status = status(pid).unwrap();
        assert_eq!((status.tgid, status.tracer), (pid, 0));
        assert_eq!(status.ns_pids.first(), Some(&pid));
        assert!(status.rss > 0);
        assert!(stat(i32::MAX).is_none());
    }

    #[test]
    fn driver_facts() {
        let text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: 12.2.0\n";
        assert_eq!(parse_driver_version(text).as_deref(), Some("580.159.04"));
        let text = "Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-00010203-0405-0607-0809-0a0b0c0d0e0f\nDevice Minor: \t 3\n";
        let (minor, uuid) = parse_gpu_information(text).unwrap();
        assert_eq!((minor, uuid.0[15]), (3, 15));
    }

    proptest! {
        #[test]
        fn any_text_is_harmless(text in "\\PC{0,200}") {
            let _ = parse_stat(&text);
            let _ = parse_status(&text);
            let _ = parse_driver_version(&text);
            let _ = parse_gpu_information(&text);
        }
    }
}
