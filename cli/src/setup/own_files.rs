//! cryopod's own files on a Kubernetes node: the installer's image brings them, and a directory of their own holds them. Each
//! file is written beside its place and renamed: running containers keep the programs that they have.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use cryopod_host::files::{Host, if_there};

use super::change;

/// Where they are on a node. `/usr` is read-only on some.
pub const DIRECTORY: &str = "/opt/cryopod";
const PROGRAMS: [&str; 3] = ["cryopod", "cryopod-runtime", "containerd-shim-cryopod-v2"];
const END: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_millis(100);
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
            }
            let new = change::beside(&to);
            // A link or a file that a killed run left.
            if_there(fs::remove_file(&new))?;
            let mut copy = File::create_new(&new)?;
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

/// Removes them. Fails while containers need them.
pub fn remove(host: &Host) -> anyhow::Result<()> {
    if_there(fs::remove_dir_all(host.path(DIRECTORY))).context(DIRECTORY)?;
    Ok(())
}

/// Fails if containers of this node need the files.
pub fn unused(host: &Host) -> anyhow::Result<()> {
    match user(host, |_, program| program.starts_with(DIRECTORY)) {
        Some(pid) => bail!(
            "pods with the runtime class still run on this node (process {pid} is of one): delete them first"
        ),
        None => Ok(()),
    }
}

/// Finds a process of a container of cryopod that `counts`: it gets the process and the path of cryopod's program, which
/// shims and monitors have in their command line.
pub fn user(host: &Host, counts: impl Fn(&str, &Path) -> bool) -> Option<String> {
    let uses = |pid: &String| {
        let words = host
            .text(format!("/proc/{pid}/cmdline"))
            .unwrap_or_default();
        let exe = fs::read_link(host.path(format!("/proc/{pid}/exe"))).unwrap_or_default();
        let mut paths = words.split('\0').map(Path::new).chain([exe.as_path()]);
        let ours = |path: &Path| {
            let name = path.file_name().filter(|_| path.is_absolute());
            name.is_some_and(|name| PROGRAMS[1..].iter().any(|own| name == *own))
        };
        pid.parse::<u32>().is_ok() && paths.any(|path| ours(path) && counts(pid, path))
    };
    // A shim ends soon after its container.
    let end = Instant::now() + END;
    loop {
        match host.names("/proc").iter().find(|pid| uses(pid)) {
            Some(_) if Instant::now() < end => thread::sleep(PAUSE),
            found => return found.cloned(),
        }
    }
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

    #[test]
    fn containers_need_them() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::at(dir.path());
        let process = |pid: &str, words: &str| {
            fs::create_dir_all(dir.path().join("proc").join(pid)).unwrap();
            fs::write(dir.path().join("proc").join(pid).join("cmdline"), words).unwrap();
        };
        process("1", "/sbin/init\0");
        process("2", "/opt/cryopod/bin/cryopod\0setup\0");
        unused(&host).unwrap();
        process("3", "conmon\0-r\0/opt/cryopod/bin/cryopod-runtime\0");
        assert!(unused(&host).unwrap_err().to_string().contains("process 3"));
    }
}
