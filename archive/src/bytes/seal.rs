//! Writes and reads the payload of an `age` stream with the cipher of the crate `ring`: that of the crate `age` takes 1.7
//! times as long, more than anything else that is done to a layer.
//!
//! The crate still makes and reads the header. Its payload key is HKDF-SHA-256 of the file key with the nonce that follows the
//! header; pieces of 64 KiB are encrypted each with its number and a mark of the last one
//! (<https://age-encryption.org/v1>, "Payload").

use std::cell::Cell;
use std::collections::HashSet;
use std::io::{self, Read, Seek, SeekFrom, Write};

use age::secrecy::ExposeSecret;
use age::{DecryptError, Decryptor, EncryptError, Encryptor};
use age_core::format::{FileKey, Stanza};
use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, Salt};

use super::lease::{Lease, Spare};
use crate::error::Bad;

/// Bytes of a piece before encryption.
const PIECE: usize = 64 << 10;
/// Bytes by which encryption makes a piece longer.
const TAG: usize = 16;
/// Bytes of an encrypted piece.
const SEALED: usize = PIECE + TAG;
/// Bytes of the pieces that are handed over together: waking a thread for one takes longer than the copy.
const PART: usize = 4 * PIECE;
/// Bytes between the header and the payload.
pub(super) const PAYLOAD_NONCE: usize = 16;
const LABEL: &[u8] = b"payload";

/// The key of a payload, whose nonce ends the header.
fn payload_key(header: &[u8], file_key: [u8; 16]) -> io::Result<LessSafeKey> {
    let nonce = &header[header.len().saturating_sub(PAYLOAD_NONCE)..];
    let file_key = Salt::new(HKDF_SHA256, nonce).extract(&file_key);
    let key = file_key.expand(&[LABEL], &CHACHA20_POLY1305);
    let key = key.map_err(|_| io::Error::other("no key of this length"))?;
    Ok(LessSafeKey::new(UnboundKey::from(key)))
}

fn nonce(number: u64, is_last: bool) -> Nonce {
    let mut nonce = [0; 12];
    nonce[3..11].copy_from_slice(&number.to_be_bytes());
    nonce[11] = is_last.into();
    Nonce::assume_unique_for_key(nonce)
}

/// A recipient that tells the file's key, too.
struct ToldKey<'r> {
    recipient: &'r dyn age::Recipient,
    key: &'r Cell<[u8; 16]>,
}

impl age::Recipient for ToldKey<'_> {
    fn wrap_file_key(
        &self,
        file_key: &FileKey,
    ) -> Result<(Vec<Stanza>, HashSet<String>), EncryptError> {
        self.key.set(*file_key.expose_secret());
        self.recipient.wrap_file_key(file_key)
    }
}

/// The writing side of an `age` stream. Without [`Self::finish`] nobody can read what it has written.
pub(super) struct SealedWriter<'s, F> {
    key: LessSafeKey,
    number: u64,
    /// Sealed pieces, and from `open` on one that is not full, or may be the last.
    part: Lease<()>,
    open: usize,
    spare: &'s Spare,
    put: F,
}

impl<'s, F: FnMut(Lease<()>) -> io::Result<()>> SealedWriter<'s, F> {
    /// Makes the header. `put` gets the stream in parts, in buffers of `spare`.
    pub(super) fn new<'r>(
        recipients: impl Iterator<Item = &'r dyn age::Recipient>,
        spare: &'s Spare,
        put: F,
    ) -> io::Result<Self> {
        let key = Cell::default();
        let told: Vec<_> = recipients
            .map(|recipient| ToldKey {
                recipient,
                key: &key,
            })
            .collect();
        let told = told.iter().map(|one| one as &dyn age::Recipient);
        let encryptor = Encryptor::with_recipients(told).map_err(io::Error::other)?;
        let mut part = empty(spare);
        // It has no payload yet, and gets none from the crate.
        drop(encryptor.wrap_output(&mut *part)?);
        Ok(Self {
            key: payload_key(&part, key.take())?,
            number: 0,
            open: part.len(),
            part,
            spare,
            put,
        })
    }

    fn seal(&mut self, is_last: bool) -> io::Result<()> {
        let nonce = nonce(self.number, is_last);
        let piece = &mut self.part[self.open..];
        let tag = self
            .key
            .seal_in_place_separate_tag(nonce, Aad::empty(), piece);
        let tag = tag.map_err(|_| io::Error::other("a piece cannot be encrypted"))?;
        self.part.extend_from_slice(tag.as_ref());
        self.number += 1;
        self.open = self.part.len();
        if is_last || self.open >= PART {
            self.open = 0;
            (self.put)(std::mem::replace(&mut self.part, empty(self.spare)))?;
        }
        Ok(())
    }

    /// Writes the last piece.
    pub(super) fn finish(mut self) -> io::Result<()> {
        self.seal(true)
    }
}

