//! Detects descriptors that CRIU does not dump: files of the kernel without a path, devices, `O_PATH` descriptors of
//! special files, and epoll files with watches of closed descriptors.

use std::collections::HashSet;

use crate::refusal::Refusal;
use cryopod_host::files::Host;
use cryopod_host::nodes;
use cryopod_host::processes::{Fd, Process, Scan};

/// Files of the kernel that CRIU dumps (`dump_one_file`, files.c). BPF maps only where CRIU was built with libbpf; CRIU
/// checks that itself.
const DUMPED: [&str; 8] = [
    "[eventfd]",
    "[eventpoll]",
    "inotify",
    "[fanotify]",
    "[signalfd]",
    "[timerfd]",
    "[pidfd]",
    "bpf-map",
];
/// A GPU plugin handles those of its driver.
const DRIVERS: [&str; 6] = ["nvidia", "amdgpu", "drm", "kfd", "sync_file", "dmabuf"];

/// Majors of devices that CRIU dumps: memory (`/dev/null`), terminals, pseudo terminals, serial lines. GPU plugins
/// handle GPUs.
const MEMORY: u64 = 1;
const TERMINALS: [u64; 4] = [4, 5, 188, 204];
const PSEUDO_TERMINALS: std::ops::RangeInclusive<u64> = 128..=143;
/// `/dev/net/tun`, `/dev/autofs`.
const TUN: (u64, u64) = (10, 200);
const AUTOFS: (u64, u64) = (10, 235);
/// Majors of GPUs that never change: NVIDIA's, DRM's.
const GPUS: [u64; 2] = [195, 226];

/// `O_PATH` and `PIDFD_THREAD` of `<fcntl.h>`, as in `/proc/PID/fdinfo`.
const O_PATH: u64 = 0o10_000_000;
const PIDFD_THREAD: u64 = 0o200;
const KCMP_EPOLL_TFD: libc::c_int = 7;

/// Returns each kind once for each process.
pub(super) fn descriptors(scan: &Scan, host: &Host) -> Vec<Refusal> {
    let pids: HashSet<i32> = scan.processes.iter().map(|p| p.pid).collect();
    let mut refusals = Vec::new();
    for process in &scan.processes {
        let mut told = HashSet::new();
        for fd in &process.fds {
            let found = kernel_file(fd)
                .or_else(|| device_file(fd, host))
                .or_else(|| special_file(fd, host, process.pid))
                .or_else(|| pidfd(fd, host, process.pid, &pids))
                .or_else(|| stale_epoll(process, fd, host));
            if let Some((what, remedy)) = found
                && told.insert(what.clone())
            {
                refusals.push(Refusal::of(process, what, remedy));
            }
        }
    }
    refusals
}

