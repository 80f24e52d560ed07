//! Mappings of NVIDIA's device nodes in processes that do not use CUDA.
//!
//! A child that a CUDA process forks (PyTorch's DataLoader workers, say) inherits most of its mappings of `/dev/nvidia0`
//! and `/dev/nvidiactl` (36 of 37 on an H200, driver 580). They are the driver's own, queues and registers, and CUDA
//! refuses to work in such a child. Pinned host memory is no such mapping: it is shared memory, which CRIU keeps. So
//! the mappings are not dumped, and a restored child finds empty memory in their place.
//!
//! CRIU asks for a descriptor of every mapping but uses it only where the file or its access differs from that of the
//! file mapping before; the others would stay open in the restored process. Where a run of one file begins is
//! therefore recorded.

use crate::session::{Failed, failure};
use cryopod_gpu_hooks::cuda::image::{MapsRecord, is_device_path};
use std::ffi::CStr;
use std::fs;
use std::os::fd::RawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};

/// `/dev/zero`, which CRIU dumps by itself.
const ZERO: u64 = libc::makedev(1, 5);

/// A line of `/proc/PID/maps` with a file.
#[derive(Debug, PartialEq, Eq)]
struct FileMap<'a> {
    range: &'a str,
    start: u64,
    file: (&'a str, &'a str),
    path: &'a str,
}

impl<'a> FileMap<'a> {
    /// `None` for memory without a file.
    fn parse(line: &'a str) -> Option<Self> {
        let mut words = line.splitn(6, ' ');
        let range = words.next()?;
        let start = u64::from_str_radix(range.split_once('-')?.0, 16).ok()?;
        let (dev, inode) = (words.nth(2)?, words.next()?);
        let path = words.next().unwrap_or_default().trim_start();
        (inode != "0").then_some(Self {
            range,
            start,
            file: (dev, inode),
            path,
        })
    }
}

/// Where the runs of device mappings begin. `look` tells of a mapping whether it is one and how its file is open.
fn runs<'a>(maps: &'a str, mut look: impl FnMut(&FileMap<'a>) -> (bool, u32)) -> Vec<u64> {
    let mut begin = Vec::new();
    let mut last = None;
    for map in maps.lines().filter_map(FileMap::parse) {
        let (device, mode) = look(&map);
        let this = Some((map.file, mode));
        if device && last != this {
            begin.push(map.start);
        }
        last = this;
    }
    begin
}

/// Where the runs of a process's mappings of NVIDIA's device nodes begin.
pub fn of(pid: i32) -> Vec<u64> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    if !maps.contains("/dev/nvidia") {
        return Vec::new();
    }
    runs(&maps, |map| {
        let link = format!("/proc/{pid}/map_files/{}", map.range);
        let mode = fs::symlink_metadata(&link).map_or(0, |m| m.mode() & 0o600);
        let device = is_device_path(map.path)
            && fs::metadata(&link)
                .is_ok_and(|m| m.file_type().is_char_device() && m.rdev() != ZERO);
        (device, mode)
    })
}

/// HANDLE_DEVICE_VMA: whether the file is one of NVIDIA's nodes.
pub fn is_ours(fd: RawFd) -> bool {
    let link = format!("/proc/self/fd/{fd}");
    let device = fs::metadata(&link).is_ok_and(|m| m.file_type().is_char_device());
    device && fs::read_link(&link).is_ok_and(|path| is_device_path(&path.to_string_lossy()))
}

/// What takes the place of a mapping.
#[derive(Debug, PartialEq, Eq)]
pub enum Replace {
    /// It is not one of these.
    NotOurs,
    /// What takes the place of the one before it.
    Goes,
    /// Memory of its own: a descriptor of `/dev/zero`.
    Zero,
}

/// UPDATE_VMA_MAP: what takes the place of this process's mapping of the file `path` at `address`.
pub fn replace(maps: &[MapsRecord], path: &CStr, pid: i32, address: u64) -> Replace {
    let path = format!("/{}", path.to_string_lossy().trim_start_matches('/'));
    if maps.is_empty() || !is_device_path(&path) {
        return Replace::NotOurs;
    }
    let mut known = maps.iter().filter(|m| m.ns_pid == pid).peekable();
    if known.peek().is_some() && !known.any(|m| m.runs.contains(&address)) {
        return Replace::Goes;
    }
    Replace::Zero
}

/// A descriptor of memory that is empty at first.
pub fn zero() -> Result<RawFd, Failed> {
    // SAFETY: a NUL-terminated path; no file is created. The descriptor becomes CRIU's.
    let fd = unsafe { libc::open(c"/dev/zero".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
    if fd < 0 {
        let error = std::io::Error::last_os_error();
        return Err(failure(
            "device mapping",
            None,
            format!("/dev/zero: {error}"),
        ));
    }
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From a forked child of PyTorch on an H200.
    const CHILD: &str = "\
00400000-00420000 r--p 00000000 fe:00 79246                              /usr/bin/python3.12
200000000-200600000 ---p 00000000 00:00 0 
200600000-200800000 rw-s 00000000 00:06 143                              /dev/nvidia0
200800000-204000000 rw-s 00000000 00:06 142                              /dev/nvidiactl
204600000-204800000 rw-s 00000000 00:06 142                              /dev/nvidiactl
7fe7a5800000-7fe7a5a00000 rw-s 00000000 00:01 2052                       /dev/zero (deleted)
7fe7ca600000-7fe7ca800000 rw-s 00000000 00:06 142                        /dev/nvidiactl
7feac128e000-7feac129e000 -w-s 00000000 00:06 143                        /dev/nvidia0
7feac16b1000-7feac16c1000 -w-s 00000000 00:06 143                        /dev/nvidia0
7feac277d000-7feac277e000 r--s 00000000 00:06 142                        /dev/nvidiactl
7ffec4ad2000-7ffec4af3000 rw-p 00000000 00:00 0                          [stack]
";

    #[test]
    fn a_run_begins_where_the_file_or_its_access_changes() {
        let device = |map: &FileMap<'_>| (is_device_path(map.path), 0o600);
        let begin = [
            0x2_0060_0000,
            0x2_0080_0000,
            0x7fe7_ca60_0000,
            0x7fea_c128_e000,
            0x7fea_c277_d000,
        ];
        assert_eq!(runs(CHILD, device), begin);
        let by_access = |map: &FileMap<'_>| {
            (
                is_device_path(map.path),
                u32::from(map.start == 0x2_0460_0000),
            )
        };
        let all = runs(CHILD, by_access);
        assert_eq!(all.len(), begin.len() + 1);
        assert!(all.contains(&0x2_0460_0000));
    }

    #[test]
    fn a_process_without_them_has_none() {
        assert!(of(i32::try_from(std::process::id()).unwrap()).is_empty());
        assert!(!is_ours(0));
    }

    #[test]
    fn a_mapping_is_replaced_once_a_run() {
        let maps = [MapsRecord {
            ns_pid: 7,
            runs: vec![0x1000],
        }];
        assert_eq!(replace(&maps, c"/dev/nvidia0", 7, 0x1000), Replace::Zero);
        assert_eq!(replace(&maps, c"dev/nvidia0", 7, 0x2000), Replace::Goes);
        // One that is not recorded: better a descriptor too many than none.
        assert_eq!(replace(&maps, c"//dev/nvidia0", 8, 0x2000), Replace::Zero);
        assert_eq!(
            replace(&maps, c"/dev/dri/renderD128", 7, 0x1000),
            Replace::NotOurs
        );
        assert_eq!(replace(&[], c"/dev/nvidia0", 7, 0x1000), Replace::NotOurs);
    }
}
