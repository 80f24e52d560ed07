//! cryopod's own files on a Kubernetes node: the installer's image brings them, and a directory of their own holds them. Each
//! file is written beside its place and renamed: running containers keep the programs that they have.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use cryopod_host::files::{Host, create_private, if_there};

use super::change;

/// Where they are on a node. `/usr` is read-only on some.
pub const DIRECTORY: &str = "/opt/cryopod";
const PROGRAMS: [&str; 3] = ["cryopod", "cryopod-runtime", "containerd-shim-cryopod-v2"];
const LIBRARIES: &str = "lib/cryopod";

/// The files, open, by their places below [`DIRECTORY`]. They come from another root.
pub struct OwnFiles(BTreeMap<PathBuf, File>);

impl OwnFiles {
    /// Opens the programs beside this one, and the libraries of this installation.
    pub fn open() -> anyhow::Result<Self> {
        let own = std::env::current_exe()?;
        let programs = own.parent().context("no directory of programs")?;
        let mut all = BTreeMap::new();
        for name in PROGRAMS {
            let path = programs.join(name);
            let file = File::open(&path).with_context(|| path.display().to_string())?;
            all.insert(Path::new("bin").join(name), file);
        }
        let libraries = [
            programs.join("..").join(LIBRARIES),
            "/usr/lib/cryopod".into(),
        ];
        let libraries = libraries.iter().find(|path| path.is_dir());
        let libraries = libraries.context("cryopod's libraries are not here: install all of it")?;
        walk(libraries, &mut |path, relative| {
            let file = File::open(path)?;
            all.insert(Path::new(LIBRARIES).join(relative), file);
            Ok(())
        })
        .with_context(|| libraries.display().to_string())?;
        Ok(Self(all))
    }

    /// Returns true if the node has exactly these.
    pub fn are_in_place(&self, host: &Host) -> io::Result<bool> {
        let directory = host.path(DIRECTORY);
        let mut others = !directory.is_dir();
        if !others {
            walk(&directory, &mut |_, relative| {
                others |= !self.0.contains_key(relative);
                Ok(())
            })?;
        }
        if others {
            return Ok(false);
        }
        for (relative, file) in &self.0 {
            if !same(file, &directory.join(relative))? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Writes those that the node does not have, and removes what an older installer brought.
    pub fn install(&self, host: &Host) -> io::Result<()> {
        let directory = host.path(DIRECTORY);
        for (relative, file) in &self.0 {
            let to = directory.join(relative);
            if same(file, &to)? {
                continue;
            }
            if let Some(parent) = to.parent() {
                fs::create_dir_all(parent)?;
                for made in parent.ancestors().take_while(|d| d.starts_with(&directory)) {
                    fs::set_permissions(made, PermissionsExt::from_mode(0o755))?;
                }
            }
            let new = change::beside(&to);
            // A link or a file that a killed run left.
            if_there(fs::remove_file(&new))?;
            let mut copy = create_private(&new)?;
            let mut from = file;
            from.rewind()?;
            io::copy(&mut from, &mut copy)?;
            copy.set_permissions(file.metadata()?.permissions())?;
            copy.sync_all()?;
            fs::rename(&new, &to)?;
        }
        walk(
            &directory,
            &mut |path, relative| match self.0.contains_key(relative) {
                true => Ok(()),
                false => if_there(fs::remove_file(path)).map(drop),
            },
        )
    }
}

/// Removes them.
pub fn remove(host: &Host) -> anyhow::Result<()> {
    if_there(fs::remove_dir_all(host.path(DIRECTORY))).context(DIRECTORY)?;
    Ok(())
}

fn same(file: &File, path: &Path) -> io::Result<bool> {
    let Some(mut other) = if_there(File::open(path))? else {
        return Ok(false);
    };
    let (mine, theirs) = (file.metadata()?, other.metadata()?);
    if mine.len() != theirs.len() || mine.permissions().mode() != theirs.permissions().mode() {
        return Ok(false);
    }
    let mut file = file;
    file.rewind()?;
    let (mut one, mut two) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    loop {
        let read = file.read(&mut one)?;
        if read == 0 {
            return Ok(true);
        }
        other.read_exact(&mut two[..read])?;
        if one[..read] != two[..read] {
            return Ok(false);
        }
    }
}

/// Calls `each` with the path of every file below a directory, and with the path from there.
fn walk(directory: &Path, each: &mut dyn FnMut(&Path, &Path) -> io::Result<()>) -> io::Result<()> {
    let mut waiting = vec![PathBuf::new()];
    while let Some(relative) = waiting.pop() {
        for entry in fs::read_dir(directory.join(&relative))? {
            let relative = relative.join(entry?.file_name());
            let path = directory.join(&relative);
            match path.symlink_metadata()?.is_dir() {
                true => waiting.push(relative),
                false => each(&path, &relative)?,
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(from: &Path, names: &[&str]) -> OwnFiles {
        let open = |name: &&str| (PathBuf::from(name), File::open(from.join(name)).unwrap());
        OwnFiles(names.iter().map(open).collect())
    }

    #[test]
    fn installed_replaced_and_removed() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (host, place) = (Host::at(to.path()), to.path().join("opt/cryopod"));
        for (name, text) in [("a", "1"), ("b", "2"), ("c", "3")] {
            fs::write(from.path().join(name), text).unwrap();
        }
        fs::set_permissions(from.path().join("a"), PermissionsExt::from_mode(0o755)).unwrap();
        let old = files(from.path(), &["a", "b"]);
        assert!(!old.are_in_place(&host).unwrap());
        old.install(&host).unwrap();
        assert!(old.are_in_place(&host).unwrap());
        assert_eq!(
            fs::metadata(place.join("a")).unwrap().permissions().mode() & 0o777,
            0o755
        );
        // What a killed run leaves, and a link that somebody could have put there.
        std::os::unix::fs::symlink("/etc/passwd", change::beside(&place.join("c"))).unwrap();
        let new = files(from.path(), &["a", "c"]);
        assert!(!new.are_in_place(&host).unwrap());
        new.install(&host).unwrap();
        assert!(new.are_in_place(&host).unwrap());
        assert_eq!(fs::read_dir(&place).unwrap().count(), 2);
        fs::write(place.join("c"), "4").unwrap();
        assert!(!new.are_in_place(&host).unwrap());
        remove(&host).unwrap();
        remove(&host).unwrap();
        assert!(!place.exists());
    }
}
