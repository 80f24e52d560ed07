//! Dumps and reopens NVIDIA device files that CRIU cannot dump: those of NVML users, and those that a forked child
//! inherited from a CUDA process and never uses. They hold no state worth keeping: path and flags are recorded, and the
//! node is opened again.

use crate::session::{Failed, failure};
use cryopod_cuda::messages::image::{FileRecord, is_device_path};
use rustix::fs::{FileType, Mode, OFlags, SeekFrom, Stat, fcntl_getfl, fstat, open, seek, tell};
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};

/// Major of `/dev/nvidia0` and `/dev/nvidiactl`; those of the other nodes differ between hosts.
const NVIDIA_MAJOR: u32 = 195;

/// Flags that matter when a device node is opened again.
const KEPT_FLAGS: i32 = libc::O_ACCMODE | libc::O_NONBLOCK | libc::O_SYNC | libc::O_APPEND;

fn is_char_device(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice
}

/// DUMP_EXT_FILE: returns the record of the file, or `None` when it is not one of NVIDIA's.
pub fn describe(fd: BorrowedFd<'_>, id: i32) -> Result<Option<FileRecord>, Failed> {
    let raw = fd.as_raw_fd();
    let failed = |what: String| failure("device file", None, what);
    let stat = fstat(fd).map_err(|error| failed(error.to_string()))?;
    if !is_char_device(&stat) {
        return Ok(None);
    }
    let link = std::fs::read_link(format!("/proc/self/fd/{raw}"))
        .map_err(|error| failed(error.to_string()))?;
    let path = link.to_string_lossy().into_owned();
    if !is_device_path(&path) {
        if libc::major(stat.st_rdev) == NVIDIA_MAJOR {
            return Err(failed(format!(
                "`{path}` is one of NVIDIA's under a name of its own"
            )));
        }
        return Ok(None);
    }
    let flags = fcntl_getfl(fd).map_err(|error| failed(format!("{path}: {error}")))?;
    Ok(Some(FileRecord {
        id,
        path,
        flags: flags.bits().cast_signed(),
        // Devices without a position answer an error.
        pos: tell(fd).map_or(0, u64::cast_signed).max(0),
    }))
}

/// RESTORE_EXT_FILE: opens the device node again, in the process being restored.
pub fn reopen(record: &FileRecord) -> Result<OwnedFd, Failed> {
    let failed = |what: String| failure("device file", None, format!("{}: {what}", record.path));
    if !is_device_path(&record.path) {
        return Err(failed("no NVIDIA device node".into()));
    }
    let flags = OFlags::from_bits_retain((record.flags & KEPT_FLAGS).cast_unsigned());
    let fd = open(&*record.path, flags | OFlags::CLOEXEC, Mode::empty())
        .map_err(|error| failed(error.to_string()))?;
    let stat = fstat(&fd).map_err(|error| failed(error.to_string()))?;
    if !is_char_device(&stat) {
        return Err(failed("not a device".into()));
    }
    if record.pos > 0 {
        // A device without a position answers an error, which does no harm.
        let _ = seek(&fd, SeekFrom::Start(record.pos.cast_unsigned()));
    }
    Ok(fd)
}

pub fn into_criu(fd: OwnedFd) -> i32 {
    fd.into_raw_fd()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn other_files_are_left_to_others() {
        let null = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(describe(null.as_fd(), 1).unwrap(), None);
        let file = tempfile::tempfile().unwrap();
        assert_eq!(describe(file.as_fd(), 1).unwrap(), None);
    }

    #[test]
    fn only_device_nodes_are_opened() {
        let record = |path: &str| FileRecord {
            id: 1,
            path: path.into(),
            flags: 0,
            pos: 0,
        };
        assert!(reopen(&record("/etc/passwd")).is_err());
        assert!(reopen(&record("/dev/nvidia-none-such")).is_err());
    }
}
