//! Handles mappings of NVIDIA's device nodes in processes that do not use CUDA.
//!
//! A child that a CUDA process forks (PyTorch's DataLoader workers, say) inherits most of its mappings of
//! `/dev/nvidia0` and `/dev/nvidiactl` (36 of 37 on an H200, driver 580). They are the driver's own, queues and
//! registers, and CUDA refuses to work in such a child. Pinned host memory is no such mapping: it is shared memory,
//! which CRIU keeps. So the mappings are not dumped, and a restored child finds empty memory in their place.

use crate::session::{Failed, failure};
use cryopod_cuda::messages::image::is_device_path;
use cryopod_host::files::Host;
use cryopod_host::processes::maps::{self, Mapping};
use std::ffi::CStr;
use std::fs::{self, File};
use std::os::fd::{IntoRawFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};

/// `/dev/zero`, which CRIU dumps by itself.
const ZERO: u64 = libc::makedev(1, 5);

/// Counts a process's mappings of NVIDIA's device nodes, except those that CRIU dumps by itself.
pub fn count(pid: i32) -> u64 {
    let mut count = 0;
    let _ = maps::for_each(&Host::system(), pid, |Mapping { range, name, .. }| {
        let node = || fs::metadata(format!("/proc/{pid}/map_files/{range}"));
        let is_node = is_device_path(name)
            && node().is_ok_and(|m| m.file_type().is_char_device() && m.rdev() != ZERO);
        count += u64::from(is_node);
    });
    count
}

/// HANDLE_DEVICE_VMA: returns true if the file is one of NVIDIA's nodes.
pub fn is_ours(fd: RawFd) -> bool {
    let link = format!("/proc/self/fd/{fd}");
    let device = fs::metadata(&link).is_ok_and(|m| m.file_type().is_char_device());
    device && fs::read_link(&link).is_ok_and(|path| is_device_path(&path.to_string_lossy()))
}

/// Returns true if CRIU's name of a file, which may lack the first slash or have two, is that of one of NVIDIA's nodes.
pub fn names_ours(path: &CStr) -> bool {
    let path = path.to_string_lossy();
    is_device_path(&format!("/{}", path.trim_start_matches('/')))
}

/// UPDATE_VMA_MAP: returns a descriptor of memory that is empty at first. CRIU maps and closes it. It needs one for
/// each mapping of a device, for it gives each a file of its own (`fd_id_generate_special`).
pub fn empty() -> Result<RawFd, Failed> {
    match File::options().read(true).write(true).open("/dev/zero") {
        // The descriptor becomes CRIU's.
        Ok(file) => Ok(file.into_raw_fd()),
        Err(error) => {
            let what = format!("/dev/zero: {error}");
            Err(failure("device mapping", None, what))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_without_them_has_none() {
        assert_eq!(count(i32::try_from(std::process::id()).unwrap()), 0);
        assert_eq!(count(-1), 0);
        let null = fs::File::open("/dev/null").unwrap();
        assert!(!is_ours(std::os::fd::AsRawFd::as_raw_fd(&null)));
    }

    #[test]
    fn names_as_criu_writes_them() {
        assert!(names_ours(c"dev/nvidia0"));
        assert!(names_ours(c"//dev/nvidiactl"));
        assert!(!names_ours(c"/dev/dri/renderD128"));
        assert!(!names_ours(c"/dev/nvidia0/../sda"));
    }
}
