//! Dumps and reopens NVIDIA device files that CRIU cannot dump: those of NVML users, and those that a forked child
//! inherited from a CUDA process and never uses. They hold no state worth keeping: path and flags are recorded, and the
//! node is opened again.

use crate::session::{Failed, failure};
use cryopod_cuda::messages::image::{FileRecord, is_device_path};
use cryopod_host::nodes::{self, Class, NVIDIA_MAJOR, NodeRole, Vendor};
use rustix::fs::{FileType, Mode, OFlags, SeekFrom, Stat, fcntl_getfl, fstat, open, seek, tell};
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};

/// Flags that matter when a device node is opened again.
const KEPT_FLAGS: i32 = libc::O_ACCMODE | libc::O_NONBLOCK | libc::O_SYNC | libc::O_APPEND;

fn is_char_device(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice
}

/// Returns the name by which a node is opened again. libcuda removes a node whose name is another GPU's, as a move leaves
/// it; whoever still holds that one needs the GPU's own.
fn current_name(path: &str, number: u64) -> String {
    let is_fixed = |_: &&str| u64::from(libc::major(number)) == NVIDIA_MAJOR;
    match path.strip_suffix(" (deleted)").filter(is_fixed) {
        Some(old) if nodes::classify(old) == Some(Class::Known(Vendor::Nvidia, NodeRole::Gpu)) => {
            nodes::native(Vendor::Nvidia, libc::minor(number).into())
        }
        name => name.unwrap_or(path).to_owned(),
    }
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
    let path = current_name(&link.to_string_lossy(), stat.st_rdev);
    if !is_device_path(&path) {
        if u64::from(libc::major(stat.st_rdev)) == NVIDIA_MAJOR {
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
    fn a_removed_node_is_opened_by_its_gpus_name() {
        let of = |path: &str, major, minor| current_name(path, libc::makedev(major, minor));
        assert_eq!(of("/dev/nvidia0 (deleted)", 195, 1), "/dev/nvidia1");
        assert_eq!(of("/dev/nvidiactl (deleted)", 195, 255), "/dev/nvidiactl");
        assert_eq!(of("/dev/nvidia0", 195, 1), "/dev/nvidia0", "it is there");
        let other = "/dev/nvidia0 (deleted)";
        assert_eq!(of(other, 1, 3), other, "no node of NVIDIA's");
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
