//! Reads shards into memory, and verifies them.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use super::codec::decode;
use super::file::open_file;
use super::index::{Chunk, ChunkDigest, ChunkKind, VramIndex};
use super::places::{self, Places};
use super::{RUN, VramError, VramFacts, parent, run_on, usual_threads};
use crate::bytes::encryption::{DecryptedParts, Identities};
use crate::bytes::stream::Section;
use crate::error::Error;
use crate::format::names;
use crate::source::InPlace;
use crate::store::{self, Found};

/// Longest chain of VRAM files that build on each other.
const MAX_DEPTH: usize = 1024;

/// A thread's work. It polls whether to stop, and has memory of its own.
type ReadWork<'a> = dyn Fn(&dyn Fn() -> bool, &mut Scratch) -> Result<(), VramError> + Sync + 'a;

/// What a thread keeps between chunks.
#[derive(Default)]
pub(super) struct Scratch {
    /// A chunk as it is stored.
    pub(super) stored: Vec<u8>,
    /// The encrypted shard that it has read last, by its table and number.
    open: Option<((ChunkDigest, u16), DecryptedParts)>,
}

#[derive(Debug, Clone)]
pub struct ReadOptions {
    pub threads: usize,
    pub check: bool,
    /// The memory is already zero: do not write zeros.
    pub zeroed: bool,
}

impl Default for ReadOptions {
    fn default() -> Self {
        Self {
            threads: usual_threads(),
            check: true,
            zeroed: false,
        }
    }
}

/// VRAM files in a directory, with those that they build on.
#[derive(Debug)]
pub struct Vram {
    pub index: VramIndex,
    dir: PathBuf,
    shards: Vec<OpenShard>,
    lengths: Vec<u32>,
    parent: Option<Box<Vram>>,
    identities: Identities,
}

/// An open shard.
#[derive(Debug)]
struct OpenShard {
    path: PathBuf,
    content: Content,
    bytes: u64,
}

#[derive(Debug)]
enum Content {
    /// A file of its own.
    Alone(File),
    /// A part of an archive.
    Inside(Section),
    /// In an archive's `age` stream, at this offset of what that holds.
    Encrypted(Section, u64),
}

impl OpenShard {
    fn alone(path: PathBuf) -> Result<Self, VramError> {
        let file = open_file(&path)?;
        let meta = file
            .metadata()
            .map_err(VramError::io(&path, "cannot be read"))?;
        Ok(Self {
            path,
            content: Content::Alone(file),
            bytes: meta.len(),
        })
    }

    fn in_archive(place: &InPlace) -> Result<Self, VramError> {
        let section = place.open()?;
        Ok(Self {
            path: place.path.clone(),
            content: match place.age {
                None => Content::Inside(section),
                Some(_) => Content::Encrypted(section, place.at),
            },
            bytes: place.bytes,
        })
    }
}

/// How VRAM files are opened.
#[derive(Debug, Clone, Copy)]
struct Opening<'a> {
    search: &'a [PathBuf],
    /// How many have been opened that build on these.
    depth: usize,
    /// `false`: the shards are only looked at, and nothing can be read.
    keep: bool,
}

impl<'a> Opening<'a> {
    fn new(search: &'a [PathBuf]) -> Self {
        Self {
            search,
            depth: 0,
            keep: true,
        }
    }
}

/// Where shards are that are not in the image directory; found when the first is missing.
#[derive(Default)]
struct Elsewhere {
    places: Option<Option<Places>>,
    stored: Option<Option<Found>>,
}

impl Elsewhere {
    fn open(
        &mut self,
        dir: &Path,
        number: usize,
        table: ChunkDigest,
        search: &[PathBuf],
    ) -> Result<OpenShard, VramError> {
        let name = names::vram_shard(number);
        let path = dir.join(&name);
        if path.symlink_metadata().is_ok() {
            return OpenShard::alone(path);
        }
        if self.places.is_none() {
            self.places = Some(places::find(search, table)?);
        }
        if let Some(place) = self.places.iter().flatten().find_map(|p| p.of(&name)) {
            return OpenShard::in_archive(place);
        }
        // A store is one of the searched directories.
        if self.stored.is_none() {
            self.stored = Some(store::find(dir, search)?);
        }
        match self.stored.iter().flatten().next() {
            Some(found) => OpenShard::alone(found.entry.join(&name)),
            None => Err(VramError::Missing(path)),
        }
    }
}

