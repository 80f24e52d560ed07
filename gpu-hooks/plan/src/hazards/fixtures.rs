//! What the tests of hazards examine: processes and their descriptors, as a scan has them.

use cryopod_host::processes::{Fd, FileFacts, Process, Scan};

/// No process has this pid.
pub const PID: i32 = 700_000_001;

pub fn process(pid: i32, fds: Vec<Fd>) -> Process {
    Process {
        pid,
        comm: "python3".into(),
        state: 'S',
        threads: 1,
        fds,
        ..Process::default()
    }
}

/// Returns a scan of one process.
pub fn scan(fds: Vec<Fd>) -> Scan {
    Scan {
        processes: vec![process(PID, fds)],
    }
}

pub fn fd(number: u32, target: &str) -> Fd {
    Fd {
        number: number.to_string(),
        target: target.into(),
        ..Fd::default()
    }
}

/// Returns an open file of mount 50.
pub fn file(target: &str, kind: u32, links: u64, bytes: u64, inode: u64) -> Fd {
    let device = (0, 48);
    Fd {
        mount: Some(50),
        file: Some(FileFacts {
            kind,
            links,
            bytes,
            device,
            inode,
        }),
        ..fd(3, target)
    }
}

pub fn texts<T: ToString>(refusals: &[T]) -> Vec<String> {
    refusals.iter().map(ToString::to_string).collect()
}
