//! Moves large image files directly between cryopod and the runtime, so that they need not go through an engine's tar.
//!
//! podman writes an export file with one thread, and reads it twice at an import. For the memory of a GPU container
//! that is a waste: `cryopod export` and `import` run beside podman on the same host, and podman calls cryopod's
//! runtime. So the runtime moves the large files aside, on the same file system, and back:
//!
//! - **Export.** `cryopod export` creates the directory [`AWAY`] beside the image directory, and locks it. After a
//!   checkpoint the runtime moves the large files into it. It does not if nobody holds the lock, because then nobody
//!   would fetch them. podman's file holds the rest. `export` then moves the files back and packs the image directory.
//!   If an export is killed, the next checkpoint, export or restore moves its files back first.
//! - **Import.** `cryopod import` unpacks an archive, and gives podman a file with all but the large files, and a
//!   [`TICKET`]. The ticket is the random name of a link in [`DESK`] to the directory with the large files. Archives
//!   come from strangers, but a ticket alone gives no access: only root writes links there, and nobody can guess a
//!   name, and each is good once. What else `import` was asked for, the GPU map ([`MAP`]), is with these files, and so
//!   has root's word, too. So has the list of the shards that stay in the archive ([`VRAM_PLACES`]).

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use cryopod_archive::format::names::{VRAM_PLACES, is_large};
use cryopod_host::files::own_directory;

/// The directory beside the image directory that takes the large files.
pub const AWAY: &str = "cryopod-away";
/// The file in the image directory that says where the large files are.
pub const TICKET: &str = "cryopod-away.ticket";
/// The directory of the links that tickets name.
pub const DESK: &str = "/run/cryopod/away";
/// The file beside the large files with the GPU map of this one restore.
pub const MAP: &str = "cryopod-gpu-map";
const MAX_MAP: u64 = 64 << 10;
const DIGITS: usize = 32;

fn fail(path: &Path, what: &str) -> impl FnOnce(io::Error) -> io::Error {
    let text = format!("{}: {what}", path.display());
    move |e| io::Error::new(e.kind(), format!("{text}: {e}"))
}

/// Returns true if `cryopod export` has asked for the large files of this image directory.
pub fn asked(images: &Path) -> bool {
    let away = beside(images).filter(|p| own_directory(p));
    away.is_some_and(|away| matches!(lock(&away), Ok(None)))
}

/// Moves the large files of an image directory into another directory, which exists. Returns their number. After an
/// error the files moved so far stay there.
pub fn part(images: &Path, away: &Path) -> io::Result<usize> {
    let mut moved = 0;
    for item in fs::read_dir(images).map_err(fail(images, "cannot list it"))? {
        let item = item.map_err(fail(images, "cannot list it"))?;
        let meta = item
            .metadata()
            .map_err(fail(&item.path(), "cannot read its type"))?;
        let name = item.file_name();
        if meta.is_file() && name.to_str().is_some_and(|n| is_large(n, meta.len())) {
            let to = away.join(&name);
            fs::rename(item.path(), &to).map_err(fail(&to, "cannot move a file there"))?;
            moved += 1;
        }
    }
    Ok(moved)
}

/// Moves all files of a directory into another, but for the list of places. Returns their number.
///
/// # Errors
/// The first file that could not be moved. It stays where it is and the others are moved; no file is lost or truncated.
pub fn join(away: &Path, images: &Path) -> io::Result<usize> {
    let (mut moved, mut first) = (0, None);
    for item in fs::read_dir(away).map_err(fail(away, "cannot list it"))? {
        let item = item.map_err(fail(away, "cannot list it"))?;
        if item.file_name() == VRAM_PLACES {
            continue;
        }
        let to = images.join(item.file_name());
        let done = match fs::rename(item.path(), &to) {
            Err(e) if e.raw_os_error() == Some(libc::EXDEV) => {
                over(&item.path(), &to, &mut |from, to| io::copy(from, to))
            }
            other => other.map_err(fail(&to, "cannot move a file there")),
        };
        match done {
            Ok(()) => moved += 1,
            Err(e) => drop(first.get_or_insert(e)),
        }
    }
    first.map_or(Ok(moved), Err)
}

