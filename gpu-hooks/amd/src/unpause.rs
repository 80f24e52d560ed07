//! Lets a process's queues run again that a checkpoint has left paused.
//!
//! CRIU's amdgpu plugin pauses the queues of a process when it saves the process's `/dev/kfd`, and lets them run again when
//! it has seen as many render nodes as it sees GPUs. If it fails in between, or if the process has fewer of them open, it
//! never does, and CRIU does not either: the process runs, and waits for its GPUs for ever.
//!
//! The KFD takes `UNPAUSE` from whoever traces the process, on the process's own descriptor (`kfd_ioctl` of the kernel's
//! amdkfd driver). A process whose queues are not paused answers with EINVAL.

use cryopod_host::pidfd;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::MetadataExt;

use cryopod_host::files::{Host, split_rdev};
use cryopod_host::nodes;
use cryopod_host::processes::Scan;

/// `struct kfd_ioctl_criu_args` of linux/kfd_ioctl.h.
#[repr(C)]
#[derive(Default)]
struct CriuArgs {
    devices: u64,
    bos: u64,
    priv_data: u64,
    priv_data_size: u64,
    num_devices: u32,
    num_bos: u32,
    num_objects: u32,
    pid: u32,
    op: u32,
}
const _: () = assert!(size_of::<CriuArgs>() == 56);

/// `AMDKFD_IOC_CRIU_OP`: `_IOWR('K', 0x22, struct kfd_ioctl_criu_args)`.
const CRIU_OP: libc::Ioctl = 0xc038_4b22_u32 as libc::Ioctl;
/// `KFD_CRIU_OP_UNPAUSE`.
const UNPAUSE: u32 = 2;

/// Lets the queues of these processes run. Processes that have no `/dev/kfd` open, or whose queues run, are left alone.
/// Returns what failed, one message a process.
pub fn unpause(host: &Host, pids: &[i32]) -> Vec<String> {
    if pids.is_empty() {
        return Vec::new();
    }
    let scan = Scan::of(host, pids);
    let mut failed = Vec::new();
    for process in &scan.processes {
        let mut kfd = process.fds.iter().filter_map(|fd| {
            let device = fd.device.filter(|device| is_kfd(host, *device))?;
            Some((fd.number.parse().ok()?, device))
        });
        let Some((fd, device)) = kfd.next() else {
            continue;
        };
        match in_a_tracer(process.pid, fd, device) {
            Ok(true) => tracing::info!(
                "process {} ({}): its queues were paused, and run again",
                process.pid,
                process.comm
            ),
            Ok(false) => {}
            // It has ended meanwhile.
            Err(e) if e.raw_os_error() == Some(libc::ESRCH) => {}
            Err(e) => failed.push(format!(
                "the GPU queues of process {} ({}) may still be paused: {e}",
                process.pid, process.comm
            )),
        }
    }
    failed
}

/// The kernel's own list decides: what a container calls kfd may be any device, to which the call means something else.
fn is_kfd(host: &Host, (major, minor): (u64, u64)) -> bool {
    minor == 0 && nodes::registered(host, "/dev/kfd", major).is_ok()
}

/// A thread of its own is the tracer: the kernel detaches its tracee when it ends, and the tracee never stops.
fn in_a_tracer(pid: i32, fd: RawFd, device: (u64, u64)) -> io::Result<bool> {
    std::thread::spawn(move || {
        // SAFETY: takes numbers. The tracee is not stopped, and no option is set that could harm it.
        if unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, 0, 0) } == -1 {
            return Err(io::Error::last_os_error());
        }
        let file = File::from(pidfd::take(pid, fd)?);
        // The process runs, and may have opened something else there.
        match split_rdev(file.metadata()?.rdev()) == device {
            true => call(&file),
            false => Ok(false),
        }
    })
    .join()
    .unwrap_or_else(|_| Err(io::Error::other("the thread has ended early")))
}

/// Returns whether the queues were paused.
fn call(kfd: &File) -> io::Result<bool> {
    let mut args = CriuArgs {
        op: UNPAUSE,
        ..CriuArgs::default()
    };
    // SAFETY: the argument is the structure that the operation reads and writes, and outlives the call.
    if unsafe { libc::ioctl(kfd.as_raw_fd(), CRIU_OP, &raw mut args) } == 0 {
        return Ok(true);
    }
    match io::Error::last_os_error() {
        e if e.raw_os_error() == Some(libc::EINVAL) => Ok(false),
        e => Err(e),
    }
}
