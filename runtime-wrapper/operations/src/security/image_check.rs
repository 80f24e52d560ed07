//! Checks CRIU's images before CRIU reads them, and writes them anew.
//!
//! CRIU runs as root and does what its images say: it makes cgroups and writes their properties, mounts, creates files,
//! loads firewall rules. Whoever may write images could have it do so anywhere on the host. So CRIU sees no file of a
//! checkpoint that is not known here, and of an image that is made of messages it sees what this module has encoded:
//!
//! - Every message is decoded by CRIU's own definitions; what has two meanings is refused ([`Message`]).
//! - What reaches past the container is refused: [`cgroups`], [`mounts`], [`files`], [`network`].
//! - What only one process of a network namespace can have gets another name: [`files`].
//! - What the spec decides is taken from the spec: [`limits`], [`namespaces`], [`seccomp`].
//!
//! Data is shown to CRIU as it is: memory pages, archives of a tmpfs, files.
//!
//! All of it runs in [`super::decoder`]'s child: it logs nothing, and sees of the host what it is given.

mod cgroups;
mod closed;
mod files;
mod limits;
mod members;
pub mod mounts;
pub mod namespaces;
mod network;
pub mod opened;
pub mod seccomp;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use cryopod_archive::criu::ImageError;
use cryopod_archive::criu::image_files::{self, ImageContent, ImageFile};
use cryopod_archive::criu::message::Message;
use cryopod_archive::format::names;
use cryopod_host::spec::Spec;

use self::members::Members;
use self::namespaces::NamespaceValues;
use super::ceiling::CredentialsCeiling;
use super::host_facts::HostFacts;
use super::privileges::{self, PrivilegesError};

/// The most entries of an image directory; CRIU makes a few for each process.
pub const MAX_ENTRIES: usize = 1 << 20;
/// The most threads that read images, and the files for which another one pays.
const MAX_THREADS: usize = 8;
const LEAST_FILES: usize = 64;

/// What the images are compared with.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'a> {
    pub facts: &'a HostFacts,
    pub values: &'a NamespaceValues,
    pub spec: &'a Spec,
    /// Device nodes that the container may have.
    pub devices: &'a [(u32, u32)],
}

/// CRIU's images as CRIU may see them.
#[derive(Debug, Default)]
pub struct CheckedImages {
    images: BTreeMap<String, ImageFile>,
    /// Messages between which data lies; CRIU reads these files as they are.
    with_data: BTreeMap<String, Vec<Message>>,
    /// Files that CRIU does not read as images, or that hold data alone.
    others: Vec<String>,
    faults: Vec<String>,
}

/// Reads and checks the images. Returns what is wrong with them, too.
pub fn check(
    directory: &Path,
    subject: Subject<'_>,
) -> Result<(CheckedImages, Vec<String>), PrivilegesError> {
    let mut images = CheckedImages::read(directory)?;
    let ceiling = CredentialsCeiling::of(subject.spec);
    let mut told = std::mem::take(&mut images.faults);
    told.extend(cgroups::check(&mut images, subject));
    closed::settle(&mut images, subject.spec, &ceiling);
    told.extend(mounts::check(&images, subject, directory)?);
    told.extend(files::check(&images, subject, &ceiling));
    files::settle(&mut images);
    told.extend(network::check(&images, directory, &ceiling)?);
    told.extend(namespaces::settle(&mut images, subject));
    told.extend(seccomp::settle(&mut images, subject.spec));
    told.extend(limits::settle(&mut images, subject, &ceiling));
    Ok((images, told))
}

