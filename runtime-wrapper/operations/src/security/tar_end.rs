//! Tells a whole tar from one that was cut off.
//!
//! `tar::Archive` takes the end of the file at a header for the end of the tar. It also leaves unread what follows the
//! end mark, and gzip compares its checksum only there.

use std::io::{self, BufRead, Read, Seek, SeekFrom};

use flate2::bufread::GzDecoder;

/// Most bytes after the end mark. tar fills its last record with zeros: 10 KiB, unless it is told otherwise.
const MAX_REST: u64 = 1 << 20;

/// Notes whether the input of a `tar::Archive` ended before the tar's end mark.
pub struct EndCheck<R> {
    input: R,
    cut_off: bool,
}

impl<R: Read> EndCheck<R> {
    pub fn new(input: R) -> Self {
        Self {
            input,
            cut_off: false,
        }
    }

    /// Call it after the last entry.
    ///
    /// # Errors
    /// There was no end mark, or a decompressor finds damage behind it.
    pub fn finish(mut self) -> io::Result<()> {
        if self.cut_off {
            return Err(cut_off());
        }
        drain(&mut self.input)
    }
}

impl<R: Read> Read for EndCheck<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let read = self.input.read(buf)?;
        self.cut_off |= read == 0 && !buf.is_empty();
        Ok(read)
    }
}

impl<R: Seek> Seek for EndCheck<R> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.input.seek(to)
    }
}

/// Reads a file as gzip does: all its members, and no zeros behind one, with which tar fills its last record.
pub struct GzipMembers<R>(Option<GzDecoder<R>>);

impl<R: BufRead> GzipMembers<R> {
    pub fn new(input: R) -> Self {
        Self(Some(GzDecoder::new(input)))
    }
}

impl<R: BufRead> Read for GzipMembers<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        while let Some(member) = &mut self.0 {
            let read = member.read(buf)?;
            if read > 0 || buf.is_empty() {
                return Ok(read);
            }
            let input = self.0.take().map(GzDecoder::into_inner);
            self.0 = match input {
                Some(mut input) => skip_zeros(&mut input)?.then(|| GzDecoder::new(input)),
                None => None,
            };
        }
        Ok(0)
    }
}

/// Returns true if something follows.
fn skip_zeros(input: &mut impl BufRead) -> io::Result<bool> {
    loop {
        let bytes = input.fill_buf()?;
        let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
        let (is_end, is_other) = (bytes.is_empty(), zeros < bytes.len());
        input.consume(zeros);
        if is_end || is_other {
            return Ok(is_other);
        }
    }
}

/// Reads what follows a tar's end mark, so that a decompressor compares its checksum.
pub fn drain(input: &mut impl Read) -> io::Result<()> {
    let rest = io::copy(&mut input.take(MAX_REST + 1), &mut io::sink())?;
    if rest > MAX_REST {
        return Err(invalid("more than 1 MiB follow its end mark"));
    }
    Ok(())
}

pub fn cut_off() -> io::Error {
    invalid("it has no end mark; it is cut off")
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8]) -> Result<usize, String> {
        let mut archive = tar::Archive::new(EndCheck::new(io::Cursor::new(bytes)));
        let entries = archive.entries_with_seek().unwrap();
        let count = entries.filter(|entry| entry.is_ok()).count();
        let end = archive.into_inner().finish();
        end.map(|()| count).map_err(|e| e.to_string())
    }

    #[test]
    fn only_an_end_mark_ends_a_tar() {
        let mut tar = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_size(3);
        tar.append_data(&mut header, "a", &b"abc"[..]).unwrap();
        let mut whole = tar.into_inner().unwrap();
        assert_eq!(read(&whole), Ok(1));
        for length in [0, 600, 1024] {
            let e = read(&whole[..length]).unwrap_err();
            assert!(e.contains("cut off"), "{length}: {e}");
        }
        whole.resize(whole.len() + MAX_REST as usize, 0);
        let e = read(&whole).unwrap_err();
        assert!(e.contains("more than 1 MiB"), "{e}");
    }
}