fn empty(spare: &Spare) -> Lease<()> {
    let mut part = spare.lease(());
    part.clear();
    part.reserve_exact(PART + PIECE);
    part
}

impl<F: FnMut(Lease<()>) -> io::Result<()>> Write for SealedWriter<'_, F> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        // The last piece is full or not, but never empty beside others: here more is known to follow.
        if self.part.len() - self.open == PIECE && !data.is_empty() {
            self.seal(false)?;
        }
        let n = data.len().min(PIECE - (self.part.len() - self.open));
        self.part.extend_from_slice(&data[..n]);
        Ok(n)
    }

    /// Does nothing: a piece that is not full is the last.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// An identity that tells the file's key, too.
struct TellingIdentity<'i> {
    identity: &'i dyn age::Identity,
    key: &'i Cell<[u8; 16]>,
}

type Unwrapped = Option<Result<FileKey, DecryptError>>;

impl TellingIdentity<'_> {
    fn told(&self, unwrapped: Unwrapped) -> Unwrapped {
        if let Some(Ok(file_key)) = &unwrapped {
            self.key.set(*file_key.expose_secret());
        }
        unwrapped
    }
}

impl age::Identity for TellingIdentity<'_> {
    fn unwrap_stanza(&self, stanza: &Stanza) -> Unwrapped {
        self.told(self.identity.unwrap_stanza(stanza))
    }

    fn unwrap_stanzas(&self, stanzas: &[Stanza]) -> Unwrapped {
        self.told(self.identity.unwrap_stanzas(stanzas))
    }
}

/// The reading side of an `age` stream. Its end proves that it is whole.
pub(super) struct SealedReader<R> {
    key: LessSafeKey,
    input: R,
    /// A piece, decrypted, and how far it is read.
    piece: Vec<u8>,
    at: usize,
    /// The piece after it, encrypted. The last has none.
    next: Vec<u8>,
    /// The number of `next`.
    number: u64,
    /// The last piece was decrypted.
    is_proved: bool,
    has_failed: bool,
}

fn damaged(what: &str) -> io::Error {
    Bad::Encryption(what.into()).into()
}

