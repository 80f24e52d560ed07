//! Large image files that need not go through an engine's tar.
//!
//! podman writes an export file with one thread, and reads it twice at an import. The memory of a GPU container would
//! go that way for nothing: `cryopod export` and `import` run beside podman on the same host, and the runtime that
//! podman calls is cryopod's. So the runtime moves the large files aside, on the same file system, and back:
//!
//! - **Export.** `cryopod export` makes the folder [`AWAY`] beside the image folder. The runtime finds it after a
//!   checkpoint, and moves the large files into it. podman's file holds the rest. `export` then moves them back, and
//!   packs what lies there. A restore finds what a killed export left, and moves it back first.
//! - **Import.** `cryopod import` unpacks an archive, and gives podman a file with all but the large ones, and a
//!   [`TICKET`]: a random name, below [`DESK`], of a link to the folder that has them. Archives come from strangers: a
//!   ticket alone leads nowhere, as only root writes links there, and nobody knows a name in advance.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The folder beside the image folder that large files are moved into.
pub const AWAY: &str = "cryopod-away";
/// The file in the image folder that says where the large files are.
pub const TICKET: &str = "cryopod-away.ticket";
/// Where tickets lead.
pub const DESK: &str = "/run/cryopod/away";
/// Smaller files are left where they are, in bytes.
const LARGE: u64 = 1 << 20;
/// Hexadecimal digits of a ticket.
const DIGITS: usize = 32;

fn fail(path: &Path, what: &str) -> impl FnOnce(io::Error) -> io::Error {
    let text = format!("{}: {what}", path.display());
    move |e| io::Error::new(e.kind(), format!("{text}: {e}"))
}

/// Is it a file of pages, or a shard of the lane?
fn is_large(name: &str, bytes: u64) -> bool {
    let number = name
        .strip_prefix("lane-")
        .or_else(|| name.strip_prefix("pages-"))
        .and_then(|rest| rest.strip_suffix(".img"));
    bytes >= LARGE && number.is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
}

/// Moves the large files of an image folder into another, which exists. Says how many they are.
///
/// # Errors
/// What the system said; what was moved until then stays there.
pub fn part(images: &Path, away: &Path) -> io::Result<usize> {
    let mut moved = 0;
    for item in fs::read_dir(images).map_err(fail(images, "cannot list it"))? {
        let item = item?;
        let meta = item.metadata()?;
        let name = item.file_name();
        if meta.is_file() && name.to_str().is_some_and(|n| is_large(n, meta.len())) {
            let to = away.join(&name);
            fs::rename(item.path(), &to).map_err(fail(&to, "cannot move a file there"))?;
            moved += 1;
        }
    }
    Ok(moved)
}

/// Moves all files of a folder into another; says how many they are.
///
/// # Errors
/// What the system said; what was moved until then stays there.
pub fn join(away: &Path, images: &Path) -> io::Result<usize> {
    let mut moved = 0;
    for item in fs::read_dir(away).map_err(fail(away, "cannot list it"))? {
        let item = item?;
        let to = images.join(item.file_name());
        match fs::rename(item.path(), &to) {
            Err(e) if e.raw_os_error() == Some(libc::EXDEV) => fs::copy(item.path(), &to)
                .and_then(|_| fs::remove_file(item.path()))
                .map_err(fail(&to, "cannot copy a file there"))?,
            other => other.map_err(fail(&to, "cannot move a file there"))?,
        }
        moved += 1;
    }
    Ok(moved)
}

/// The folder beside an image folder.
fn beside(images: &Path) -> Option<PathBuf> {
    let images = std::path::absolute(images).ok()?;
    Some(images.parent()?.join(AWAY))
}

/// After a checkpoint: moves the large files aside, if `cryopod export` has asked for it. Says how many they are.
///
/// # Errors
/// What the system said; then all are where they were.
pub fn after_checkpoint(images: &Path) -> io::Result<usize> {
    let Some(away) = beside(images).filter(|p| own_folder(p)) else {
        return Ok(0);
    };
    part(images, &away).inspect_err(|_| {
        let _ = join(&away, images);
    })
}

/// Before a restore: brings the large files back into the image folder, if they are elsewhere.
///
/// # Errors
/// A ticket that leads nowhere, and what the system said.
pub fn before_restore(images: &Path) -> io::Result<()> {
    if let Some(away) = beside(images).filter(|p| own_folder(p)) {
        join(&away, images)?;
        let _ = fs::remove_dir(&away);
    }
    redeem(images, Path::new(DESK))
}

