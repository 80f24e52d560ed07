//! Checks that nobody else can exchange the images of a restore while they are read: CRIU does as root what they say.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use cryopod_archive::format::names;

use crate::security::image_check::MAX_ENTRIES;

/// The deepest directory below the checkpoint: an OCI layout has `blobs/sha256`.
const MAX_DEPTH: usize = 8;
/// The longest chain of checkpoints that CRIU's `parent` links make.
const MAX_PARENTS: usize = 1024;
const OTHERS_WRITE: u32 = 0o022;
const OTHERS_SEARCH: u32 = 0o011;
const STICKY: u32 = 0o1000;

/// Checks a checkpoint's file or directory, all below it, all directories above it, and the checkpoints that CRIU
/// would read with it. The path has no symbolic links.
pub fn check(path: &Path) -> Result<(), String> {
    let mut next = Some(path.to_owned());
    for _ in 0..MAX_PARENTS {
        let Some(path) = next else { return Ok(()) };
        above(&path)?;
        below(&path, MAX_DEPTH, &mut MAX_ENTRIES.clone())?;
        let parent = path.join(names::PARENT_LINK);
        next = match parent.is_symlink() {
            true => Some(parent.canonicalize().map_err(unread(&parent))?),
            false => None,
        };
    }
    Err(format!(
        "{}: a chain of checkpoints without end",
        path.display()
    ))
}

/// Checks a directory, and all above it, that checkpoints are written into.
pub fn check_place(directory: &Path) -> Result<(), String> {
    above(directory)?;
    let meta = directory.symlink_metadata().map_err(unread(directory))?;
    match is_own(&meta) && !others_write(&meta) {
        true => Ok(()),
        false => Err(not_own(directory)),
    }
}

/// Checks an image directory that an engine names: one that others cannot even reach is the engine's own affair.
pub fn check_reachable(images: &Path) -> Result<(), String> {
    let real = images.canonicalize().map_err(unread(images))?;
    for path in real.ancestors() {
        let meta = path.symlink_metadata().map_err(unread(path))?;
        if is_own(&meta) && meta.mode() & OTHERS_SEARCH == 0 {
            // Who may write above it could still put another one in its place.
            return above(path);
        }
    }
    check(&real)
}

/// The directories above: nobody may put another one in the place of the next. In a sticky directory nobody can.
fn above(path: &Path) -> Result<(), String> {
    for path in path.ancestors().skip(1) {
        let meta = path.symlink_metadata().map_err(unread(path))?;
        let sticky = meta.mode() & STICKY != 0;
        if !is_own(&meta) || others_write(&meta) && !sticky {
            return Err(not_own(path));
        }
    }
    Ok(())
}

fn below(path: &Path, depth: usize, left: &mut usize) -> Result<(), String> {
    let meta = path.symlink_metadata().map_err(unread(path))?;
    if !is_own(&meta) || others_write(&meta) {
        return Err(not_own(path));
    }
    if !meta.is_dir() {
        return Ok(());
    }
    if depth == 0 {
        return Err(format!("{}: deeper than any checkpoint", path.display()));
    }
    for entry in fs::read_dir(path).map_err(unread(path))? {
        *left = left
            .checked_sub(1)
            .ok_or_else(|| format!("{}: more files than any checkpoint has", path.display()))?;
        below(&entry.map_err(unread(path))?.path(), depth - 1, left)?;
    }
    Ok(())
}

fn is_own(meta: &Metadata) -> bool {
    meta.uid() == 0
}

fn others_write(meta: &Metadata) -> bool {
    !meta.is_symlink() && meta.mode() & OTHERS_WRITE != 0
}

fn not_own(path: &Path) -> String {
    format!(
        "{} is not root's alone: chown it to root and take write permission from group and others",
        path.display()
    )
}

fn unread(path: &Path) -> impl Fn(io::Error) -> String {
    move |e| format!("{}: {e}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryopod_test_files::TestFiles;
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, chown};
    use std::path::PathBuf;

    fn chmod(path: &Path, mode: u32) {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    /// `reachable/c1` with a file, in a directory as the host's `/srv`.
    fn checkpoint() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        chmod(dir.path(), 0o755);
        let images = dir.path().canonicalize().unwrap().join("reachable/c1");
        images.put("blobs/sha256/00", "");
        images.put("inventory.img", "");
        for path in images.ancestors().take(2) {
            chmod(path, 0o755);
        }
        (dir, images)
    }

    #[test]
    fn whatever_others_can_write_is_refused() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        for (name, mode) in [
            ("inventory.img", 0o666),
            ("inventory.img", 0o620),
            ("", 0o777),
            ("..", 0o775),
            ("blobs/sha256", 0o757),
            ("blobs/sha256/00", 0o606),
        ] {
            let (_dir, images) = checkpoint();
            check(&images).unwrap();
            check_reachable(&images).unwrap();
            let path = match name {
                ".." => images.parent().unwrap().to_owned(),
                "" => images.clone(),
                name => images.join(name),
            };
            chmod(&path, mode);
            for error in [check(&images), check_reachable(&images)] {
                let want = format!("{} is not root's alone", path.display());
                assert!(error.unwrap_err().starts_with(&want), "{name}");
            }
        }
    }

    #[test]
    fn owners_sticky_directories_and_what_nobody_reaches() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let (dir, images) = checkpoint();
        chmod(images.parent().unwrap(), 0o1777);
        check(&images).unwrap();
        chown(images.join("inventory.img"), Some(1000), None).unwrap();
        assert!(check(&images).is_err() && check_reachable(&images).is_err());
        chmod(dir.path(), 0o700);
        check_reachable(&images).unwrap();
        assert!(check(&images).is_err());
    }

    #[test]
    fn the_checkpoints_that_criu_reads_with_it_count() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let (_dir, images) = checkpoint();
        let parent = images.with_file_name("c0");
        fs::create_dir(&parent).unwrap();
        images.link(names::PARENT_LINK, "../c0");
        chmod(&parent, 0o755);
        check(&images).unwrap();
        chmod(&parent, 0o777);
        let error = check(&images).unwrap_err();
        assert!(error.contains("c0 is not root's alone"), "{error}");
        chmod(&parent, 0o755);
        parent.link(names::PARENT_LINK, "../c1");
        let error = check(&images).unwrap_err();
        assert!(error.contains("without end"), "{error}");
    }
}
