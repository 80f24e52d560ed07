//! Encrypts layers as `age` streams (<https://age-encryption.org/v1>), and decrypts them.
//!
//! A stream is a whole file of `age`, with its own header and key: streams are made and read at the same time on all
//! cores, and `age --decrypt` reads a layer's blob.

use std::fmt;
use std::fs;
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use age::{DecryptError, IdentityFile, ssh, x25519};

use super::lease::{Lease, Spare};
use super::seal::{PAYLOAD_NONCE, SealedReader, SealedWriter};
use super::stream::{Section, Stream};
use crate::error::{Bad, Error};

/// The most bytes of a header: some hundred recipients. `age` reads it into memory, at a cost that grows with its square.
const MAX_HEADER: u64 = 64 << 10;
/// The most bytes of a file with recipients or identities.
const MAX_KEYS: u64 = 1 << 20;

/// Who may read what is written.
#[derive(Clone)]
pub struct Recipients(Arc<[Box<dyn age::Recipient + Send + Sync>]>);

impl fmt::Debug for Recipients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} recipients", self.0.len())
    }
}

impl Recipients {
    /// Parses recipients: `age1...`, `ssh-ed25519 ...`, `ssh-rsa ...`, or files with one of these a line. `None` if
    /// there are none.
    pub fn parse(texts: &[String]) -> Result<Option<Self>, Error> {
        let mut all = Vec::new();
        for text in texts {
            match recipient(text) {
                Some(one) => all.push(one),
                None => all.extend(recipients_of(Path::new(text))?),
            }
        }
        Ok((!all.is_empty()).then(|| Self(all.into())))
    }

    /// Encrypts what `write` makes as one stream, and hands that to `put` in parts.
    pub(crate) fn encrypt<T>(
        &self,
        spare: &Spare,
        put: impl FnMut(Lease<()>) -> io::Result<()>,
        write: impl FnOnce(&mut dyn Write) -> io::Result<T>,
    ) -> io::Result<T> {
        let recipients = self.0.iter().map(|r| &**r as &dyn age::Recipient);
        let mut stream = SealedWriter::new(recipients, spare, put)?;
        let value = write(&mut stream)?;
        stream.finish()?;
        Ok(value)
    }
}

fn recipient(text: &str) -> Option<Box<dyn age::Recipient + Send + Sync>> {
    if let Ok(recipient) = text.parse::<x25519::Recipient>() {
        return Some(Box::new(recipient));
    }
    let recipient = text.parse::<ssh::Recipient>().ok()?;
    Some(Box::new(recipient))
}

fn recipients_of(path: &Path) -> Result<Vec<Box<dyn age::Recipient + Send + Sync>>, Error> {
    let unsupported = |reason: String| Error::Unsupported {
        path: path.into(),
        reason,
    };
    let text = read_keys(path).map_err(|e| {
        unsupported(format!(
            "neither a recipient (age1..., ssh-ed25519 ..., ssh-rsa ...) nor a file with recipients: {e}"
        ))
    })?;
    let lines = text.lines().map(str::trim).enumerate();
    let lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    let all = lines.map(|(n, line)| {
        recipient(line).ok_or_else(|| unsupported(format!("line {}: not a recipient", n + 1)))
    });
    let all = all.collect::<Result<Vec<_>, _>>()?;
    match all.is_empty() {
        true => Err(unsupported("it has no recipient".into())),
        false => Ok(all),
    }
}

fn read_keys(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    fs::File::open(path)?
        .take(MAX_KEYS)
        .read_to_string(&mut text)?;
    Ok(text)
}

/// The keys by which encrypted archives are read.
#[derive(Clone, Default)]
pub struct Identities {
    keys: Arc<Vec<Box<dyn age::Identity + Send + Sync>>>,
    /// Files that gave none, and why. It matters only if an archive is encrypted.
    unusable: Arc<Vec<String>>,
}

impl fmt::Debug for Identities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} identities", self.keys.len())
    }
}

impl Identities {
    /// Reads files with identities as `age-keygen` writes them, and private keys of SSH without a passphrase. Never
    /// fails: a file that cannot be used is named by [`Error::NoKey`].
    pub fn read(files: &[PathBuf]) -> Self {
        let (mut keys, mut unusable) = (Vec::new(), Vec::new());
        for path in files {
            match identities_of(path) {
                Ok(found) => keys.extend(found),
                Err(reason) => unusable.push(format!("{}: {reason}", path.display())),
            }
        }
        Self {
            keys: keys.into(),
            unusable: unusable.into(),
        }
    }