/// Opens the VRAM files that a table builds on; `dir` is the table's directory, if it lies in one.
///
/// Searches in this order: CRIU's link to the previous checkpoint, the paths that the table names, the directories of
/// `search`, the directories in those. Fails with [`VramError::Parent`] if the parent is missing, or another one, or
/// unusable.
pub fn parent_of(
    index: &VramIndex,
    dir: Option<&Path>,
    search: &[PathBuf],
) -> Result<Option<Vram>, VramError> {
    open_parent(index, dir, Opening::new(search))
}

fn open_parent(
    index: &VramIndex,
    dir: Option<&Path>,
    opening: Opening<'_>,
) -> Result<Option<Vram>, VramError> {
    let Some(digest) = index.parent else {
        return Ok(None);
    };
    let named = parent::named(index, dir);
    let found = opening.search.iter().flat_map(|place| parent::below(place));
    let mut failed: Option<(PathBuf, String)> = None;
    if opening.depth >= MAX_DEPTH {
        failed = Some((PathBuf::new(), "is one of an endless chain".into()));
    } else {
        for place in named.iter().cloned().chain(found) {
            match parent::table_digest(&place) {
                Some(found) if found == digest => {}
                // The table names the paths, and may be a stranger's: it must not learn what is there.
                Some(_) | None => continue,
            }
            let below = Opening {
                depth: opening.depth + 1,
                ..opening
            };
            match Vram::open_at(&place, Some(digest), below) {
                Ok(Some(vram)) => return Ok(Some(vram)),
                Ok(None) => {}
                Err(error @ VramError::Parent { .. }) => return Err(error),
                // Another copy may be intact.
                Err(error) => failed = Some((place, format!("cannot be used: {error}"))),
            }
        }
    }
    let (path, reason) = failed.unwrap_or_else(|| {
        let first = named.into_iter().next();
        (
            first.unwrap_or_default(),
            "is missing or another one".into(),
        )
    });
    Err(VramError::Parent { path, reason })
}

impl Vram {
    /// Opens the VRAM files of an image directory; `None` if there are none. `digest` is the table's digest in the
    /// metadata.
    pub fn open(dir: &Path, digest: Option<ChunkDigest>) -> Result<Option<Self>, VramError> {
        Self::open_with(dir, digest, &[])
    }

    /// Like [`Vram::open`], but also searches the directories of `search` and the directories in them for parents that
    /// have moved. Shards in a store are found in the same directories.
    pub fn open_with(
        dir: &Path,
        digest: Option<ChunkDigest>,
        search: &[PathBuf],
    ) -> Result<Option<Self>, VramError> {
        Self::open_at(dir, digest, Opening::new(search))
    }

    /// Checks that the VRAM files of an image directory and all that they build on are there, without keeping them open:
    /// a long chain has more files than a process may have open. Returns the directories of its parents, the nearest first.
    pub fn check(
        dir: &Path,
        digest: Option<ChunkDigest>,
        search: &[PathBuf],
    ) -> Result<Option<Vec<PathBuf>>, VramError> {
        let opening = Opening {
            keep: false,
            ..Opening::new(search)
        };
        let found = Self::open_at(dir, digest, opening)?;
        Ok(found.map(|vram| vram.parents().map(|parent| parent.dir.clone()).collect()))
    }

