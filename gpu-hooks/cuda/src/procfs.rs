//! Reads the few facts of `/proc/PID` that plugin and agent need, each read once and bounded.
//!
//! Unlike the plan, they look at live processes by pid, on this host only.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};

use cryopod_host::files::Host;
use cryopod_host::processes::stat::{Stat, StatusFile};

use crate::gpus::gpu::GpuUuid;
use crate::gpus::nvidia;

fn text(path: &str) -> io::Result<String> {
    Host::system().text(path)
}

pub fn stat(pid: i32) -> Option<Stat> {
    Stat::read(&Host::system(), pid)
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
pub struct ProcessStatus {
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

pub fn status(pid: i32) -> io::Result<ProcessStatus> {
    let status = StatusFile::from(text(&format!("/proc/{pid}/status"))?);
    let kib = |name| status.number::<u64>(name).unwrap_or(0);
    Ok(ProcessStatus {
        comm: status.field("Name").unwrap_or_default().to_owned(),
        tgid: status.number("Tgid").unwrap_or(0),
        tracer: status.number("TracerPid").unwrap_or(0),
        ns_pids: status.numbers("NSpid").unwrap_or_default(),
        seccomp: status.number("Seccomp").unwrap_or(0),
        rss: kib("RssAnon")
            .saturating_add(kib("RssShmem"))
            .saturating_mul(1024),
    })
}

pub fn comm(pid: i32) -> String {
    let comm = Host::system().line(format!("/proc/{pid}/comm"));
    comm.unwrap_or_else(|| "?".to_owned())
}

pub fn pids() -> Vec<i32> {
    numbers("/proc")
}

/// Every thread of a process, the main one included.
pub fn threads(pid: i32) -> Vec<i32> {
    numbers(&format!("/proc/{pid}/task"))
}

fn numbers(directory: &str) -> Vec<i32> {
    let names = Host::system().names(directory);
    names.iter().filter_map(|n| n.parse().ok()).collect()
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

/// The GPUs of the host by device minor.
pub fn gpus_by_minor() -> BTreeMap<u32, GpuUuid> {
    let gpus = nvidia::gpus(&Host::system()).into_iter();
    gpus.filter_map(|gpu| Some((u32::try_from(gpu.minor?).ok()?, gpu.id.parse().ok()?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn stat_with_a_hostile_name() {
        let text = "12 (a) R (x y) S 1 12 12 0 -1 4194564 1 2 3 4 5 6 7 8 20 0 1 0 777 0 0 0 0 0 0 0 0 256";
        let stat = Stat::parse(text).unwrap();
        assert_eq!((stat.state, stat.start_time), ('S', 777));
        assert!(stat.exiting, "flag PF_EXITING is set");
        assert!(
            stat.kill_pending,
            "SIGKILL is in the set of pending signals"
        );
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
        let stat_of = stat(pid).unwrap();
        assert!(!stat_of.exiting && !stat_of.kill_pending);
        let status = status(pid).unwrap();
        assert_eq!((status.tgid, status.tracer), (pid, 0));
        assert_eq!(status.ns_pids.first(), Some(&pid));
        assert!(status.rss > 0);
        assert!(stat(i32::MAX).is_none());
    }
}