impl<R: Read> SealedReader<R> {
    /// Opens a stream with this header, [`PAYLOAD_NONCE`] included, which `input` begins with.
    ///
    /// # Errors
    /// Of the header: none of the keys fits, or it was changed.
    pub(super) fn new<'i>(
        header: &[u8],
        identities: impl Iterator<Item = &'i dyn age::Identity>,
        mut input: R,
    ) -> Result<Self, DecryptError> {
        let key = Cell::default();
        let told: Vec<_> = identities
            .map(|identity| TellingIdentity {
                identity,
                key: &key,
            })
            .collect();
        let told = told.iter().map(|one| one as &dyn age::Identity);
        drop(Decryptor::new_buffered(header)?.decrypt(told)?);
        io::copy(&mut (&mut input).take(header.len() as u64), &mut io::sink())?;
        let mut reader = Self {
            key: payload_key(header, key.take())?,
            input,
            piece: Vec::with_capacity(SEALED),
            at: 0,
            next: Vec::with_capacity(SEALED),
            number: 0,
            is_proved: false,
            has_failed: false,
        };
        reader.read_next()?;
        Ok(reader)
    }

    /// Reads a piece, in one call where the input can: `read_to_end` makes four.
    fn read_next(&mut self) -> io::Result<()> {
        self.next.resize(SEALED, 0);
        let mut have = 0;
        let read = loop {
            match self.input.read(&mut self.next[have..]) {
                Ok(0) => break Ok(()),
                Ok(n) => have += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => break Err(e),
            }
        };
        self.next.truncate(have);
        read
    }

    /// Decrypts the next piece. Returns false at the end.
    ///
    /// # Errors
    /// It cannot be read, or not decrypted. Then nothing more is read until [`Self::go_to`].
    fn open_next(&mut self) -> io::Result<bool> {
        if self.has_failed {
            return Err(damaged("a piece of it could not be read"));
        }
        if self.next.is_empty() {
            return match self.is_proved {
                true => Ok(false),
                false => Err(damaged("its end is missing")),
            };
        }
        std::mem::swap(&mut self.piece, &mut self.next);
        let opened = self.read_next().and_then(|()| self.open());
        // Nothing of a piece that was not proved is ever read.
        self.piece.truncate(*opened.as_ref().unwrap_or(&0));
        self.at = 0;
        self.has_failed = opened.is_err();
        let bytes = opened?;
        if bytes == 0 && self.number > 0 {
            return Err(damaged("its last piece is empty"));
        }
        self.number += 1;
        self.is_proved |= self.next.is_empty();
        Ok(true)
    }

    /// Decrypts the piece, and returns its bytes.
    fn open(&mut self) -> io::Result<usize> {
        let nonce = nonce(self.number, self.next.is_empty());
        let opened = self.key.open_in_place(nonce, Aad::empty(), &mut self.piece);
        let opened = opened.map(|bytes| bytes.len());
        opened.map_err(|_| damaged("a piece was changed, or the end is missing"))
    }
}

impl<R: Read> Read for SealedReader<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        while self.at == self.piece.len() {
            if buf.is_empty() || !self.open_next()? {
                return Ok(0);
            }
        }
        let n = buf.len().min(self.piece.len() - self.at);
        buf[..n].copy_from_slice(&self.piece[self.at..self.at + n]);
        self.at += n;
        Ok(n)
    }
}

impl<R: Read + Seek> SealedReader<R> {
    /// Returns the bytes of the stream whose payload begins at `start` of the input. Decrypts the last piece, which proves
    /// it.
    pub(super) fn measure(&mut self, start: u64) -> io::Result<u64> {
        let sealed = self.input.seek(SeekFrom::End(0))?.saturating_sub(start);
        let pieces = sealed.div_ceil(SEALED as u64);
        let last = pieces.saturating_sub(1);
        self.go_to(start, last * PIECE as u64)?;
        self.open_next()?;
        Ok(last * PIECE as u64 + self.piece.len() as u64)
    }