    fn open_at(
        dir: &Path,
        digest: Option<ChunkDigest>,
        opening: Opening<'_>,
    ) -> Result<Option<Self>, VramError> {
        let path = dir.join(names::VRAM_INDEX);
        let file = match open_file(&path) {
            Err(VramError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Ok(None);
            }
            other => other?,
        };
        let index = VramIndex::read(&file, &path)?;
        drop(file);
        if digest.is_some_and(|digest| digest != index.digest) {
            return Err(VramError::damaged(
                &path,
                "not the one that the checkpoint was made with",
            ));
        }
        let mut shards = Vec::new();
        let mut elsewhere = Elsewhere::default();
        for (number, bytes) in index.shards.iter().enumerate() {
            let shard = elsewhere.open(dir, number, index.digest, opening.search)?;
            if shard.bytes != *bytes {
                return Err(VramError::damaged(
                    &shard.path,
                    format!("{} bytes in place of {bytes}", shard.bytes),
                ));
            }
            if opening.keep {
                shards.push(shard);
            }
        }
        let mut vram = Self {
            lengths: index.lengths(),
            index,
            dir: dir.to_owned(),
            shards,
            parent: None,
            identities: Identities::default(),
        };
        if vram.index.parent.is_some() {
            vram.parent = open_parent(&vram.index, Some(dir), opening)?.map(Box::new);
            vram.check_parent()?;
        }
        Ok(Some(vram))
    }

    fn check_parent(&self) -> Result<(), VramError> {
        match &self.parent {
            Some(parent) => parent.holds(&self.index, &self.dir.join(names::VRAM_INDEX)),
            None => Ok(()),
        }
    }

    /// Checks that this holds the chunks that a table has in its parent. `path` is the table's, for the message.
    pub(crate) fn holds(&self, child: &VramIndex, path: &Path) -> Result<(), VramError> {
        for (number, (chunk, length)) in child.chunks.iter().zip(child.lengths()).enumerate() {
            if chunk.kind != ChunkKind::Parent {
                continue;
            }
            let place = usize::try_from(chunk.place).unwrap_or(usize::MAX);
            let there = self.index.chunks.get(place).zip(self.lengths.get(place));
            let fits = there.is_some_and(|(to, len)| {
                to.kind != ChunkKind::Zero && to.digest == chunk.digest && *len == length
            });
            if !fits {
                let what = format!("chunk {number} is not in the parent");
                return Err(VramError::damaged(path, what));
            }
        }
        Ok(())
    }

    /// Reads the keys for shards that are encrypted, if there are any.
    pub fn unlock(&mut self, identities: &[PathBuf]) {
        let encrypted = |shard: &OpenShard| matches!(shard.content, Content::Encrypted(..));
        if self.shards.iter().any(encrypted) {
            self.identities = Identities::read(identities);
        }
    }

    /// The VRAM files on which these build.
    pub fn parent(&self) -> Option<&Vram> {
        self.parent.as_deref()
    }

    /// Returns what it builds upon, and what that builds upon, the nearest first.
    pub(super) fn parents(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(self.parent(), |vram| vram.parent())
    }

    pub fn facts(&self) -> VramFacts {
        VramFacts::of(&self.index)
    }

    /// The directory, for messages.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Reads a region into memory of its size, with several threads. `cancel` makes it end early. After a [`VramError`]
    /// the memory's contents are undefined.
    pub fn read(
        &self,
        region: usize,
        to: &mut [u8],
        options: &ReadOptions,
        cancel: &AtomicBool,
    ) -> Result<(), VramError> {
        self.read_with(region, to, options, cancel, &|_, _| Ok(()))
    }

