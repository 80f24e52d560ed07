//! Writes the payload of an `age` stream with the cipher of the crate `ring`: that of the crate `age` takes twice the time,
//! more than all else that is done to a layer.
//!
//! The crate still makes the header. Its payload key is HKDF-SHA-256 of the file key with the nonce that follows the
//! header; pieces of 64 KiB are encrypted each with its number and a mark of the last one
//! (<https://age-encryption.org/v1>, "Payload").

use std::cell::Cell;
use std::collections::HashSet;
use std::io::{self, Write};

use age::secrecy::ExposeSecret;
use age::{EncryptError, Encryptor};
use age_core::format::{FileKey, Stanza};
use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, Salt};

/// Bytes of a piece before encryption.
const PIECE: usize = 64 << 10;
const TAG: usize = 16;
const PAYLOAD_NONCE: usize = 16;
const LABEL: &[u8] = b"payload";

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
pub(super) struct SealedWriter<W> {
    key: LessSafeKey,
    number: u64,
    /// A piece that is not full, or may be the last one.
    piece: Vec<u8>,
    out: W,
}

impl<W: Write> SealedWriter<W> {
    /// Writes the header.
    pub(super) fn new<'r>(
        recipients: impl Iterator<Item = &'r dyn age::Recipient>,
        mut out: W,
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
        let mut header = Vec::new();
        // It has no payload yet, and gets none from the crate.
        drop(encryptor.wrap_output(&mut header)?);
        let nonce = &header[header.len().saturating_sub(PAYLOAD_NONCE)..];
        let file_key = Salt::new(HKDF_SHA256, nonce).extract(&key.take());
        let key = file_key.expand(&[LABEL], &CHACHA20_POLY1305);
        let key = key.map_err(|_| io::Error::other("no key of this length"))?;
        out.write_all(&header)?;
        Ok(Self {
            key: LessSafeKey::new(UnboundKey::from(key)),
            number: 0,
            piece: Vec::with_capacity(PIECE + TAG),
            out,
        })
    }

    fn seal(&mut self, is_last: bool) -> io::Result<()> {
        let mut nonce = [0; 12];
        nonce[3..11].copy_from_slice(&self.number.to_be_bytes());
        nonce[11] = is_last.into();
        let nonce = Nonce::assume_unique_for_key(nonce);
        let sealed = (self.key).seal_in_place_append_tag(nonce, Aad::empty(), &mut self.piece);
        sealed.map_err(|_| io::Error::other("a piece cannot be encrypted"))?;
        self.number += 1;
        self.out.write_all(&self.piece)?;
        self.piece.clear();
        Ok(())
    }

    /// Writes the last piece, and returns where it went.
    pub(super) fn finish(mut self) -> io::Result<W> {
        self.seal(true)?;
        Ok(self.out)
    }
}

impl<W: Write> Write for SealedWriter<W> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        // The last piece is full or not, but never empty beside others: more is known to follow here.
        if self.piece.len() == PIECE && !data.is_empty() {
            self.seal(false)?;
        }
        let n = data.len().min(PIECE - self.piece.len());
        self.piece.extend_from_slice(&data[..n]);
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use age::{Decryptor, x25519};
    use std::io::Read;

    #[test]
    fn the_crate_age_reads_it() {
        let one = x25519::Identity::generate();
        let other = x25519::Identity::generate();
        for len in [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 3 * PIECE + 7] {
            let data: Vec<u8> = (0..len).map(|n| (n * 31 % 251) as u8).collect();
            let recipients = [one.to_public(), other.to_public()];
            let recipients = recipients.iter().map(|r| r as &dyn age::Recipient);
            let mut stream = SealedWriter::new(recipients, Vec::new()).unwrap();
            for part in data.chunks(50_000) {
                stream.write_all(part).unwrap();
            }
            let file = stream.finish().unwrap();
            for identity in [&one, &other] {
                let decryptor = Decryptor::new(&file[..]).unwrap();
                let keys = std::iter::once(identity as &dyn age::Identity);
                let mut found = Vec::new();
                let mut stream = decryptor.decrypt(keys).unwrap();
                stream.read_to_end(&mut found).unwrap();
                assert!(found == data, "{len} bytes");
            }
            let by_age = age::encrypt(&one.to_public(), &data).unwrap();
            let one_more = age::encrypt(&other.to_public(), &[]).unwrap().len();
            assert!(by_age.len() < file.len() && file.len() < by_age.len() + one_more);
        }
    }
}