    /// Reads on at this byte of the stream.
    ///
    /// # Errors
    /// There is no piece with it.
    pub(super) fn go_to(&mut self, start: u64, at: u64) -> io::Result<()> {
        let number = at / PIECE as u64;
        let within = (at % PIECE as u64) as usize;
        if number + 1 != self.number || self.piece.is_empty() {
            let at = start.saturating_add(number.saturating_mul(SEALED as u64));
            self.input.seek(SeekFrom::Start(at))?;
            (self.number, self.at) = (number, 0);
            self.piece.clear();
            self.has_failed = false;
            self.read_next()?;
            if within == 0 {
                return Ok(());
            }
            self.open_next()?;
        }
        if within > self.piece.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.at = within;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use age::x25519;
    use std::io::Cursor;

    const LENGTHS: [usize; 7] = [0, 1, PIECE - 1, PIECE, PIECE + 1, 4 * PIECE, 9 * PIECE + 7];

    fn data(len: usize) -> Vec<u8> {
        (0..len).map(|n| (n * 31 % 251) as u8).collect()
    }

    fn sealed(data: &[u8], to: &[&x25519::Identity]) -> Vec<u8> {
        let recipients: Vec<_> = to.iter().map(|one| one.to_public()).collect();
        let recipients = recipients.iter().map(|r| r as &dyn age::Recipient);
        let (spare, mut file) = (Spare::default(), Vec::new());
        let put = |part: Lease<()>| {
            file.extend_from_slice(&part);
            Ok(())
        };
        let mut stream = SealedWriter::new(recipients, &spare, put).unwrap();
        for part in data.chunks(50_000) {
            stream.write_all(part).unwrap();
        }
        stream.finish().unwrap();
        file
    }

    /// Bytes of the header and the nonce.
    fn header(file: &[u8]) -> usize {
        let mac = file.windows(5).position(|w| w == b"\n--- ").unwrap() + 1;
        let line = file[mac..].iter().position(|byte| *byte == b'\n').unwrap();
        mac + line + 1 + PAYLOAD_NONCE
    }

    fn opened<'f>(file: &'f [u8], key: &x25519::Identity) -> SealedReader<Cursor<&'f [u8]>> {
        let keys = std::iter::once(key as &dyn age::Identity);
        SealedReader::new(&file[..header(file)], keys, Cursor::new(file)).unwrap()
    }

    fn read(mut stream: impl Read) -> io::Result<Vec<u8>> {
        let mut found = Vec::new();
        stream.read_to_end(&mut found).map(|_| found)
    }

    #[test]
    fn the_crate_age_reads_it() {
        let [one, other] = [(); 2].map(|()| x25519::Identity::generate());
        for len in LENGTHS {
            let data = data(len);
            let file = sealed(&data, &[&one, &other]);
            for identity in [&one, &other] {
                let decryptor = Decryptor::new(&file[..]).unwrap();
                let keys = std::iter::once(identity as &dyn age::Identity);
                assert!(
                    read(decryptor.decrypt(keys).unwrap()).unwrap() == data,
                    "{len}"
                );
                assert!(read(opened(&file, identity)).unwrap() == data, "{len}");
            }
        }
    }

    #[test]
    fn what_the_crate_age_writes_is_read() {
        let key = x25519::Identity::generate();
        let recipient = key.to_public();
        for len in LENGTHS {
            let encryptor = Encryptor::with_recipients(std::iter::once(&recipient as _)).unwrap();
            let mut file = Vec::new();
            let mut stream = encryptor.wrap_output(&mut file).unwrap();
            stream.write_all(&data(len)).unwrap();
            stream.finish().unwrap();
            assert!(read(opened(&file, &key)).unwrap() == data(len), "{len}");
        }
    }

    #[test]
    fn parts_are_read_in_any_order() {
        let key = x25519::Identity::generate();
        for len in LENGTHS {
            let (data, file) = (data(len), sealed(&data(len), &[&key]));
            let start = header(&file) as u64;
            let mut stream = opened(&file, &key);
            assert_eq!(stream.measure(start).unwrap(), len as u64);
            for at in [
                len,
                0,
                len / 2,
                len.saturating_sub(1),
                len / 2 + 1,
                PIECE,
                5,
                len,
            ] {
                let at = at.min(len);
                // Also one after the other, without a byte read.
                stream.go_to(start, at as u64 / 2).unwrap();
                stream.go_to(start, at as u64).unwrap();
                assert!(read(&mut stream).unwrap() == data[at..], "{at} of {len}");
            }
        }
    }

    #[test]
    fn a_changed_or_shorter_stream_is_refused() {
        let key = x25519::Identity::generate();
        for len in LENGTHS {
            let file = sealed(&data(len), &[&key]);
            let start = header(&file);
            let ends = [
                start,
                start + 1,
                start + SEALED,
                start + 2 * SEALED,
                file.len() - 1,
            ];
            for end in ends.into_iter().filter(|end| *end < file.len()) {
                read(opened(&file[..end], &key)).unwrap_err();
                opened(&file[..end], &key)
                    .measure(start as u64)
                    .unwrap_err();
            }
            for at in [start, start + TAG / 2, file.len() - 1] {
                let mut changed = file.clone();
                changed[at] ^= 1;
                let mut stream = opened(&changed, &key);
                read(&mut stream).unwrap_err();
                // Nor afterwards.
                read(&mut stream).unwrap_err();
            }
            let longer = [&file[..], &[0]].concat();
            read(opened(&longer, &key)).unwrap_err();
            // What comes after another's piece is not read either.
            let inserted = [&file[..start], &[7; SEALED], &file[start..]].concat();
            let mut stream = opened(&inserted, &key);
            for _ in 0..3 {
                read(&mut stream).unwrap_err();
            }
        }
    }
}
