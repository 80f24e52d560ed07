//! Reads tar: ustar, pax and GNU long names, as the engines write them; everything else is refused.
//!
//! The `tar` crate decodes the header's fields and the pax records. Its reader is not used: it takes long names of any
//! size into memory, and passes on entries that do not belong in a checkpoint.

use std::io::{self, Read};

use tar::{EntryType, Header, PaxExtensions};

use crate::bytes::stream::Stream;
use crate::error::Bad;
use crate::format::entry::{Entry, EntryKind, check_link, clean_name};
use crate::format::limits::Limits;

/// Largest extended header (long name, pax records), in bytes.
const MAX_EXTENDED: u64 = 64 << 10;
const BLOCK: u64 = 512;

pub(crate) struct TarReader<S> {
    stream: S,
    limits: Limits,
    at: u64,
    /// Bytes of the current entry not yet read.
    left: u64,
    /// Bytes after the current entry, up to the next block.
    padding: u64,
    name: String,
    entries: u64,
    layer: Option<usize>,
}

#[derive(Default)]
struct Extended {
    name: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    any: bool,
}

impl<S: Stream> TarReader<S> {
    pub(crate) fn new(stream: S, limits: &Limits, layer: Option<usize>) -> Self {
        Self {
            stream,
            limits: limits.clone(),
            at: 0,
            left: 0,
            padding: 0,
            name: String::new(),
            entries: 0,
            layer,
        }
    }

    /// Returns the next entry, and skips the rest of the one before. `None` at the end mark.
    pub(crate) fn next(&mut self) -> io::Result<Option<Entry>> {
        self.leave()?;
        let mut extended = Extended::default();
        loop {
            let start = self.at;
            let Some(header) = self.header()? else {
                if extended.any {
                    return Err(Bad::DanglingPax.into());
                }
                return Ok(None);
            };
            let field =
                |field| move |_: io::Error| io::Error::from(Bad::TarField { field, at: start });
            let size = header.entry_size().map_err(field("size"))?;
            match header.entry_type() {
                EntryType::GNULongName => extended.name = Some(self.long(size, start)?),
                EntryType::GNULongLink => extended.link = Some(self.long(size, start)?),
                EntryType::XHeader => self.pax(size, start, &mut extended)?,
                EntryType::XGlobalHeader => {
                    // Accepts at most comments and times: a name or a size for all entries makes no sense.
                    let mut global = Extended::default();
                    self.pax(size, start, &mut global)?;
                    if global.name.is_some() || global.link.is_some() || global.size.is_some() {
                        return Err(Bad::Pax(start).into());
                    }
                    continue;
                }
                kind => {
                    self.entries += 1;
                    if self.entries > self.limits.entries {
                        return Err(Bad::TooManyEntries(self.limits.entries).into());
                    }
                    match self.entry(&header, kind, extended, size, start)? {
                        Some(entry) => return Ok(Some(entry)),
                        None => {
                            extended = Extended::default();
                            continue;
                        }
                    }
                }
            }
            extended.any = true;
        }
    }

    /// Offset of the current entry's content in the stream.
    pub(crate) fn position(&self) -> u64 {
        self.at
    }

    /// Reads and drops what follows the end mark, so that the decompressor makes its own checks.
    pub(crate) fn finish(mut self) -> io::Result<S> {
        io::copy(&mut self.stream, &mut io::sink())?;
        Ok(self.stream)
    }

    fn leave(&mut self) -> io::Result<()> {
        let rest = self.left + self.padding;
        let content = self.left;
        self.left = 0;
        self.padding = 0;
        if rest > 0 {
            self.stream.skip(rest).map_err(|e| match e.kind() {
                io::ErrorKind::UnexpectedEof => Bad::TruncatedFile {
                    name: self.name.clone(),
                    missing: content.max(1),
                }
                .into(),
                _ => e,
            })?;
            self.at += rest;
        }
        Ok(())
    }