    /// Like [`Vram::read`], and calls `done` with the offset and the contents of each chunk that has been read and
    /// checked. Threads take runs of chunks in ascending order.
    pub fn read_with(
        &self,
        region: usize,
        to: &mut [u8],
        options: &ReadOptions,
        cancel: &AtomicBool,
        done: &(dyn Fn(usize, &mut [u8]) -> io::Result<()> + Sync),
    ) -> Result<(), VramError> {
        let range = self.index.range(region);
        let bytes = self.index.regions.get(region).map(|region| region.bytes);
        let (Some(range), true) = (range, bytes == Some(to.len() as u64)) else {
            return Err(VramError::Invalid(format!(
                "region {region} has not {} bytes",
                to.len()
            )));
        };
        let size = self.index.chunk_bytes as usize;
        let first = range.start;
        let runs = range.step_by(RUN).zip(to.chunks_mut(size * RUN));
        let queue = Mutex::new(runs);
        let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
        self.on_threads(options.threads, cancel, &|failed, scratch| {
            while let Some((start, run)) = next() {
                for (number, piece) in (start..).zip(run.chunks_mut(size)) {
                    if failed() {
                        return Err(VramError::Cancelled);
                    }
                    let zeros = self.index.chunks[number].kind == ChunkKind::Zero;
                    if !(zeros && options.zeroed) {
                        self.chunk(number, piece, options.check, scratch)?;
                    }
                    done((number - first) * size, piece)
                        .map_err(VramError::io(&self.dir, "cannot be read into memory"))?;
                }
            }
            Ok(())
        })
    }

    /// Reads every chunk and checks its digest, without keeping it.
    pub fn verify(&self, threads: usize, cancel: &AtomicBool) -> Result<(), VramError> {
        let own = |n: &usize| self.index.chunks[*n].kind != ChunkKind::Same;
        let all: Vec<usize> = (0..self.lengths.len()).filter(own).collect();
        self.verify_chunks(&all, threads, cancel)
    }

    /// Like [`Vram::verify`], for these chunks.
    pub(crate) fn verify_chunks(
        &self,
        numbers: &[usize],
        threads: usize,
        cancel: &AtomicBool,
    ) -> Result<(), VramError> {
        let queue = Mutex::new(numbers.chunks(RUN));
        let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
        self.on_threads(threads, cancel, &|failed, scratch| {
            let mut piece = vec![0; self.index.chunk_bytes as usize];
            for number in std::iter::from_fn(next).flatten() {
                if failed() {
                    return Err(VramError::Cancelled);
                }
                let (Some(length), Some(chunk)) =
                    (self.lengths.get(*number), self.index.chunks.get(*number))
                else {
                    return Err(VramError::Invalid(format!("there is no chunk {number}")));
                };
                if chunk.kind != ChunkKind::Zero {
                    self.chunk(*number, &mut piece[..*length as usize], true, scratch)?;
                }
            }
            Ok(())
        })
    }

    /// Runs the same work on several threads; the first error ends all.
    pub(super) fn on_threads(
        &self,
        threads: usize,
        cancel: &AtomicBool,
        work: &ReadWork<'_>,
    ) -> Result<(), VramError> {
        let failed = AtomicBool::new(false);
        let stop = || failed.load(Relaxed) || cancel.load(Relaxed);
        let one = || {
            let mut scratch = Scratch::default();
            let done = work(&stop, &mut scratch);
            failed.fetch_or(done.is_err(), Relaxed);
            done
        };
        run_on(threads.min(self.lengths.len()), &one)
    }

    /// Reads one chunk into memory of its size.
    fn chunk(
        &self,
        number: usize,
        to: &mut [u8],
        check: bool,
        scratch: &mut Scratch,
    ) -> Result<(), VramError> {
        let chunk = self.index.chunks[number];
        let place = usize::try_from(chunk.place).unwrap_or(usize::MAX);
        match (chunk.kind, &self.parent) {
            (ChunkKind::Zero, _) => {
                to.fill(0);
                return Ok(());
            }
            // Reading the table has compared the digests of both.
            (ChunkKind::Same, _) => return self.chunk(place, to, check, scratch),
            (ChunkKind::Parent, Some(parent)) => return parent.chunk(place, to, check, scratch),
            (ChunkKind::Parent, None) => {
                return Err(VramError::Invalid("a chunk of no parent".into()));
            }
            (ChunkKind::Raw, _) => self.stored(&chunk, to, &mut scratch.open)?,
            (ChunkKind::Lz4 | ChunkKind::Zstd, _) => {
                let Scratch { stored, open } = scratch;
                stored.resize(chunk.stored as usize, 0);
                self.stored(&chunk, stored, open)?;
                decode(chunk.kind, stored, to).map_err(|what| {
                    VramError::damaged(&self.shard(&chunk), format!("chunk {number}: {what}"))
                })?;
            }
        }
        let check = check || !matches!(self.of(&chunk).content, Content::Alone(_));
        if check && ChunkDigest::of(to) != chunk.digest {
            let what = format!("chunk {number} does not fit its digest");
            return Err(VramError::damaged(&self.shard(&chunk), what));
        }
        Ok(())
    }