impl CheckedImages {
    fn read(directory: &Path) -> Result<Self, PrivilegesError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| PrivilegesError::Read { path, source }
        };
        let members = Members::of(directory)?;
        let mut names = Vec::new();
        for entry in fs::read_dir(directory)
            .map_err(failed(directory))?
            .take(MAX_ENTRIES)
        {
            let entry = entry.map_err(failed(directory))?;
            // Neither CRIU nor cryopod has a file with another name.
            names.extend(entry.file_name().into_string());
        }
        names.retain(|name| !members.lack(name));
        names.sort_unstable();
        let mut found = Self::of_all(directory, &names)?;
        parents(directory, &members, &mut found.faults)?;
        Ok(found)
    }

    fn of_all(directory: &Path, names: &[String]) -> Result<Self, PrivilegesError> {
        let read = |names: &[String]| {
            let mut found = Self::default();
            for name in names {
                found.add(directory, name.clone())?;
            }
            Ok::<_, PrivilegesError>(found)
        };
        let mut found = Self::default();
        for part in in_threads(names, read)? {
            let part = part?;
            found.images.extend(part.images);
            found.with_data.extend(part.with_data);
            found.others.extend(part.others);
            found.faults.extend(part.faults);
        }
        Ok(found)
    }

    fn add(&mut self, directory: &Path, name: String) -> Result<(), PrivilegesError> {
        let mut fault = |e: &ImageError| self.faults.push(e.to_string());
        match image_files::content_of(&name).map(|(content, _)| content) {
            Some(ImageContent::Messages(_)) => {
                let Some(content) = privileges::open(directory, &name)? else {
                    return Ok(());
                };
                // CRIU takes an image without content for one that is not there.
                if content.is_empty() {
                    return Ok(());
                }
                match ImageFile::decode(&name, &content) {
                    Ok(image) => drop(self.images.insert(name, image)),
                    Err(e) => fault(&e),
                }
            }
            Some(ImageContent::HeadAndMessages(..)) => {
                if let Err(e) = checked_memory_map(directory, &name)? {
                    fault(&e);
                }
                self.others.push(name);
            }
            Some(ImageContent::WithData(_)) => {
                let content = privileges::open_data(directory, &name)?.unwrap_or_default();
                match image_files::messages_with_data(&name, &content) {
                    Ok(messages) => drop(self.with_data.insert(name, messages)),
                    Err(e) => fault(&e),
                }
            }
            Some(ImageContent::Data) => self.others.push(name),
            Some(ImageContent::Refused(what)) => {
                let empty = privileges::open(directory, &name)?.is_none_or(|c| c.len() <= 8);
                if !empty {
                    self.faults.push(format!("{name}: holds {what}"));
                }
            }
            None if is_known_besides(&name) => self.others.push(name),
            None if name.ends_with(".img") => self
                .faults
                .push(format!("{name}: an image that is not known; a newer CRIU?")),
            None => {}
        }
        Ok(())
    }

    /// Returns the messages of an image; none if there is no such file.
    pub fn messages(&self, name: &str) -> &[Message] {
        self.images.get(name).map_or(&[], |i| &i.messages)
    }

    /// Returns the messages of an image, to be changed; none if there is no such image.
    pub fn messages_mut(&mut self, name: &str) -> &mut [Message] {
        self.images
            .get_mut(name)
            .map_or(&mut [], |i| &mut i.messages)
    }

    /// Returns the images with this prefix before a number, by name.
    pub fn numbered<'a>(
        &'a self,
        prefix: &'a str,
    ) -> impl Iterator<Item = (&'a str, &'a [Message])> {
        let all = self.images.iter();
        let of = all.filter(move |(name, _)| names::is_numbered(name, prefix));
        of.map(|(name, image)| (name.as_str(), &image.messages[..]))
    }

    fn names(&self, prefix: &str) -> Vec<String> {
        self.numbered(prefix)
            .map(|(name, _)| name.to_owned())
            .collect()
    }

    /// Returns the content that CRIU will read, for whoever compares it further.
    pub fn content(&self, name: &str) -> Option<Vec<u8>> {
        self.images.get(name).map(ImageFile::encode)
    }

    /// Returns true for a file that CRIU may read as it is in the checkpoint.
    pub fn shows(&self, name: &str) -> bool {
        self.with_data.contains_key(name) || self.others.iter().any(|n| n == name)
    }

    /// Returns the names of such files.
    pub fn shown(&self) -> impl Iterator<Item = &str> {
        let with_data = self.with_data.keys();
        with_data.chain(&self.others).map(String::as_str)
    }

    /// Returns the images as they are to be written, by name.
    pub fn written(&self) -> Result<BTreeMap<&str, Vec<u8>>, PrivilegesError> {
        let images: Vec<(&String, &ImageFile)> = self.images.iter().collect();
        let encode = |part: &[(&String, &ImageFile)]| -> Vec<Vec<u8>> {
            part.iter().map(|(_, image)| image.encode()).collect()
        };
        let encoded = in_threads(&images, encode)?.into_iter().flatten();
        let names = self.images.keys().map(String::as_str);
        Ok(names.zip(encoded).collect())
    }
}

