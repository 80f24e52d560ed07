//! Writes large files past the page cache, so that fsync is short and the workloads' page cache stays.
//!
//! On ext4 and xfs, files that are not read again soon bypass the page cache. An archive would push the workloads'
//! pages out, and the kernel would have to find, clear and copy each page for nothing. On other file systems the module
//! asks the kernel early to start write-back.

mod behind;

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::ops::{Deref, DerefMut};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use self::behind::{Behind, Refused};

/// Dirty bytes after which the kernel is asked to start write-back.
const WRITE_BACK_BYTES: u64 = 32 << 20;
const DIRECT_BYTES: usize = 2 << 20;
/// Smaller data is copied and written together with what follows.
const UNCOPIED_BYTES: usize = 1 << 20;
/// Offset, length and memory address of a direct write are multiples of this. No disk needs more.
const ALIGN: usize = 4096;

/// Memory that is aligned for direct I/O.
#[derive(Debug, Default)]
pub(crate) struct Aligned {
    memory: Vec<u8>,
    skip: usize,
    len: usize,
}

impl Aligned {
    /// Allocates `len` zero bytes.
    pub(crate) fn new(len: usize) -> Self {
        let memory = vec![0; len + ALIGN];
        let skip = memory.as_ptr().align_offset(ALIGN).min(ALIGN);
        Self { memory, skip, len }
    }
}

impl Deref for Aligned {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.memory[self.skip..self.skip + self.len]
    }
}

impl DerefMut for Aligned {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.skip..self.skip + self.len]
    }
}

/// Writes a file so that the last sync has little left to do. Call [`Write::flush`] at the end.
pub(crate) struct Through {
    file: File,
    at: u64,
    /// Write-back was started up to this offset.
    started: u64,
    direct: Option<Direct>,
    /// Threads keep the disk busy.
    busy: bool,
}

struct Direct {
    memory: Aligned,
    have: usize,
    /// `O_DIRECT` is set and some data was written with it.
    on: bool,
    behind: Option<Behind>,
}

impl Through {
    /// For a file that is read again soon.
    pub(crate) fn cached(file: File) -> io::Result<Self> {
        let at = (&file).stream_position()?;
        Ok(Self {
            file,
            at,
            started: at,
            direct: None,
            busy: false,
        })
    }

    /// For a file that is not read again soon.
    pub(crate) fn new(file: File) -> io::Result<Self> {
        let direct = has_direct(&file).then(|| Direct {
            memory: Aligned::default(),
            have: 0,
            on: false,
            behind: None,
        });
        Ok(Self {
            direct,
            ..Self::cached(file)?
        })
    }

    /// Keeps the disk busy with threads. Only for a file that is written alone.
    pub(crate) fn alone(self) -> Self {
        Self { busy: true, ..self }
    }

