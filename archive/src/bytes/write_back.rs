//! Writes large files so that fsync is short and the workloads' page cache stays.
//!
//! The kernel writes windows of a file while the next is filled. Otherwise an archive would push the workloads' pages out
//! of memory, and a full memory would throttle its writer.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;

use nix::errno::Errno;
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

const WINDOW: u64 = 8 << 20;
/// So many windows are written at once.
const AT_ONCE: u64 = 8;
const START: libc::c_uint = libc::SYNC_FILE_RANGE_WRITE;
const END: libc::c_uint =
    START | libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WAIT_AFTER;

/// Writes a file, at its position, so that the last sync has little left to do.
pub(crate) struct WriteBack {
    file: File,
    /// Where the window begins that is being filled, counted from the first byte written.
    window: u64,
    at: u64,
    is_read_soon: bool,
    first: u64,
}

impl WriteBack {
    /// For a file that is read again soon.
    pub(crate) fn cached(file: File) -> io::Result<Self> {
        let new = Self::new(file)?;
        Ok(Self {
            is_read_soon: true,
            ..new
        })
    }

    /// For a file that is not read again soon.
    pub(crate) fn new(mut file: File) -> io::Result<Self> {
        let first = io::Seek::stream_position(&mut file)?;
        Ok(Self {
            file,
            window: first,
            at: first,
            is_read_soon: false,
            first,
        })
    }

    /// Has the kernel write the window. Waits for an earlier one, of which nothing stays in memory then.
    fn next_window(&mut self) -> io::Result<()> {
        let _ = self.sync(self.window, START);
        if !self.is_read_soon && self.window >= self.first + AT_ONCE * WINDOW {
            let before = self.window - AT_ONCE * WINDOW;
            waited(self.sync(before, END))?;
            let (from, len) = (before as i64, WINDOW as i64);
            let advice = PosixFadviseAdvice::POSIX_FADV_DONTNEED;
            let _ = posix_fadvise(&self.file, from, len, advice);
        }
        self.window += WINDOW;
        Ok(())
    }

    fn sync(&self, from: u64, how: libc::c_uint) -> Result<(), Errno> {
        let (fd, from, len) = (self.file.as_raw_fd(), from as i64, WINDOW as i64);
        // SAFETY: a plain system call on an open file.
        Errno::result(unsafe { libc::sync_file_range(fd, from, len, how) }).map(drop)
    }
}

/// Waiting takes an error of the disk from the file, so the final sync returns it no more. Where there is no waiting,
/// the final sync does all of it.
fn waited(done: Result<(), Errno>) -> io::Result<()> {
    match done {
        Err(Errno::ENOSYS | Errno::EINVAL | Errno::ESPIPE) => Ok(()),
        other => Ok(other?),
    }
}

impl Write for WriteBack {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let n = self.file.write(data)?;
        self.at += n as u64;
        while self.at - self.window >= WINDOW {
            self.next_window()?;
        }
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek, SeekFrom};

    fn content(len: usize) -> Vec<u8> {
        let block: Vec<u8> = (0..65_521).map(|i| (i * 7 + i / 251) as u8).collect();
        let mut all = block.repeat(len / block.len() + 1);
        all.truncate(len);
        all
    }

    #[test]
    fn an_error_that_waiting_takes_is_the_writers() {
        let code = |e| waited(Err(e)).err().and_then(|e| e.raw_os_error());
        assert_eq!(code(Errno::EIO), Some(libc::EIO));
        assert_eq!(code(Errno::ENOSPC), Some(libc::ENOSPC));
        assert_eq!(code(Errno::ENOSYS), None);
    }

    /// Once on the file system of the tests, once in memory.
    #[test]
    fn every_start_and_length() {
        let window = WINDOW as usize;
        for dir in ["/var/tmp", "/dev/shm"] {
            for (start, len) in [(0, 0), (512, 1), (5000, 10 * window + 777), (0, 9 * window)] {
                for (piece, is_read_soon) in [(70_001, false), (len.max(1), false), (70_001, true)]
                {
                    let mut file = tempfile::tempfile_in(dir).unwrap();
                    file.write_all(&content(start)).unwrap();
                    let copy = file.try_clone().unwrap();
                    let mut out = match is_read_soon {
                        true => WriteBack::cached(copy).unwrap(),
                        false => WriteBack::new(copy).unwrap(),
                    };
                    let data = content(len);
                    for piece in data.chunks(piece) {
                        out.write_all(piece).unwrap();
                    }
                    out.flush().unwrap();
                    file.write_all(b"end").unwrap();
                    let mut back = Vec::new();
                    file.seek(SeekFrom::Start(0)).unwrap();
                    file.read_to_end(&mut back).unwrap();
                    assert!(back == [content(start), data, b"end".to_vec()].concat());
                }
            }
        }
    }
}
