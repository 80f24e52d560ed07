//! Writes the payload of an `age` stream with the cipher of the crate `ring`: that of the crate `age` takes 1.7 times as
//! long, more than anything else that is done to a layer.
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

use super::lease::{Lease, Spare};

/// Bytes of a piece before encryption.
const PIECE: usize = 64 << 10;
/// Bytes of the pieces that are handed over together: waking a thread for one takes longer than the copy.
const PART: usize = 4 * PIECE;
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
        let nonce = &part[part.len().saturating_sub(PAYLOAD_NONCE)..];
        let file_key = Salt::new(HKDF_SHA256, nonce).extract(&key.take());
        let key = file_key.expand(&[LABEL], &CHACHA20_POLY1305);
        let key = key.map_err(|_| io::Error::other("no key of this length"))?;
        Ok(Self {
            key: LessSafeKey::new(UnboundKey::from(key)),
            number: 0,
            open: part.len(),
            part,
            spare,
            put,
        })
    }

    fn seal(&mut self, is_last: bool) -> io::Result<()> {
        let mut nonce = [0; 12];
        nonce[3..11].copy_from_slice(&self.number.to_be_bytes());
        nonce[11] = is_last.into();
        let nonce = Nonce::assume_unique_for_key(nonce);
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

#[cfg(test)]
mod tests {
    use super::*;
    use age::{Decryptor, x25519};
    use std::io::Read;

    #[test]
    fn the_crate_age_reads_it() {
        let one = x25519::Identity::generate();
        let other = x25519::Identity::generate();
        for len in [0, 1, PIECE - 1, PIECE, PIECE + 1, 4 * PIECE, 9 * PIECE + 7] {
            let data: Vec<u8> = (0..len).map(|n| (n * 31 % 251) as u8).collect();
            let recipients = [one.to_public(), other.to_public()];
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
            for identity in [&one, &other] {
                let decryptor = Decryptor::new(&file[..]).unwrap();
                let keys = std::iter::once(identity as &dyn age::Identity);
                let mut found = Vec::new();
                let mut stream = decryptor.decrypt(keys).unwrap();
                stream.read_to_end(&mut found).unwrap();
                assert!(found == data, "{len} bytes");
            }
        }
    }
}
