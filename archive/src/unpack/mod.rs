//! Unpacks an archive into a directory.

mod tree;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crossbeam_channel::{Sender, bounded};
use cryopod_host::sandbox::{self, Sandbox, SandboxError, Worker};
use serde::{Deserialize, Serialize};

use self::tree::Tree;
use crate::bytes::decode::with_decoder;
use crate::bytes::staging::Staging;
use crate::bytes::write_back::WriteBack;
use crate::error::{Bad, Error};
use crate::format::entry::{Entry, EntryKind};
use crate::format::limits::Limits;
use crate::format::names;
use crate::format::oci::annotation;
use crate::progress::Progress;
use crate::source::Source;
use crate::source::walk::{Sink, walk};

#[derive(Debug, Clone, Default)]
pub struct UnpackOptions {
    /// Only CRIU's images, directly in the target directory (without `checkpoint/`), as runtimes want them.
    pub images_only: bool,
    /// Leave out the shards and the table of GPU memory.
    pub without_vram: bool,
    /// Files that are left out: their names in the archive, and their sizes in bytes.
    pub leave: BTreeMap<String, u64>,
    /// 0: one per core.
    pub threads: usize,
    pub limits: Limits,
    pub progress: Arc<Progress>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unpacked {
    pub files: u64,
    pub bytes: u64,
}

/// Unpacks a checkpoint into a directory that does not exist yet or is empty.
///
/// Everything is written under a temporary name beside the target, checked, synced and renamed: the target is complete
/// or absent. The next run removes what an interrupted run left. Files belong to the caller, without set-id bits.
/// Devices and links of the container are inside `rootfs-diff.tar`, which is not unpacked.
pub fn unpack(source: &Source, to: &Path, options: &UnpackOptions) -> Result<Unpacked, Error> {
    let staging = Staging::directory(to, false)?;
    let done = fill(source, to, staging.path(), options)?;
    staging.commit()?;
    Ok(done)
}

/// An [`unpack`] whose decoding runs in a child that can do no more than read the archive and fill the new directory.
#[derive(Debug)]
pub struct Unpacking {
    /// Ends before its directory is removed.
    decoder: Worker,
    staging: Staging,
}

/// Starts to unpack; see [`Sandbox::start`] for when. The progress counts here, too. Files of a store that were joined
/// to the source are left out.
pub fn start(source: &Source, to: &Path, options: &UnpackOptions) -> Result<Unpacking, Error> {
    let staging = Staging::directory(to, false)?;
    let sandbox = Sandbox {
        read: vec![sandbox::real(source.path())],
        write: vec![staging.path().to_owned()],
    };
    let decoder = sandbox.start(|| {
        let source = source.reopen(&options.limits);
        let done = source.and_then(|source| fill(&source, to, staging.path(), options));
        let done = done.map_err(|e| e.to_string())?;
        serde_json::to_vec(&done).map_err(|e| e.to_string())
    })?;
    Ok(Unpacking { staging, decoder })
}

impl Unpacking {
    /// Waits until the directory is complete, and gives it its name.
    pub fn finish(self, limit: Duration) -> Result<Unpacked, Error> {
        let said = self.decoder.finish(limit)?;
        let nonsense = |e: serde_json::Error| SandboxError::Ended(format!("makes no sense: {e}"));
        let done = serde_json::from_slice(&said).map_err(nonsense)?;
        self.staging.commit()?;
        Ok(done)
    }
}

/// Unpacks into `staged`, which becomes `to`.
fn fill(
    source: &Source,
    to: &Path,
    staged: &Path,
    options: &UnpackOptions,
) -> Result<Unpacked, Error> {
    let left = options.leave.values().copied().fold(0, u64::saturating_add);
    room(to, staged, stated_bytes(source).saturating_sub(left))?;
    let root = File::open(staged).map_err(Error::io(to, "open it"))?;
    let (sync, to_sync) = bounded::<(File, String)>(16);
    let sink = Unpacker {
        tree: Tree::new(root),
        from: source.path(),
        to,
        staged,
        images_only: options.images_only,
        without_vram: options.without_vram,
        leave: &options.leave,
        progress: &options.progress,
        sync,
        later: Mutex::default(),
        done: Mutex::new(Unpacked { files: 0, bytes: 0 }),
    };
    thread::scope(|scope| {
        // Syncs each file as soon as it is complete.
        let syncer = scope.spawn(move || {
            for (file, name) in to_sync {
                file.sync_all()
                    .map_err(Error::io(&to.join(name), "write it to disk"))?;
            }
            Ok::<_, Error>(())
        });
        let walked = with_decoder(options.threads, &options.progress, |decoder| {
            walk(source, &options.limits, decoder, &sink)
        });
        let finished = walked.and_then(|()| sink.finish());
        let gone = || io::Error::other("a worker thread ended unexpectedly");
        let synced = syncer
            .join()
            .unwrap_or_else(|_| Err(Error::from_io(to, "write it to disk", gone())));
        finished.and_then(|done| synced.map(|()| done))
    })
}

/// The total size that the archive states, if it does.
fn stated_bytes(source: &Source) -> u64 {
    let stated = source.image().and_then(|i| {
        i.manifest
            .annotations
            .get(annotation::CONTENT_BYTES)?
            .parse()
            .ok()
    });
    stated.unwrap_or(0)
}

fn room(to: &Path, staged: &Path, needed: u64) -> Result<(), Error> {
    if needed < CHECK_ROOM {
        return Ok(());
    }
    let stat = nix::sys::statvfs::statvfs(staged)
        .map_err(|e| Error::from_io(to, "ask for the free space", e.into()))?;
    let free = stat.blocks_available().saturating_mul(stat.fragment_size());
    if needed > free {
        return Err(Error::NoSpace {
            path: to.into(),
            needed,
            free,
        });
    }
    Ok(())
}

/// For files of at least this size, the room is checked before writing.
const CHECK_ROOM: u64 = 16 << 20;

struct Unpacker<'u> {
    tree: Tree,
    from: &'u Path,
    to: &'u Path,
    staged: &'u Path,
    images_only: bool,
    without_vram: bool,
    leave: &'u BTreeMap<String, u64>,
    progress: &'u Progress,
    sync: Sender<(File, String)>,
    later: Mutex<Later>,
    done: Mutex<Unpacked>,
}

