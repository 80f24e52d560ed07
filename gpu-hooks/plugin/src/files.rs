//! Dumps and reopens NVIDIA device files that CRIU cannot dump: those of NVML users, and those that a forked child
//! inherited from a CUDA process and never uses. They hold no state worth keeping: path and flags are recorded, and the
//! node is opened again.

use crate::session::{Failed, failure};
use cryopod_cuda::messages::image::{FileRecord, is_device_path};
use std::ffi::CString;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};

/// Major of `/dev/nvidia0` and `/dev/nvidiactl`; those of the other nodes differ between hosts.
const NVIDIA_MAJOR: u32 = 195;

/// Flags that matter when a device node is opened again.
const KEPT_FLAGS: i32 = libc::O_ACCMODE | libc::O_NONBLOCK | libc::O_SYNC | libc::O_APPEND;

fn stat(fd: RawFd) -> std::io::Result<libc::stat> {
    let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: fills the structure on success.
    if unsafe { libc::fstat(fd, stat.as_mut_ptr()) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: filled, the call succeeded.
    Ok(unsafe { stat.assume_init() })
}

fn is_char_device(stat: &libc::stat) -> bool {
    stat.st_mode & libc::S_IFMT == libc::S_IFCHR
}

/// DUMP_EXT_FILE: returns the record of the file, or `None` when it is not one of NVIDIA's.
pub fn describe(fd: BorrowedFd<'_>, id: i32) -> Result<Option<FileRecord>, Failed> {
    let raw = fd.as_raw_fd();
    let failed = |what: String| failure("device file", None, what);
    let stat = stat(raw).map_err(|error| failed(error.to_string()))?;
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
    // SAFETY: reads the flags of an open file.
    let flags = unsafe { libc::fcntl(raw, libc::F_GETFL) };
    if flags < 0 {
        return Err(failed(format!(
            "{path}: {}",
            std::io::Error::last_os_error()
        )));
    }
    // SAFETY: asks for the position; devices without one answer -1.
    let pos = unsafe { libc::lseek(raw, 0, libc::SEEK_CUR) }.max(0);
    Ok(Some(FileRecord {
        id,
        path,
        flags,
        pos,
    }))
}

/// RESTORE_EXT_FILE: opens the device node again, in the process being restored.
pub fn reopen(record: &FileRecord) -> Result<OwnedFd, Failed> {
    let failed = |what: String| failure("device file", None, format!("{}: {what}", record.path));
    let last = || std::io::Error::last_os_error().to_string();
    if !is_device_path(&record.path) {
        return Err(failed("no NVIDIA device node".into()));
    }
    let path = CString::new(record.path.as_str()).map_err(|error| failed(error.to_string()))?;
    // SAFETY: a NUL-terminated path; no file is created.
    let fd = unsafe { libc::open(path.as_ptr(), (record.flags & KEPT_FLAGS) | libc::O_CLOEXEC) };
    if fd < 0 {
        return Err(failed(last()));
    }
    // SAFETY: just opened, owned by nobody else.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let stat = stat(fd.as_raw_fd()).map_err(|error| failed(error.to_string()))?;
    if !is_char_device(&stat) {
        return Err(failed("not a device".into()));
    }
    if record.pos > 0 {
        // SAFETY: moves the position; a device without one answers -1, which does no harm.
        unsafe { libc::lseek(fd.as_raw_fd(), record.pos, libc::SEEK_SET) };
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
