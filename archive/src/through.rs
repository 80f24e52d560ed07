//! Writing a large file without leaving all of it to the last sync.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::AsRawFd;

/// Dirty bytes after which the system is asked to start writing them to disk.
const WRITE_BACK_BYTES: u64 = 32 << 20;

/// A file that is written through, so that the last sync has little left to do.
pub(crate) struct Through {
    file: File,
    at: u64,
    started: u64,
}

impl Through {
    pub(crate) fn new(file: File) -> io::Result<Self> {
        let at = (&file).stream_position()?;
        Ok(Self {
            file,
            at,
            started: at,
        })
    }
}

impl Write for Through {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let n = self.file.write(data)?;
        self.at += n as u64;
        if self.at - self.started >= WRITE_BACK_BYTES {
            let (from, len) = (self.started as i64, (self.at - self.started) as i64);
            // SAFETY: a plain system call on an open file. It starts the writing and does not wait; an error means
            // that the sync at the end does all of it.
            unsafe {
                libc::sync_file_range(
                    self.file.as_raw_fd(),
                    from,
                    len,
                    libc::SYNC_FILE_RANGE_WRITE,
                )
            };
            self.started = self.at;
        }
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