    fn buffered(&mut self, data: &[u8]) -> io::Result<()> {
        self.file.write_all_at(data, self.at)?;
        self.at += data.len() as u64;
        if self.at - self.started >= WRITE_BACK_BYTES {
            let (from, len) = (self.started as i64, (self.at - self.started) as i64);
            // SAFETY: a plain system call on an open file. It starts write-back and does not wait. After an error the
            // final sync does all of it.
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

    /// Writes the full buffer past the page cache.
    fn write_full(&mut self) -> io::Result<()> {
        let Some(direct) = &mut self.direct else {
            return Ok(());
        };
        direct.have = 0;
        let memory = std::mem::take(&mut direct.memory);
        if self.busy && direct.on && direct.behind.is_none() {
            // Without threads it continues synchronously.
            direct.behind = Behind::new(&self.file).ok();
            self.busy = direct.behind.is_some();
        }
        if let Some(behind) = &mut direct.behind {
            let written = behind.write(memory, self.at)?;
            self.at += DIRECT_BYTES as u64;
            self.started = self.at;
            match written {
                Ok(other) => direct.memory = other,
                Err(refused) => self.give_up(&refused)?,
            }
            return Ok(());
        }
        self.write_direct(&memory)?;
        if let Some(direct) = &mut self.direct {
            direct.memory = memory;
        }
        Ok(())
    }

    /// Writes through the page cache from now on.
    fn give_up(&mut self, refused: &Refused) -> io::Result<()> {
        self.direct = None;
        set_direct(&self.file, false)?;
        refused.write(&self.file)
    }

    /// Writes aligned data past the page cache, or through it if the file system refuses.
    fn write_direct(&mut self, data: &[u8]) -> io::Result<()> {
        let Some(direct) = &mut self.direct else {
            return self.buffered(data);
        };
        if !direct.on && set_direct(&self.file, true).is_ok() {
            direct.on = true;
        }
        let written = match direct.on {
            true => self.file.write_all_at(data, self.at),
            false => Err(io::ErrorKind::InvalidInput.into()),
        };
        match written {
            Ok(()) => {
                self.at += data.len() as u64;
                self.started = self.at;
                Ok(())
            }
            // This file cannot do direct I/O: use the page cache from now on.
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => {
                if direct.on {
                    set_direct(&self.file, false)?;
                }
                self.direct = None;
                self.buffered(data)
            }
            Err(e) => Err(e),
        }
    }
}

impl Write for Through {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        // The bytes before the first aligned offset go through the page cache.
        let ahead = (self.at.next_multiple_of(ALIGN as u64) - self.at) as usize;
        let Some(direct) = &mut self.direct else {
            self.buffered(data)?;
            return Ok(data.len());
        };
        if ahead > 0 {
            let n = data.len().min(ahead);
            self.buffered(&data[..n])?;
            return Ok(n);
        }
        // Writes aligned data without a copy.
        let uncopied = !self.busy && direct.have == 0;
        if uncopied && data.len() >= UNCOPIED_BYTES && data.as_ptr().addr().is_multiple_of(ALIGN) {
            let n = data.len().min(DIRECT_BYTES) / ALIGN * ALIGN;
            self.write_direct(&data[..n])?;
            return Ok(n);
        }
        if direct.memory.is_empty() {
            direct.memory = Aligned::new(DIRECT_BYTES);
        }
        let n = data.len().min(DIRECT_BYTES - direct.have);
        direct.memory[direct.have..direct.have + n].copy_from_slice(&data[..n]);
        direct.have += n;
        if direct.have == DIRECT_BYTES {
            self.write_full()?;
        }
        Ok(n)
    }

    /// Writes the rest. Leaves the file positioned at its end, with its old flags.
    fn flush(&mut self) -> io::Result<()> {
        if let Some(mut direct) = self.direct.take() {
            let refused = direct.behind.as_mut().map(Behind::rest).transpose()?;
            if direct.on {
                set_direct(&self.file, false)?;
            }
            refused.map_or(Ok(()), |r| r.write(&self.file))?;
            self.buffered(&direct.memory[..direct.have])?;
        }
        self.file.seek(SeekFrom::Start(self.at)).map(drop)
    }
}

/// Returns true if the file is on a file system that is known to handle direct I/O well.
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
                for len in [0, 1, 4096, 100_000, DIRECT_BYTES, 9 * DIRECT_BYTES + 777] {
                    for (piece, busy) in [(70_001, false), (70_001, true), (len.max(1), false)] {
                        let mut file = tempfile::tempfile_in(dir).unwrap();
                        file.write_all(&content(start)).unwrap();
                        let mut data = Aligned::new(len);
                        data.copy_from_slice(&content(len));
                        let mut out = Through::new(file.try_clone().unwrap()).unwrap();
                        if busy {
                            out = out.alone();
                        }
                        for piece in data.chunks(piece) {
                            out.write_all(piece).unwrap();
                        }
                        out.flush().unwrap();
                        // The file is an ordinary one again, positioned at its end.
                        file.write_all(b"end").unwrap();
                        let mut back = Vec::new();
                        file.seek(SeekFrom::Start(0)).unwrap();
                        file.read_to_end(&mut back).unwrap();
                        assert!(back == [content(start), data.to_vec(), b"end".to_vec()].concat());
                    }
                }
            }
        }
    }
}