    /// Returns a chunk in its stored form in `scratch`, wherever it lies, after checking its digest; `plain` is a buffer.
    pub(super) fn as_stored(
        &self,
        number: usize,
        scratch: &mut Scratch,
        plain: &mut Vec<u8>,
    ) -> Result<ChunkKind, VramError> {
        let mut at = (self, number);
        let chunk = loop {
            let (vram, number) = at;
            let chunk = vram.index.chunks[number];
            let place = usize::try_from(chunk.place).unwrap_or(usize::MAX);
            at = match (chunk.kind, &vram.parent) {
                (ChunkKind::Same, _) => (vram, place),
                (ChunkKind::Parent, Some(parent)) => (&**parent, place),
                _ => break chunk,
            };
        };
        let (vram, number) = at;
        let Scratch { stored, open } = scratch;
        stored.resize(chunk.stored as usize, 0);
        vram.stored(&chunk, stored, open)?;
        let bad = |what: String| {
            VramError::damaged(&vram.shard(&chunk), format!("chunk {number}: {what}"))
        };
        let content = match chunk.kind {
            ChunkKind::Lz4 | ChunkKind::Zstd => {
                plain.resize(vram.lengths[number] as usize, 0);
                decode(chunk.kind, stored, plain).map_err(&bad)?;
                &plain[..]
            }
            ChunkKind::Raw => &stored[..],
            _ => return Err(bad("it is nowhere".into())),
        };
        match ChunkDigest::of(content) == chunk.digest {
            true => Ok(chunk.kind),
            false => Err(bad("it does not fit its digest".into())),
        }
    }

    fn of(&self, chunk: &Chunk) -> &OpenShard {
        &self.shards[usize::from(chunk.shard)]
    }

    fn shard(&self, chunk: &Chunk) -> PathBuf {
        self.of(chunk).path.clone()
    }

    fn stored(
        &self,
        chunk: &Chunk,
        to: &mut [u8],
        open: &mut Option<((ChunkDigest, u16), DecryptedParts)>,
    ) -> Result<(), VramError> {
        let shard = self.of(chunk);
        let read = match &shard.content {
            Content::Alone(file) => file.read_exact_at(to, chunk.place),
            Content::Inside(section) => {
                let at = section.at().saturating_add(chunk.place);
                section.file().read_exact_at(to, at)
            }
            Content::Encrypted(section, at) => {
                let key = (self.index.digest, chunk.shard);
                let parts = match open.take() {
                    Some((of, parts)) if of == key => parts,
                    _ => self.decrypt(section, &shard.path)?,
                };
                let (_, parts) = open.insert((key, parts));
                let gone = parts.go_to(at.saturating_add(chunk.place));
                gone.and_then(|()| parts.read_exact(to))
            }
        };
        read.map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => VramError::damaged(&shard.path, "shorter than it was"),
            _ => match Error::from_io(&shard.path, "read it", error) {
                Error::Bad { bad, .. } => VramError::damaged(&shard.path, bad.to_string()),
                Error::Io { source, .. } => VramError::io(&shard.path, "cannot be read")(source),
                other => VramError::Invalid(other.to_string()),
            },
        })
    }

    fn decrypt(&self, section: &Section, path: &Path) -> Result<DecryptedParts, VramError> {
        let parts = self.identities.decrypt_parts(section, path);
        parts.map_err(|e| VramError::Invalid(e.to_string()))
    }
}
