//! Shows a restored container the environment that its new spec gives.
//!
//! The processes keep the environment of the checkpoint. A program that was checkpointed before it knew its place (an
//! address, a rank, a token) reads the new one from [`PATH`], in the form of `/proc/PID/environ`.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::fchown;
use std::path::Path;

use cryopod_archive::container::surroundings::MountKind;
use cryopod_host::files::Host;
use cryopod_host::processes::stat::StatusFile;
use cryopod_host::spec::Spec;
use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;
use nix::unistd::{UnlinkatFlags, unlinkat};

use crate::preflight::surroundings::MountPoints;
use cryopod_host::files::open_in_root;

/// The file inside the container, which only the user of its first process can read.
pub const PATH: &str = "/run/cryopod/environ";
const DIRECTORY: &str = "/run/cryopod";
const NAME: &str = "environ";

/// The environment of the spec's process: each variable with a zero byte after it.
pub fn of(spec: &Spec) -> Vec<u8> {
    let env = spec.json().pointer("/process/env");
    let env = env.and_then(|e| e.as_array()).into_iter().flatten();
    let mut all = Vec::new();
    for variable in env.filter_map(|v| v.as_str()) {
        all.extend(variable.as_bytes());
        all.push(0);
    }
    all
}

/// User and group of a process, as the host numbers them.
pub fn owner(host: &Host, pid: i32) -> Option<(u32, u32)> {
    let status = StatusFile::read(host, pid);
    let effective = |name| status.numbers(name)?.get(1).copied();
    Some((effective("Uid")?, effective("Gid")?))
}

/// Writes the file below the container's root, which no link can lead out of.
pub fn put(root: &File, environ: &[u8], owner: (u32, u32)) -> io::Result<()> {
    let mut points = MountPoints::below(root.try_clone()?);
    points.make(Path::new(DIRECTORY), MountKind::Directory)?;
    points.keep();
    let directory = open_in_root(
        root,
        Path::new(DIRECTORY),
        OFlag::O_PATH | OFlag::O_DIRECTORY,
    )?;
    match unlinkat(&directory, NAME, UnlinkatFlags::NoRemoveDir) {
        Ok(()) | Err(Errno::ENOENT) => {}
        Err(e) => return Err(e.into()),
    }
    let flags =
        OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let file = openat(directory.as_fd(), NAME, flags, Mode::S_IRUSR)?;
    let mut file = File::from(file);
    file.write_all(environ)?;
    fchown(&file, Some(owner.0), Some(owner.1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn within_the_root() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        let outside = dir.path().join("outside");
        fs::create_dir_all(root.join("run")).unwrap();
        fs::create_dir(&outside).unwrap();
        let host = Host::system();
        let me = owner(&host, i32::try_from(std::process::id()).unwrap()).unwrap();
        let spec = Spec::from_json(json!({"process": {"env": ["A=1", "RANK=2"]}}));
        let opened = File::open(&root).unwrap();
        for _ in 0..2 {
            put(&opened, &of(&spec), me).unwrap();
            let file = root.join(&PATH[1..]);
            assert_eq!(fs::read(&file).unwrap(), b"A=1\0RANK=2\0");
            let mode = fs::metadata(&file).unwrap().permissions().mode();
            assert_eq!(mode & 0o7777, 0o400);
        }
        fs::write(outside.join(NAME), "kept").unwrap();
        fs::remove_dir_all(root.join("run/cryopod")).unwrap();
        symlink(&outside, root.join("run/cryopod")).unwrap();
        assert!(put(&opened, b"x", me).is_err());
        assert_eq!(fs::read(outside.join(NAME)).unwrap(), b"kept");
        assert_eq!(of(&Spec::from_json(json!({}))), b"");
    }
}