/// Moves a file to another file system. It gets its name there, and is removed here, only when it is complete and on
/// disk.
fn over(
    from: &Path,
    to: &Path,
    copy: &mut dyn FnMut(&mut File, &mut File) -> io::Result<u64>,
) -> io::Result<()> {
    let (Some(directory), Some(name)) = (to.parent(), to.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let mut open = OpenOptions::new();
    open.read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC);
    let mut source = open.open(from).map_err(fail(from, "cannot open it"))?;
    let meta = source.metadata().map_err(fail(from, "cannot open it"))?;
    if !meta.is_file() {
        return Err(fail(from, "cannot copy it")(io::Error::other(
            "no regular file",
        )));
    }
    let mut partial = std::ffi::OsString::from(".");
    partial.push(name);
    partial.push(".cryopod-partial");
    let partial = directory.join(partial);
    // Left by a killed process.
    match fs::remove_file(&partial) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            return Err(fail(&partial, "cannot remove it")(e));
        }
        _ => {}
    }
    let mut copied = || -> io::Result<()> {
        let mut target = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(meta.mode() & 0o777)
            .open(&partial)?;
        let bytes = copy(&mut source, &mut target)?;
        if bytes != meta.len() {
            return Err(io::Error::other(format!(
                "{bytes} bytes instead of {}",
                meta.len()
            )));
        }
        target.sync_all()?;
        fs::rename(&partial, to)?;
        File::open(directory)?.sync_all()
    };
    copied().map_err(|e| {
        let _ = fs::remove_file(&partial);
        fail(to, "cannot copy a file there")(e)
    })?;
    fs::remove_file(from).map_err(fail(from, "cannot remove it after it was copied"))
}

/// Returns the directory beside an image directory.
fn beside(images: &Path) -> Option<PathBuf> {
    let images = std::path::absolute(images).ok()?;
    Some(images.parent()?.join(AWAY))
}

/// A request to move large files aside, valid until it is dropped or its process ends.
#[derive(Debug)]
pub struct ImportRequest {
    away: PathBuf,
    _lock: Flock<File>,
}

impl ImportRequest {
    /// The directory that the runtime will move the files into.
    pub fn away(&self) -> &Path {
        &self.away
    }
}

/// Asks the runtime to move the large files of the next checkpoint aside. First moves what a killed process left there
/// back into the image directory.
///
/// # Errors
/// `WouldBlock` if another process has asked for the same.
pub fn ask(images: &Path) -> io::Result<ImportRequest> {
    let away = beside(images).ok_or(io::ErrorKind::InvalidInput)?;
    for _ in 0..100 {
        match DirBuilder::new().mode(0o700).create(&away) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                return Err(fail(&away, "cannot make it")(e));
            }
            _ => {}
        }
        if !own_directory(&away) {
            let what = io::Error::other("it is not a directory of this user's alone");
            return Err(fail(&away, "cannot be used")(what));
        }
        // In between, a runtime may remove the directory, because nobody has locked it.
        let Some(lock) = lock(&away)? else {
            let what = io::Error::from(io::ErrorKind::WouldBlock);
            return Err(fail(&away, "another export of this container is running")(
                what,
            ));
        };
        let (Ok(ours), Ok(there)) = (lock.metadata(), fs::symlink_metadata(&away)) else {
            continue;
        };
        if (ours.dev(), ours.ino()) == (there.dev(), there.ino()) {
            join(&away, images)?;
            return Ok(ImportRequest { away, _lock: lock });
        }
    }
    Err(fail(&away, "cannot be locked")(
        io::ErrorKind::WouldBlock.into(),
    ))
}

/// Locks a directory; `None` if another process holds the lock.
fn lock(directory: &Path) -> io::Result<Option<Flock<File>>> {
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_CLOEXEC)
        .open(directory);
    let file = match opened {
        Ok(file) => file,
        Err(e) => return Err(fail(directory, "cannot open it")(e)),
    };
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, e)) => Err(fail(directory, "cannot lock it")(e.into())),
    }
}

/// Call before a checkpoint. Moves back what a killed export left: it belongs to the checkpoint that this one may
/// replace.
pub fn before_checkpoint(images: &Path) -> io::Result<()> {
    let Some(away) = beside(images).filter(|p| own_directory(p)) else {
        return Ok(());
    };
    match lock(&away)? {
        Some(_nobody) => back(&away, images),
        None => Ok(()),
    }
}

/// Call after a checkpoint. Moves the large files aside if `cryopod export` has asked for it. Returns their number.
/// After an error all files are where they were, or the message names those that could not be moved back.
pub fn after_checkpoint(images: &Path) -> io::Result<usize> {
    let Some(away) = beside(images).filter(|p| own_directory(p)) else {
        return Ok(0);
    };
    if lock(&away)?.is_some() {
        tracing::warn!(
            "{}: who wanted the large files there is gone",
            away.display()
        );
        return Ok(0);
    }
    part(images, &away).map_err(|e| match join(&away, images) {
        Ok(_) => e,
        Err(again) => io::Error::new(
            e.kind(),
            format!(
                "{e}; and those that were moved could not be moved back: {again}; they are in {}, and belong into {}",
                away.display(),
                images.display()
            ),
        ),
    })
}