    /// Opens a stream of the archive at `path`, which `input` reads. The caller reads it to its end, which proves that it
    /// is whole.
    pub(crate) fn decrypt<R: Read>(
        &self,
        stored: &Section,
        input: R,
        path: &Path,
    ) -> Result<Decrypted<R>, Error> {
        let read = |e| Error::from_io(path, "read it", e);
        let damaged = |reason: String| Error::bad(path, Bad::Encryption(reason));
        let mut start = Vec::new();
        let header = stored.clone().take(MAX_HEADER).read_to_end(&mut start);
        header.map_err(read)?;
        let mac = start.windows(5).position(|w| w == b"\n--- ");
        let line = mac.and_then(|mac| start[mac + 1..].iter().position(|byte| *byte == b'\n'));
        let header = mac.zip(line);
        let header = header.and_then(|(mac, line)| start.get(..mac + line + 2 + PAYLOAD_NONCE));
        let header = header.ok_or_else(|| damaged("it has no header of age".into()))?;
        let keys = self.keys.iter().map(|key| &**key as &dyn age::Identity);
        let opened = SealedReader::new(header, keys, input);
        let start = header.len() as u64;
        opened
            .map(|stream| Decrypted { stream, start })
            .map_err(|e| match e {
                DecryptError::Io(e) if e.raw_os_error().is_some() => read(e),
                DecryptError::NoMatchingKeys => Error::NoKey {
                    path: path.into(),
                    reason: self.why_none_fits(),
                },
                other => damaged(other.to_string()),
            })
    }

    /// Opens a stream of the archive at `path` to read parts of it.
    pub(crate) fn decrypt_parts(
        &self,
        stored: &Section,
        path: &Path,
    ) -> Result<DecryptedParts, Error> {
        let Decrypted { mut stream, start } = self.decrypt(stored, stored.clone(), path)?;
        let seek = |e| Error::from_io(path, "read it", e);
        let start = start + stored.clone().stream_position().map_err(seek)?;
        let bytes = stream.measure(start).map_err(seek)?;
        let mut parts = DecryptedParts {
            stream,
            start,
            bytes,
            at: 0,
        };
        parts.go_to(0).map_err(seek)?;
        Ok(parts)
    }

    fn why_none_fits(&self) -> String {
        let mut why = match self.keys.len() {
            0 => "there is no identity".to_owned(),
            n => format!("none of {n} identities is that of a recipient"),
        };
        for unusable in self.unusable.iter() {
            why.push_str("; ");
            why.push_str(unusable);
        }
        why
    }
}

/// What an `age` stream holds.
pub(crate) struct Decrypted<R> {
    stream: SealedReader<R>,
    /// Bytes before its payload.
    start: u64,
}

impl<R: Read> Read for Decrypted<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.stream.read(buf)
    }
}

/// An `age` stream whose parts are read in any order: it is decrypted in pieces of 64 KiB.
pub(crate) struct DecryptedParts {
    stream: SealedReader<Section>,
    /// Where its payload begins.
    start: u64,
    bytes: u64,
    at: u64,
}

impl DecryptedParts {
    /// # Errors
    /// The stream is shorter.
    pub(crate) fn go_to(&mut self, at: u64) -> io::Result<()> {
        if at > self.bytes {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.at = at;
        self.stream.go_to(self.start, at)
    }
}

impl Read for DecryptedParts {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.stream.read(buf)?;
        if n == 0 && !buf.is_empty() && self.at < self.bytes {
            // The file has become shorter since it was measured.
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.at += n as u64;
        Ok(n)
    }
}

impl Stream for DecryptedParts {
    fn skip(&mut self, n: u64) -> io::Result<()> {
        self.go_to(self.at.saturating_add(n))
    }
}

fn identities_of(path: &Path) -> Result<Vec<Box<dyn age::Identity + Send + Sync>>, String> {
    let text = read_keys(path).map_err(|e| e.to_string())?;
    if !text.contains("-----BEGIN ") {
        let file = IdentityFile::from_buffer(text.as_bytes()).map_err(|e| e.to_string())?;
        return file.into_identities().map_err(|e| e.to_string());
    }
    match ssh::Identity::from_buffer(text.as_bytes(), None).map_err(|e| e.to_string())? {
        ssh::Identity::Unencrypted(key) => Ok(vec![Box::new(ssh::Identity::from(key))]),
        ssh::Identity::Encrypted(_) => Err("it has a passphrase; give a key without one".into()),
        ssh::Identity::Unsupported(_) => Err("this kind of SSH key cannot decrypt".into()),
    }
}