/// Does the work in several threads, each with a part of the items; returns what became of the parts, in their order.
fn in_threads<T: Sync, R: Send>(
    items: &[T],
    work: impl Fn(&[T]) -> R + Sync,
) -> Result<Vec<R>, PrivilegesError> {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(MAX_THREADS));
    let each = items.len().div_ceil(threads).max(LEAST_FILES);
    let (first, others) = items.split_at(each.min(items.len()));
    let work = &work;
    std::thread::scope(|scope| {
        let others = others.chunks(each);
        let others: Vec<_> = others.map(|part| scope.spawn(move || work(part))).collect();
        let mut done = vec![work(first)];
        for other in others {
            done.push(other.join().map_err(|_| PrivilegesError::Panicked)?);
        }
        Ok(done)
    })
}

/// Files of an image directory that are no images of CRIU: of cryopod, of CRIU's amdgpu plugin, of runc and crun.
fn is_known_besides(name: &str) -> bool {
    const NAMES: [&str; 4] = [
        "descriptors.json",
        names::PARENT_LINK,
        names::NVIDIA_IMAGE,
        names::VRAM_INDEX,
    ];
    NAMES.contains(&name)
        || names::is_vram_shard(name)
        || name == names::PRELOAD_LIBRARY
        || name.starts_with("amdgpu-") && name.ends_with(".img")
        || name.starts_with("cryopod")
        || name == names::VRAM_PLACES
}

/// Checks a map of memory pages, of which a process may have millions: CRIU reads the file itself. The pages must be there:
/// CRIU 4.1 waits for those behind the end of a file for ever, and fills the disk with its log.
fn checked_memory_map(
    directory: &Path,
    name: &str,
) -> Result<Result<(), ImageError>, PrivilegesError> {
    let content = privileges::open_data(directory, name)?.unwrap_or_default();
    if content.is_empty() {
        return Ok(Ok(()));
    }
    let wrong = |reason: String| {
        Err(ImageError::Message {
            file: name.into(),
            message: 0,
            reason,
        })
    };
    let image = match ImageFile::decode(name, &content) {
        Ok(image) => image,
        Err(e) => return Ok(Err(e)),
    };
    if image.encode() != content {
        return Ok(wrong("is encoded in another way than CRIU's".into()));
    }
    let Some((head, entries)) = image.messages.split_first() else {
        return Ok(Ok(()));
    };
    let pages = format!("{}{}.img", names::PAGES, head.u32("pages_id").unwrap_or(0));
    let needs = entries.iter().map(payload).fold(0, u64::saturating_add);
    // In a store, the reference has its size.
    Ok(match fs::metadata(directory.join(&pages)) {
        Ok(has) if has.len() < needs => wrong(format!(
            "needs {needs} bytes of {pages}, which has {}",
            has.len()
        )),
        _ => Ok(()),
    })
}

/// Returns how many bytes of the file with pages belong to an entry of a map (`init_pagemaps` in CRIU's pagemap.c).
fn payload(entry: &Message) -> u64 {
    const PAGE: u64 = 4096;
    const PRESENT: u64 = 1 << 2;
    let in_parent = entry.number("in_parent").unwrap_or(0) != 0;
    let flags = entry.number("flags");
    if flags.unwrap_or(if in_parent { 0 } else { PRESENT }) & PRESENT == 0 {
        return 0;
    }
    if let Some(blocks) = entry.message("blocks") {
        return blocks.number("total_payload_size").unwrap_or(0);
    }
    let pages = entry.number("nr_pages").or(entry.number("compat_nr_pages"));
    pages.unwrap_or(0).saturating_mul(PAGE)
}

/// Checks what CRIU reads of the checkpoints that this one builds upon: maps of memory pages.
fn parents(
    directory: &Path,
    members: &Members,
    faults: &mut Vec<String>,
) -> Result<(), PrivilegesError> {
    const MOST: usize = 256;
    let mut at = directory.join(names::PARENT_LINK);
    for _ in 0..MOST {
        let Ok(entries) = fs::read_dir(&at) else {
            return Ok(());
        };
        for entry in entries.take(MAX_ENTRIES).flatten() {
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            if matches!(
                image_files::content_of(&name),
                Some((ImageContent::HeadAndMessages(..), _))
            ) && !members.lack(&name)
                && let Err(e) = checked_memory_map(&at, &name)?
            {
                faults.push(e.to_string());
            }
        }
        at.push(names::PARENT_LINK);
    }
    faults.push(format!("{}: more than {MOST} parents", names::PARENT_LINK));
    Ok(())
}

/// Returns true for an absolute path without `.`, `..` and empty names.
fn is_clean(path: &str) -> bool {
    let names = path.strip_prefix('/').map(|p| p.split('/'));
    path == "/" || names.is_some_and(|mut n| n.all(|n| !matches!(n, "" | "." | "..")))
}