/// What `cryopod import` hands to one restore, beside the files.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ImportGrant {
    pub map: Option<String>,
    /// The directory with the list of the shards that stay in the archive.
    pub places: Option<PathBuf>,
}

/// Call before a restore. Brings the large files back into the image directory. Returns what came with them. Fails if the
/// ticket leads nowhere.
pub fn before_restore(images: &Path) -> io::Result<ImportGrant> {
    if let Some(away) = beside(images).filter(|p| own_directory(p)) {
        back(&away, images)?;
    }
    redeem(images, Path::new(DESK))
}

/// Moves all files back, and removes the directory.
fn back(away: &Path, images: &Path) -> io::Result<()> {
    join(away, images)?;
    match fs::remove_dir(away) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(fail(away, "cannot remove it")(e)),
        _ => Ok(()),
    }
}

fn redeem(images: &Path, desk: &Path) -> io::Result<ImportGrant> {
    let file = images.join(TICKET);
    let ticket = match fs::symlink_metadata(&file) {
        Ok(meta) if meta.is_file() && meta.len() == DIGITS as u64 => {
            fs::read_to_string(&file).map_err(fail(&file, "cannot read it"))?
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(ImportGrant::default()),
        Err(e) => return Err(fail(&file, "cannot read it")(e)),
        Ok(_) => return Err(worthless(&file)),
    };
    let valid = ticket
        .bytes()
        .all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    if !valid || !own_directory(desk) {
        return Err(worthless(&file));
    }
    let link = desk.join(&ticket);
    let away = fs::read_link(&link).map_err(|_| worthless(&file))?;
    if !own_directory(&away) {
        return Err(worthless(&file));
    }
    fs::remove_file(&link).map_err(fail(&link, "cannot remove it"))?;
    let map = take_map(&away)?;
    join(&away, images)?;
    fs::remove_file(&file).map_err(fail(&file, "cannot remove it"))?;
    let places = away.join(VRAM_PLACES).is_file().then_some(away);
    Ok(ImportGrant { map, places })
}

/// Reads the GPU map and removes it, so that it does not become a file of the checkpoint.
fn take_map(away: &Path) -> io::Result<Option<String>> {
    let path = away.join(MAP);
    let text = match cryopod_host::files::read_bounded(&path, MAX_MAP) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        text => text.map_err(fail(&path, "cannot read it"))?,
    };
    fs::remove_file(&path).map_err(fail(&path, "cannot remove it"))?;
    let text = String::from_utf8(text).map_err(|e| fail(&path, "no text")(io::Error::other(e)))?;
    Ok(Some(text))
}

fn worthless(file: &Path) -> io::Error {
    io::Error::other(format!(
        "{}: the large files of this checkpoint are not in it: it was made for one run of `cryopod import`, which is over; import the archive itself",
        file.display()
    ))
}

/// Writes a ticket into an image directory, for the directory with its other files. Dropping the ticket revokes it.
pub fn issue(images: &Path, away: &Path) -> io::Result<Ticket> {
    issue_at(Path::new(DESK), images, away)
}

fn issue_at(desk: &Path, images: &Path, away: &Path) -> io::Result<Ticket> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(desk)
        .map_err(fail(desk, "cannot make it"))?;
    if !own_directory(desk) {
        return Err(io::Error::other(format!(
            "{}: others can write there",
            desk.display()
        )));
    }
    let mut random = [0; DIGITS / 2];
    let source = Path::new("/dev/urandom");
    io::Read::read_exact(
        &mut File::open(source).map_err(fail(source, "cannot open it"))?,
        &mut random,
    )?;
    let ticket: String = random.iter().map(|b| format!("{b:02x}")).collect();
    let link = desk.join(&ticket);
    std::os::unix::fs::symlink(std::path::absolute(away)?, &link)
        .map_err(fail(&link, "cannot make it"))?;
    let issued = Ticket { link };
    let file = images.join(TICKET);
    fs::write(&file, ticket).map_err(fail(&file, "cannot write it"))?;
    Ok(issued)
}

/// Removes the tickets that lead below a directory that is given up because its owner was killed.
pub fn revoke(directory: &Path) {
    revoke_at(Path::new(DESK), directory);
}

fn revoke_at(desk: &Path, directory: &Path) {
    for item in fs::read_dir(desk).into_iter().flatten().flatten() {
        if fs::read_link(item.path()).is_ok_and(|to| to.starts_with(directory)) {
            let _ = fs::remove_file(item.path());
        }
    }
}

#[derive(Debug)]
pub struct Ticket {
    link: PathBuf,
}

impl Ticket {
    /// Whether a runtime has taken what it stands for.
    pub fn is_redeemed(&self) -> bool {
        fs::symlink_metadata(&self.link).is_err()
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.link);
    }
}

#[cfg(test)]
mod tests;