fn redeem(images: &Path, desk: &Path) -> io::Result<()> {
    let file = images.join(TICKET);
    let ticket = match fs::symlink_metadata(&file) {
        Ok(meta) if meta.is_file() && meta.len() == DIGITS as u64 => fs::read_to_string(&file)?,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        _ => return Err(worthless(&file)),
    };
    let valid = ticket
        .bytes()
        .all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    if !valid || !own_folder(desk) {
        return Err(worthless(&file));
    }
    let away = fs::read_link(desk.join(&ticket)).map_err(|_| worthless(&file))?;
    join(&away, images)?;
    fs::remove_file(&file).map_err(fail(&file, "cannot remove it"))
}

fn worthless(file: &Path) -> io::Error {
    io::Error::other(format!(
        "{}: the large files of this checkpoint are not in it: it was made for one run of `cryopod import`, which is over; import the archive itself",
        file.display()
    ))
}

/// Writes a ticket into an image folder, for a folder that has the rest of it. Dropped, it is worth nothing.
///
/// # Errors
/// What the system said.
pub fn issue(images: &Path, away: &Path) -> io::Result<Ticket> {
    issue_at(Path::new(DESK), images, away)
}

fn issue_at(desk: &Path, images: &Path, away: &Path) -> io::Result<Ticket> {
    use std::os::unix::fs::DirBuilderExt;
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(desk)
        .map_err(fail(desk, "cannot make it"))?;
    if !own_folder(desk) {
        return Err(io::Error::other(format!(
            "{}: others can write there",
            desk.display()
        )));
    }
    let mut random = [0; DIGITS / 2];
    let source = Path::new("/dev/urandom");
    io::Read::read_exact(
        &mut fs::File::open(source).map_err(fail(source, "cannot open it"))?,
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

/// A ticket that is good until it is dropped.
#[derive(Debug)]
pub struct Ticket {
    link: PathBuf,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.link);
    }
}

/// A folder, no link, of this user, in which nobody else can write.
fn own_folder(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|m| {
        m.is_dir() && m.uid() == nix::unistd::geteuid().as_raw() && m.mode() & 0o022 == 0
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A bundle with images, large and small, below a folder.
    fn images() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let images = dir.path().join("checkpoint");
        fs::create_dir(&images).unwrap();
        for (name, bytes) in [
            ("pages-1.img", 2 << 20),
            ("lane-0000.img", 1 << 20),
            ("lane-index.img", 2 << 20),
            ("pages-2.img", 10),
            ("inventory.img", 10),
        ] {
            fs::write(images.join(name), vec![1; bytes]).unwrap();
        }
        (dir, images)
    }

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(dir)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn aside_only_where_it_was_asked_for_and_back() {
        let (dir, images) = images();
        let all = names(&images);
        assert_eq!(after_checkpoint(&images).unwrap(), 0);
        let away = dir.path().join(AWAY);
        std::os::unix::fs::symlink("/tmp", &away).unwrap();
        assert_eq!(
            after_checkpoint(&images).unwrap(),
            0,
            "a link is no request"
        );
        fs::remove_file(&away).unwrap();
        fs::create_dir(&away).unwrap();
        assert_eq!(after_checkpoint(&images).unwrap(), 2);
        assert_eq!(names(&away), ["lane-0000.img", "pages-1.img"]);
        before_restore(&images).unwrap();
        assert_eq!(names(&images), all);
        assert!(!away.exists());
    }

    #[test]
    fn a_ticket_is_good_once_and_a_strangers_never() {
        let (dir, images) = images();
        let all = names(&images);
        let (desk, away) = (dir.path().join("desk"), dir.path().join("elsewhere"));
        fs::create_dir(&away).unwrap();
        assert_eq!(part(&images, &away).unwrap(), 2);
        let ticket = issue_at(&desk, &images, &away).unwrap();
        let text = fs::read_to_string(images.join(TICKET)).unwrap();
        redeem(&images, &desk).unwrap();
        assert_eq!(names(&images), all);
        drop(ticket);
        assert!(names(&desk).is_empty());
        for text in [&text[..], "../../../../../../../../etc/pass", "short"] {
            fs::write(images.join(TICKET), text).unwrap();
            let error = redeem(&images, &desk).unwrap_err().to_string();
            assert!(error.contains("import the archive itself"), "{error}");
        }
        fs::remove_file(images.join(TICKET)).unwrap();
        std::os::unix::fs::symlink("/etc/hostname", images.join(TICKET)).unwrap();
        redeem(&images, &desk).unwrap_err();
    }
}
