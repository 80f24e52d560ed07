//! Reads an image's blobs from a layout directory or from a tar of one.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::bytes::stream::Section;
use crate::bytes::tarread::TarReader;
use crate::error::{Bad, Error};
use crate::format::digest::Digest;
use crate::format::entry::EntryKind;
use crate::format::limits::{Limits, MAX_JSON_BYTES};
use crate::format::names;
use crate::format::oci::Descriptor;

#[derive(Debug, Clone)]
pub(crate) enum Blobs {
    Directory(PathBuf),
    /// In a tar: name, offset and length of each file.
    Tar {
        path: PathBuf,
        files: BTreeMap<String, Section>,
    },
}

impl Blobs {
    /// Finds the blobs in a tar. Reads only the headers.
    pub(crate) fn in_tar(path: &Path, whole: &Section, limits: &Limits) -> Result<Self, Error> {
        let wrap = |e| Error::from_io(path, "read it", e);
        let mut files = BTreeMap::new();
        let mut tar = TarReader::new(whole.clone(), limits, None);
        while let Some(entry) = tar.next().map_err(wrap)? {
            if entry.kind == EntryKind::File {
                let content = Section::new(whole.file().clone(), tar.position(), entry.size);
                if files.insert(entry.name.clone(), content).is_some() {
                    return Err(Error::bad(path, Bad::Duplicate(entry.name)));
                }
            }
        }
        Ok(Self::Tar {
            path: path.into(),
            files,
        })
    }

    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::Directory(path) | Self::Tar { path, .. } => path,
        }
    }

    fn find(&self, name: &str) -> Result<Option<Section>, Error> {
        match self {
            Self::Tar { files, .. } => Ok(files.get(name).cloned()),
            Self::Directory(dir) => {
                let path = dir.join(name);
                let opened = fs::OpenOptions::new()
                    .read(true)
                    .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC)
                    .open(&path);
                let file: File = match opened {
                    Ok(file) => file,
                    Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
                    Err(e) if e.raw_os_error() == Some(libc::ELOOP) => {
                        return Err(Error::bad(dir, Bad::BlobType(name.into())));
                    }
                    Err(e) => return Err(Error::from_io(&path, "open it", e)),
                };
                if !file
                    .metadata()
                    .map_err(Error::io(&path, "read its type"))?
                    .is_file()
                {
                    return Err(Error::bad(dir, Bad::BlobType(name.into())));
                }
                Section::whole(file)
                    .map(Some)
                    .map_err(Error::io(&path, "read its size"))
            }
        }
    }

    pub(crate) fn document(&self, name: &str) -> Result<Vec<u8>, Error> {
        let section = self.find(name)?;
        let section =
            section.ok_or_else(|| Error::bad(self.path(), Bad::MissingFile(name.into())))?;
        self.read(section, name)
    }

    fn read(&self, mut section: Section, name: &str) -> Result<Vec<u8>, Error> {
        let bytes = section.left();
        if bytes > MAX_JSON_BYTES {
            let bad = Bad::JsonTooLarge {
                file: name.into(),
                bytes,
                max: MAX_JSON_BYTES,
            };
            return Err(Error::bad(self.path(), bad));
        }
        let mut text = Vec::new();
        section
            .read_to_end(&mut text)
            .map_err(|e| Error::from_io(self.path(), "read it", e))?;
        Ok(text)
    }

    /// Opens a blob and checks its size against the descriptor. The caller must check the digest.
    pub(crate) fn open(&self, descriptor: &Descriptor) -> Result<Section, Error> {
        let digest = &descriptor.digest;
        let section = self.find(&blob_name(digest))?;
        let section =
            section.ok_or_else(|| Error::bad(self.path(), Bad::MissingBlob(digest.to_string())))?;
        if section.left() != descriptor.size {
            let bad = Bad::BlobSize {
                digest: digest.to_string(),
                expected: descriptor.size,
                found: section.left(),
            };
            return Err(Error::bad(self.path(), bad));
        }
        Ok(section)
    }

    /// Lists the digests of all blobs, from their names.
    pub(crate) fn digests(&self) -> Result<Vec<Digest>, Error> {
        let directory = format!("{}/sha256", names::OCI_BLOBS);
        let mut hex: Vec<String> = match self {
            Self::Tar { files, .. } => {
                let inner = files
                    .keys()
                    .filter_map(|name| name.strip_prefix(&directory));
                let inner = inner.filter_map(|name| name.strip_prefix('/'));
                inner.map(str::to_owned).collect()
            }
            Self::Directory(dir) => {
                let dir = dir.join(directory);
                let items = fs::read_dir(&dir).map_err(Error::io(&dir, "list it"))?;
                let names = items.flatten().map(|item| item.file_name());
                names.filter_map(|name| name.into_string().ok()).collect()
            }
        };
        hex.sort();
        let digests = hex
            .iter()
            .map(|hex| Digest::parse(&format!("sha256:{hex}")));
        // Other files are not blobs.
        Ok(digests.filter_map(Result::ok).collect())
    }

    /// Opens a blob by digest alone. The caller must check the digest.
    pub(crate) fn raw(&self, digest: &Digest) -> Result<Section, Error> {
        let section = self.find(&blob_name(digest))?;
        section.ok_or_else(|| Error::bad(self.path(), Bad::MissingBlob(digest.to_string())))
    }

    /// Reads a document by digest alone, and checks the digest.
    pub(crate) fn checked(&self, digest: &Digest) -> Result<Vec<u8>, Error> {
        let section = self.find(&blob_name(digest))?;
        let section =
            section.ok_or_else(|| Error::bad(self.path(), Bad::MissingBlob(digest.to_string())))?;
        let bytes = section.left();
        let name = digest.to_string();
        let text = self.read(section, &name)?;
        let found = Digest::of(&text);
        if found != *digest || text.len() as u64 != bytes {
            let bad = Bad::BlobDigest {
                expected: name,
                found: found.to_string(),
            };
            return Err(Error::bad(self.path(), bad));
        }
        Ok(text)
    }

    pub(crate) fn json(&self, descriptor: &Descriptor, what: &str) -> Result<Vec<u8>, Error> {
        let section = self.open(descriptor)?;
        let text = self.read(section, what)?;
        let found = Digest::of(&text);
        if found != descriptor.digest {
            let bad = Bad::BlobDigest {
                expected: descriptor.digest.to_string(),
                found: found.to_string(),
            };
            return Err(Error::bad(self.path(), bad));
        }
        Ok(text)
    }
}

pub(crate) fn blob_name(digest: &Digest) -> String {
    format!("{}/sha256/{}", names::OCI_BLOBS, digest.hex())
}
