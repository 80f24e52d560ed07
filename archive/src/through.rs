//! Writing a large file so that it is on the disk soon after its last byte.
//!
//! On ext4 and xfs what has not to be read again soon goes past the page cache: an archive would push out the memory of
//! the workloads, and each of its pages would be found, cleared and copied for nothing. Elsewhere the system is
//! asked early to start writing.

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

/// Dirty bytes after which the system is asked to start writing them to disk.
const WRITE_BACK_BYTES: u64 = 32 << 20;
/// Bytes that go past the page cache at once.
const DIRECT_BYTES: usize = 2 << 20;
/// Place, length and memory of a direct write are multiples of this. No disk wants more.
const ALIGN: usize = 4096;

/// A file that is written through, so that the last sync has little left to do. [`Write::flush`] ends it.
pub(crate) struct Through {
    file: File,
    /// Where the next byte goes.
    at: u64,
    /// Up to here the system was asked to write.
    started: u64,
    direct: Option<Direct>,
}

/// What is to go past the page cache.
struct Direct {
    /// Holds [`DIRECT_BYTES`] from `skip` on, which is aligned.
    memory: Vec<u8>,
    skip: usize,
    have: usize,
    /// The file has been told.
    on: bool,
}

impl Through {
    /// A file that is read again soon.
    pub(crate) fn cached(file: File) -> io::Result<Self> {
        let at = (&file).stream_position()?;
        Ok(Self {
            file,
            at,
            started: at,
            direct: None,
        })
    }

    /// A file that is not.
    pub(crate) fn new(file: File) -> io::Result<Self> {
        let direct = has_direct(&file).then(|| {
            let memory = vec![0; DIRECT_BYTES + ALIGN];
            let skip = memory.as_ptr().align_offset(ALIGN).min(ALIGN);
            Direct {
                memory,
                skip,
                have: 0,
                on: false,
            }
        });
        Ok(Self {
            direct,
            ..Self::cached(file)?
        })
    }

    fn buffered(&mut self, data: &[u8]) -> io::Result<()> {
        self.file.write_all_at(data, self.at)?;
        self.at += data.len() as u64;
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
        Ok(())
    }

    /// Writes the memory, which is full, past the cache; by way of the cache where that is refused.
    fn write_direct(&mut self) -> io::Result<()> {
        let Some(mut direct) = self.direct.take() else {
            return Ok(());
        };
        if !direct.on && set_direct(&self.file, true).is_ok() {
            direct.on = true;
        }
        let data = &direct.memory[direct.skip..direct.skip + direct.have];
        let written = match direct.on {
            true => self.file.write_all_at(data, self.at),
            false => Err(io::ErrorKind::InvalidInput.into()),
        };
        match written {
            Ok(()) => {
                self.at += data.len() as u64;
                self.started = self.at;
                direct.have = 0;
                self.direct = Some(direct);
                Ok(())
            }
            // From now on as a file without: this one cannot do it.
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => {
                if direct.on {
                    set_direct(&self.file, false)?;
                }
                self.buffered(data)
            }
            Err(e) => Err(e),
        }
    }
}

impl Write for Through {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        // What lies ahead of the first aligned place goes by way of the cache.
        let ahead = (self.at.next_multiple_of(ALIGN as u64) - self.at) as usize;
        let full = match &mut self.direct {
            Some(direct) if ahead == 0 => {
                let from = direct.skip + direct.have;
                let n = data.len().min(DIRECT_BYTES - direct.have);
                direct.memory[from..from + n].copy_from_slice(&data[..n]);
                direct.have += n;
                if direct.have < DIRECT_BYTES {
                    return Ok(n);
                }
                n
            }
            Some(_) => {
                let n = data.len().min(ahead);
                self.buffered(&data[..n])?;
                return Ok(n);
            }
            None => {
                self.buffered(data)?;
                return Ok(data.len());
            }
        };
        self.write_direct()?;
        Ok(full)
    }

    /// Writes what is left, and leaves the file at its end and as it was.
    fn flush(&mut self) -> io::Result<()> {
        if let Some(direct) = self.direct.take() {
            if direct.on {
                set_direct(&self.file, false)?;
            }
            self.buffered(&direct.memory[direct.skip..direct.skip + direct.have])?;
        }
        self.file.seek(SeekFrom::Start(self.at)).map(drop)
    }
}

/// Is it a file on a file system that is known to write past the cache well?
fn has_direct(file: &File) -> bool {
    use nix::sys::statfs::{EXT4_SUPER_MAGIC, XFS_SUPER_MAGIC, fstatfs};
    fstatfs(file).is_ok_and(|s| [EXT4_SUPER_MAGIC, XFS_SUPER_MAGIC].contains(&s.filesystem_type()))
}

fn set_direct(file: &File, on: bool) -> io::Result<()> {
    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    let mut flags = OFlag::from_bits_retain(fcntl(file, FcntlArg::F_GETFL)?);
    flags.set(OFlag::O_DIRECT, on);
    fcntl(file, FcntlArg::F_SETFL(flags))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    fn content(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 7 + i / 251) as u8).collect()
    }

    /// Once on the file system of the tests, once in memory.
    #[test]
    fn every_start_and_length() {
        for dir in ["/var/tmp", "/dev/shm"] {
            for start in [0, 512, 4096, 5000] {
                for len in [0, 1, 4096, 100_000, DIRECT_BYTES, 3 * DIRECT_BYTES + 777] {
                    let mut file = tempfile::tempfile_in(dir).unwrap();
                    file.write_all(&content(start)).unwrap();
                    let data = content(len);
                    let mut out = Through::new(file.try_clone().unwrap()).unwrap();
                    for piece in data.chunks(70_001) {
                        out.write_all(piece).unwrap();
                    }
                    out.flush().unwrap();
                    // The file is an ordinary one again, at its end.
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