type Finding = Option<(String, &'static str)>;

fn kernel_file(fd: &Fd) -> Finding {
    let name = fd.target.strip_prefix("anon_inode:")?;
    let known = DUMPED.contains(&name)
        || DRIVERS.iter().any(|driver| name.contains(driver))
        // These have a refusal of their own, with a remedy.
        || super::UNDUMPABLE.iter().any(|(start, ..)| fd.target.starts_with(start));
    (!known).then(|| {
        (
            format!("has a file open that CRIU cannot dump ({})", fd.target),
            "close it before the checkpoint",
        )
    })
}

fn device_file(fd: &Fd, host: &Host) -> Finding {
    let kind = fd.file.map(|f| f.kind);
    if kind == Some(libc::S_IFBLK) {
        let what = format!("has a block device open ({})", fd.target);
        return Some((what, "close it before the checkpoint: CRIU dumps none"));
    }
    let (major, minor) = fd.device?;
    let known = major == MEMORY
        || TERMINALS.contains(&major)
        || PSEUDO_TERMINALS.contains(&major)
        || GPUS.contains(&major)
        || [TUN, AUTOFS].contains(&(major, minor))
        || nodes::classify(fd.target.trim_end_matches(" (deleted)")).is_some()
        || super::UNDUMPABLE
            .iter()
            .any(|(start, ..)| fd.target.starts_with(start));
    let driver = driver_of(host, major);
    if known || DRIVERS.iter().any(|ours| driver.contains(ours)) {
        return None;
    }
    Some((
        format!(
            "has a device open that CRIU cannot dump ({}, {driver} {major}:{minor})",
            fd.target
        ),
        "close it before the checkpoint, or start the container without that device",
    ))
}

/// A socket or a pipe in a file system, held by its path alone (`O_PATH`): CRIU would treat it as a normal one.
fn special_file(fd: &Fd, host: &Host, pid: i32) -> Finding {
    let what = match fd.file?.kind {
        libc::S_IFSOCK => "Unix socket",
        libc::S_IFIFO if open_flags(fd, host, pid)? & O_PATH != 0 => "named pipe",
        _ => return None,
    };
    Some((
        format!("holds the path of a {what} open ({}, O_PATH)", fd.target),
        "close it before the checkpoint: CRIU cannot dump it",
    ))
}

fn open_flags(fd: &Fd, host: &Host, pid: i32) -> Option<u64> {
    let info = host
        .text(format!("/proc/{pid}/fdinfo/{}", fd.number))
        .ok()?;
    let flags = info.lines().find_map(|l| l.strip_prefix("flags:"))?;
    u64::from_str_radix(flags.trim(), 8).ok()
}

fn pidfd(fd: &Fd, host: &Host, pid: i32, pids: &HashSet<i32>) -> Finding {
    if fd.target != "anon_inode:[pidfd]" {
        return None;
    }
    if open_flags(fd, host, pid)? & PIDFD_THREAD != 0 {
        let what = "has a pidfd of a thread (PIDFD_THREAD)".to_owned();
        return Some((
            what,
            "close it before the checkpoint: CRIU dumps those of processes only",
        ));
    }
    let info = host
        .text(format!("/proc/{pid}/fdinfo/{}", fd.number))
        .ok()?;
    let of = info.lines().find_map(|l| l.strip_prefix("Pid:"))?;
    let of: i32 = of.trim().parse().ok()?;
    // -1: it has ended. 0: it is in no namespace that shows here.
    (of > 0 && !pids.contains(&of)).then(|| {
        (
            format!("has a pidfd of process {of}, which is not the container's"),
            "close it before the checkpoint: CRIU cannot restore it",
        )
    })
}

/// Detects an epoll file that watches something that the process has closed, and that still exists elsewhere: in a
/// child, in a message under way.
fn stale_epoll(process: &Process, fd: &Fd, host: &Host) -> Finding {
    if fd.target != "anon_inode:[eventpoll]" {
        return None;
    }
    let info = host
        .text(format!("/proc/{}/fdinfo/{}", process.pid, fd.number))
        .ok()?;
    let watched = info.lines().filter_map(|l| l.strip_prefix("tfd:"));
    let numbers = watched.filter_map(|l| l.split_whitespace().next()?.parse::<u32>().ok());
    let mut all: Vec<u32> = numbers.collect();
    all.sort_unstable();
    all.dedup();
    let open: HashSet<u32> = process
        .fds
        .iter()
        .filter_map(|f| f.number.parse().ok())
        .collect();
    let epoll: u32 = fd.number.parse().ok()?;
    let stale = all.into_iter().find(|number| {
        // CRIU takes any descriptor of the process that leads to the same file.
        !open.contains(number)
            && !open
                .iter()
                .any(|other| is_watched(process, epoll, *number, *other) != Some(false))
    })?;
    Some((
        format!(
            "has an epoll file (descriptor {epoll}) that watches descriptor {stale}, which this process has closed and another still has open"
        ),
        "take it off the list (EPOLL_CTL_DEL) before closing it: CRIU cannot dump the list",
    ))
}

/// Returns true if descriptor `other` leads to what the epoll file has under `number`. `None`: the kernel cannot say.
fn is_watched(process: &Process, epoll: u32, number: u32, other: u32) -> Option<bool> {
    let slot = [epoll, number, 0];
    let (pid, index) = (libc::c_long::from(process.pid), libc::c_ulong::from(other));
    // SAFETY: reads `slot`, a `struct kcmp_epoll_slot`.
    match unsafe {
        libc::syscall(
            libc::SYS_kcmp,
            pid,
            pid,
            KCMP_EPOLL_TFD,
            index,
            slot.as_ptr(),
        )
    } {
        0 => Some(true),
        1..=3 => Some(false),
        _ => None,
    }
}

fn driver_of(host: &Host, major: u64) -> String {
    let text = host.text("/proc/devices").unwrap_or_default();
    let lines = text.lines().take_while(|l| !l.starts_with("Block"));
    let mut pairs = lines.filter_map(|l| l.trim().split_once(' '));
    let found = pairs.find(|(number, _)| number.parse() == Ok(major));
    found
        .map_or("character device", |(_, name)| name)
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{fd, file, process, scan, texts};
    use super::*;
    use cryopod_test_files::TestFiles;

    fn of_kind(target: &str, kind: u32, device: Option<(u64, u64)>) -> Fd {
        let file = file(target, kind, 1, 0, 7);
        Fd { device, ..file }
    }

    fn host(fdinfo: &[(u32, &str)]) -> (tempfile::TempDir, Host) {
        let dir = tempfile::tempdir().unwrap();
        for (number, text) in fdinfo {
            dir.put(format!("proc/700000001/fdinfo/{number}"), text);
        }
        let devices = "Character devices:\n  1 mem\n116 alsa\n511 nvidia-uvm\n510 kfd\n\nBlock devices:\n  7 loop\n";
        dir.put("proc/devices", devices);
        let host = Host::at(dir.path());
        (dir, host)
    }

    fn told(host: &Host, fds: Vec<Fd>) -> Vec<String> {
        texts(&descriptors(&scan(fds), host))
    }

    #[test]
    fn what_criu_and_plugins_dump_passes() {
        let (_dir, host) = host(&[(3, "flags:\t0100002\n")]);
        let kernel = DUMPED.iter().filter(|n| **n != "[pidfd]");
        let mut fds: Vec<Fd> = kernel.map(|n| fd(3, &format!("anon_inode:{n}"))).collect();
        fds.push(fd(3, "anon_inode:[nvidia-something]"));
        fds.push(fd(3, "pipe:[7]"));
        for (target, device) in [
            ("/dev/null", (1, 3)),
            ("/dev/pts/0", (136, 0)),
            ("/dev/tty", (5, 0)),
            ("/dev/net/tun", (10, 200)),
            ("/dev/nvidia0", (195, 0)),
            ("/dev/nvidia-uvm", (511, 0)),
            ("/dev/of-another-name", (511, 0)),
            ("/dev/kfd", (510, 0)),
            ("/dev/dri/renderD128", (226, 128)),
        ] {
            fds.push(of_kind(target, libc::S_IFCHR, Some(device)));
        }
        fds.push(of_kind("/tmp/pipe", libc::S_IFIFO, None));
        fds.push(of_kind("/tmp/file", libc::S_IFREG, None));
        assert_eq!(told(&host, fds), [""; 0]);
    }

    #[test]
    fn what_nobody_dumps() {
        let (_dir, host) = host(&[(3, "pos:\t0\nflags:\t012000000\n")]);
        for (one, want) in [
            (
                fd(3, "anon_inode:[landlock-ruleset]"),
                "anon_inode:[landlock-ruleset]",
            ),
            (
                of_kind("/dev/snd/timer", libc::S_IFCHR, Some((116, 33))),
                "/dev/snd/timer, alsa 116:33",
            ),
            (
                of_kind("/dev/loop0", libc::S_IFBLK, None),
                "a block device open (/dev/loop0)",
            ),
            (
                of_kind("/run/x.sock", libc::S_IFSOCK, None),
                "the path of a Unix socket open (/run/x.sock",
            ),
            (
                of_kind("/run/fifo", libc::S_IFIFO, None),
                "the path of a named pipe open (/run/fifo",
            ),
        ] {
            let said = told(&host, vec![one.clone(), one]);
            assert_eq!(said.len(), 1, "{said:?}");
            assert!(
                said[0].contains("process 700000001 (python3): ") && said[0].contains(want),
                "{said:?}"
            );
        }
    }

    #[test]
    fn pidfds() {
        let of = |text: &str| {
            let (_dir, host) = host(&[(3, text)]);
            told(&host, vec![fd(3, "anon_inode:[pidfd]")])
        };
        assert_eq!(of("flags:\t02\nPid:\t700000001\nNSpid:\t1\n"), [""; 0]);
        assert_eq!(
            of("flags:\t02\nPid:\t-1\n"),
            [""; 0],
            "of one that has ended"
        );
        assert!(
            of("flags:\t02\nPid:\t12\n")[0].contains("of process 12, which is not the container's")
        );
        assert!(of("flags:\t0202\nPid:\t700000001\n")[0].contains("of a thread"));
    }

    #[test]
    fn an_epoll_file_that_watches_what_is_closed() {
        let text = "flags:\t02\ntfd:        5 events:       19 data:                5  pos:0 ino:1 sdev:f\ntfd:        6 events:       19 data:                6  pos:0 ino:1 sdev:f\n";
        let (_dir, host) = host(&[(4, text)]);
        let epoll = || fd(4, "anon_inode:[eventpoll]");
        assert_eq!(
            told(&host, vec![epoll(), fd(5, "pipe:[1]"), fd(6, "pipe:[1]")]),
            [""; 0]
        );
        // A real process would be asked about its other descriptors; without others there is none that it could be.
        let alone = process(700_000_001, Vec::new());
        let said = stale_epoll(&alone, &epoll(), &host).unwrap().0;
        assert!(
            said.contains("descriptor 4) that watches descriptor 5"),
            "{said}"
        );
    }

    #[test]
    fn the_kernel_tells_what_an_epoll_file_watches() {
        use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
        use std::os::fd::AsRawFd;
        let epoll = Epoll::new(EpollCreateFlags::empty()).unwrap();
        let (read, write) = nix::unistd::pipe().unwrap();
        epoll
            .add(&read, EpollEvent::new(EpollFlags::EPOLLIN, 0))
            .unwrap();
        let number = |fd: &dyn AsRawFd| u32::try_from(fd.as_raw_fd()).unwrap();
        let process = process(i32::try_from(std::process::id()).unwrap(), Vec::new());
        let watched = number(&read);
        let of = |other| is_watched(&process, number(&epoll.0), watched, other);
        assert_ne!(of(watched), Some(false));
        assert_ne!(of(number(&write)), Some(true));
    }
}