    /// Reads the next header block; `None` at the end mark.
    fn header(&mut self) -> io::Result<Option<Header>> {
        let mut header = Header::new_old();
        let mut have = 0;
        while have < BLOCK as usize {
            match self.stream.read(&mut header.as_mut_bytes()[have..]) {
                Ok(0) => break,
                Ok(n) => have += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        match have {
            0 => {
                return Err(Bad::NoEndMark {
                    entries: self.entries,
                }
                .into());
            }
            512 => {}
            _ => return Err(Bad::TruncatedHeader(self.at).into()),
        }
        if header.as_bytes().iter().all(|b| *b == 0) {
            self.at += BLOCK;
            return Ok(None);
        }
        let sum: u32 = header
            .as_bytes()
            .iter()
            .enumerate()
            .map(|(i, b)| {
                if (148..156).contains(&i) {
                    32
                } else {
                    u32::from(*b)
                }
            })
            .sum();
        if header.cksum().ok() != Some(sum) {
            return Err(Bad::TarChecksum(self.at).into());
        }
        self.at += BLOCK;
        Ok(Some(header))
    }

    fn extended(&mut self, size: u64, start: u64) -> io::Result<Vec<u8>> {
        if size > MAX_EXTENDED {
            return Err(Bad::PaxTooLarge {
                bytes: size,
                max: MAX_EXTENDED,
                at: start,
            }
            .into());
        }
        let padded = size.next_multiple_of(BLOCK);
        let mut data = vec![0; padded as usize];
        self.stream
            .read_exact(&mut data)
            .map_err(|e| match e.kind() {
                io::ErrorKind::UnexpectedEof => Bad::TruncatedHeader(start).into(),
                _ => e,
            })?;
        self.at += padded;
        data.truncate(size as usize);
        Ok(data)
    }

    fn long(&mut self, size: u64, start: u64) -> io::Result<Vec<u8>> {
        let mut data = self.extended(size, start)?;
        while data.last() == Some(&0) {
            data.pop();
        }
        Ok(data)
    }

    fn pax(&mut self, size: u64, start: u64, into: &mut Extended) -> io::Result<()> {
        let data = self.extended(size, start)?;
        for record in PaxExtensions::new(&data) {
            let record = record.map_err(|_| Bad::Pax(start))?;
            let value = record.value_bytes();
            match record.key_bytes() {
                b"path" => into.name = Some(value.to_vec()),
                b"linkpath" => into.link = Some(value.to_vec()),
                b"size" => {
                    let size = std::str::from_utf8(value).ok().and_then(|v| v.parse().ok());
                    into.size = Some(size.ok_or(Bad::Pax(start))?);
                }
                key if key.starts_with(b"GNU.sparse.") => {
                    let name = into.name.as_deref().unwrap_or_default();
                    return Err(Bad::Sparse(String::from_utf8_lossy(name).into_owned()).into());
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn entry(
        &mut self,
        header: &Header,
        kind: EntryType,
        extended: Extended,
        size: u64,
        start: u64,
    ) -> io::Result<Option<Entry>> {
        let raw = extended
            .name
            .unwrap_or_else(|| header.path_bytes().into_owned());
        let name = clean_name(&raw, &self.limits)?;
        let size = extended.size.unwrap_or(size);
        let link = || {
            let target = extended.link.clone();
            target
                .or_else(|| header.link_name_bytes().map(|l| l.into_owned()))
                .unwrap_or_default()
        };
        let mode = header.mode().map_err(|_| Bad::TarField {
            field: "mode",
            at: start,
        })? & 0o777;
        let kind = match kind {
            // Before POSIX a directory was a file whose name ends with a slash.
            EntryType::Regular if raw.ends_with(b"/") => EntryKind::Directory,
            EntryType::Regular | EntryType::Continuous => EntryKind::File,
            EntryType::Directory => EntryKind::Directory,
            EntryType::Symlink => check_link(&name, &link(), &self.limits)?,
            EntryType::Link => {
                let target = String::from_utf8_lossy(&link()).into_owned();
                return Err(Bad::HardLink { name, target }.into());
            }
            EntryType::Char | EntryType::Block => return Err(Bad::Device(name).into()),
            EntryType::Fifo => return Err(Bad::Fifo(name).into()),
            EntryType::GNUSparse => return Err(Bad::Sparse(name).into()),
            other => {
                return Err(Bad::UnknownType {
                    name,
                    kind: other.as_byte(),
                }
                .into());
            }
        };
        if kind != EntryKind::File && size != 0 {
            return Err(Bad::ContentOfDirectory { name, bytes: size }.into());
        }
        if name.is_empty() {
            // The root of the archive itself.
            return if kind == EntryKind::Directory {
                Ok(None)
            } else {
                Err(Bad::EmptyName.into())
            };
        }
        let Some(padded) = size.checked_next_multiple_of(BLOCK) else {
            return Err(Bad::TarField {
                field: "size",
                at: start,
            }
            .into());
        };
        self.left = size;
        self.padding = padded - size;
        self.name.clone_from(&name);
        Ok(Some(Entry {
            name,
            kind,
            size,
            mode,
            layer: self.layer,
        }))
    }
}

impl<S: Stream> Read for TarReader<S> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let len = usize::try_from(self.left)
            .unwrap_or(usize::MAX)
            .min(buf.len());
        if len == 0 {
            return Ok(0);
        }
        let n = self.stream.read(&mut buf[..len])?;
        if n == 0 {
            return Err(Bad::TruncatedFile {
                name: self.name.clone(),
                missing: self.left,
            }
            .into());
        }
        self.left -= n as u64;
        self.at += n as u64;
        Ok(n)
    }
}