#[derive(Default)]
struct Later {
    modes: BTreeMap<String, u32>,
    links: Vec<(String, String)>,
}

impl Unpacker<'_> {
    /// Returns where an entry goes, if it is wanted.
    fn place<'n>(&self, name: &'n str) -> Option<&'n str> {
        let inner = name.strip_prefix(names::CHECKPOINT_DIR);
        if self.without_vram && inner.is_some_and(|n| n.starts_with("/vram-")) {
            return None;
        }
        if self.leaves(name) {
            return None;
        }
        if !self.images_only {
            return Some(name);
        }
        inner?.strip_prefix('/')
    }

    fn leaves(&self, name: &str) -> bool {
        self.leave.contains_key(name)
    }

    fn finish(self) -> Result<Unpacked, Error> {
        let later = self
            .later
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        for (name, target) in later.links {
            self.tree
                .link(&name, &target)
                .map_err(Error::io(&self.to.join(&name), "create the link"))?;
        }
        for (name, mode) in later.modes.iter().rev() {
            let directory = || {
                self.tree.directory(name).map(File::from)?.sync_all()?;
                self.tree.set_mode(name, mode | 0o700)
            };
            directory().map_err(Error::io(&self.to.join(name), "finish the directory"))?;
        }
        Ok(self
            .done
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner))
    }

    fn file(&self, name: &str, entry: &Entry, reader: &mut dyn Read) -> Result<(), Error> {
        let path = self.to.join(name);
        room(self.to, self.staged, entry.size)?;
        let file = self
            .tree
            .file(name, entry.mode | 0o600)
            .map_err(Error::io(&path, "create it"))?;
        let mut out = file
            .try_clone()
            .and_then(WriteBack::cached)
            .map_err(Error::io(&path, "open it"))?;
        let mut buf = vec![
            0;
            usize::try_from(entry.size)
                .unwrap_or(COPY_BYTES)
                .clamp(1, COPY_BYTES)
        ];
        let mut left = entry.size;
        while left > 0 {
            let n = match reader.read(&mut buf) {
                Ok(0) => {
                    let bad = Bad::TruncatedFile {
                        name: entry.name.clone(),
                        missing: left,
                    };
                    return Err(Error::bad(self.from, bad));
                }
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(Error::from_io(self.from, "read it", e)),
            };
            left = left.saturating_sub(n as u64);
            out.write_all(&buf[..n])
                .map_err(Error::io(&path, "write it"))?;
        }
        out.flush().map_err(Error::io(&path, "write it"))?;
        // Directories that the archive does not name need a sync like the others.
        let mut later = self.later.lock().unwrap_or_else(PoisonError::into_inner);
        for (at, _) in name.match_indices('/') {
            later.modes.entry(name[..at].into()).or_insert(0o700);
        }
        drop(later);
        let _ = self.sync.send((file, name.to_owned()));
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        done.files += 1;
        done.bytes += entry.size;
        Ok(())
    }
}

/// Bytes per write: as much as the file system takes as one piece of memory.
const COPY_BYTES: usize = 1 << 20;

impl Sink for Unpacker<'_> {
    fn layer(&self, files: &[String]) -> bool {
        files.is_empty() || !files.iter().all(|name| self.leaves(name))
    }

    fn entry(&self, entry: &Entry, reader: &mut dyn Read) -> Result<(), Error> {
        let Some(name) = self.place(&entry.name) else {
            if self.leaves(&entry.name) {
                self.progress.add_done(entry.size);
            }
            return Ok(());
        };
        let later = || self.later.lock().unwrap_or_else(PoisonError::into_inner);
        match &entry.kind {
            EntryKind::File => self.file(name, entry, reader),
            EntryKind::Directory => {
                later().modes.insert(name.into(), entry.mode);
                self.tree
                    .directory(name)
                    .map(drop)
                    .map_err(Error::io(&self.to.join(name), "create it"))
            }
            EntryKind::ParentLink { target } => {
                later().links.push((name.into(), target.clone()));
                Ok(())
            }
        }
    }
}
