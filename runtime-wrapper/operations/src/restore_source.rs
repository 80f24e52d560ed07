//! Finds the images of the checkpoint that a new container names.
//!
//! A directory of CRIU's images is used as it is. Archives and images in registries come through the host's cache:
//! `cryopod cache pull` brings them there and verifies them (docs/copies.md). Only what `restore.allow` has is opened.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use cryopod_archive::names;
use cryopod_archive::source::Place;
use cryopod_host::programs::{SystemTools, Tools};
use nix::fcntl::{Flock, FlockArg};

use crate::config::{Config, REGISTRY};
use crate::{config, images};

/// The command line, in whose cache archives are unpacked.
const PROGRAM: &str = "cryopod";
/// How often a checkpoint is pulled that another process removes from the cache before it is used.
const TRIES: usize = 3;

/// CRIU's images. They stay while this exists.
#[derive(Debug)]
pub struct Images {
    directory: PathBuf,
    /// The lock on the checkpoint in the cache.
    _in_use: Option<Flock<File>>,
}

impl Images {
    pub fn directory(&self) -> &Path {
        &self.directory
    }
}

/// Finds the images of `named`: an absolute path of an image directory or an archive, `oci:DIR[:NAME]`,
/// `oci-archive:FILE[:NAME]`, `docker://REGISTRY/REPOSITORY:TAG` or `@DIGEST`.
///
/// # Errors
/// A text: it is not allowed, does not exist, or cannot be pulled; and what to do.
pub fn find(config: &Config, named: &str) -> Result<Images, String> {
    match named.starts_with(REGISTRY) {
        true => image(config, named),
        false => path(config, named),
    }
}

fn image(config: &Config, named: &str) -> Result<Images, String> {
    let below = |allowed: &String| {
        let allowed = allowed.trim_end_matches('/');
        let repository = allowed.strip_prefix(REGISTRY);
        // `host:5000` is another registry than `host`.
        let after = match repository.is_some_and(|r| r.contains('/')) {
            true => &['/', ':', '@'][..],
            false => &['/'],
        };
        let rest = named.strip_prefix(allowed);
        repository.is_some() && rest.is_some_and(|r| r.starts_with(after))
    };
    if !config.restore.allow.iter().any(below) {
        return Err(not_allowed("registry or repository"));
    }
    cached(config, named.as_ref())
}

fn path(config: &Config, named: &str) -> Result<Images, String> {
    let place = Place::parse(named);
    let real = allowed(place.path(), &config.restore.allow)?;
    if real.join(names::CRIU_INVENTORY).is_file() {
        return Ok(Images {
            directory: real,
            _in_use: None,
        });
    }
    // By its real path, which is the one that was checked.
    let mut source = match real.is_dir() {
        true => OsString::from("oci:"),
        false => OsString::from("oci-archive:"),
    };
    source.push(&real);
    if let Some(image) = place.image() {
        source.push(":");
        source.push(image);
    }
    cached(config, &source)
}

fn not_allowed(what: &str) -> String {
    // Says nothing of what exists there: whoever asks may not know.
    format!(
        "that is not allowed: if it may be, add its {what} to `restore.allow` in {}",
        config::PATH
    )
}

/// Returns the path without symbolic links, if `restore.allow` has it.
fn allowed(path: &Path, allow: &[String]) -> Result<PathBuf, String> {
    if !path.is_absolute() || path.components().any(|c| c == Component::ParentDir) {
        return Err("that is no absolute path".into());
    }
    let allow = || allow.iter().map(Path::new).filter(|a| a.is_absolute());
    if !allow().any(|directory| path.starts_with(directory)) {
        return Err(not_allowed("directory"));
    }
    let real = path.canonicalize();
    let real = real.map_err(|e| format!("it cannot be opened: {e}"))?;
    let mut directories = allow().filter_map(|d| d.canonicalize().ok());
    let Some(directory) = directories.find(|d| real.starts_with(d)) else {
        return Err("a link there leads out of the directories of `restore.allow`".into());
    };
    // Whoever can write there could exchange the images while they are read.
    let unreadable = |e: std::io::Error| format!("{}: {e}", real.display());
    let files = match real.is_dir() {
        true => Some(std::fs::read_dir(&real).map_err(unreadable)?),
        false => None,
    };
    let files = files.into_iter().flatten().take(images::MAX_ENTRIES);
    let files = files.flatten().map(|f| f.path());
    let above = real.ancestors().take_while(|p| p.starts_with(&directory));
    for path in above.map(Path::to_owned).chain(files) {
        let meta = path.symlink_metadata().map_err(unreadable)?;
        if meta.uid() != 0 || meta.mode() & 0o022 != 0 && !meta.is_symlink() {
            return Err(format!(
                "{} is not root's alone: chown it to root and take write permission from group and others",
                path.display()
            ));
        }
    }
    Ok(real)
}

/// Brings a checkpoint into the cache, unless it is there, and holds it.
fn cached(config: &Config, source: &OsStr) -> Result<Images, String> {
    let tools = SystemTools::from_env();
    let beside = std::env::current_exe().ok();
    let beside = beside.and_then(|exe| Some(exe.parent()?.join(PROGRAM)));
    let program = beside
        .filter(|p| p.is_file())
        .or_else(|| tools.find(PROGRAM));
    let program = program.ok_or_else(|| {
        format!("the program {PROGRAM} is neither beside the runtime nor on PATH: install it")
    })?;
    let args = ["cache", "pull", "--quiet", "--"].map(OsStr::new);
    for _ in 0..TRIES {
        let out = tools
            .output(
                &program,
                &[&args[..], &[source]].concat(),
                config.limits.restore(0),
            )
            .map_err(|e| e.to_string())?;
        if out.code != 0 {
            let said = out.stderr.trim();
            let why = said.rsplit_once("Error: ").map_or(said, |(_, why)| why);
            return Err(why.to_owned());
        }
        let directory = PathBuf::from(out.stdout.trim_end());
        match held(&directory) {
            Ok(lock) if directory.is_dir() => {
                return Ok(Images {
                    directory,
                    _in_use: Some(lock),
                });
            }
            _ => tracing::info!("{}: removed from the cache meanwhile", directory.display()),
        }
    }
    Err("it was removed from the cache again and again: raise cache.max_gib".into())
}

/// Locks the checkpoint of an image directory in the cache, so that nobody removes it.
fn held(images: &Path) -> std::io::Result<Flock<File>> {
    let checkpoint = images.parent().unwrap_or(images);
    let lock = Flock::lock(File::open(checkpoint)?, FlockArg::LockSharedNonblock);
    lock.map_err(|(_, e)| e.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Restore;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn only_what_the_administrator_allows() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let (inside, outside) = (root.join("allowed/c1"), root.join("other"));
        fs::create_dir_all(&inside).unwrap();
        fs::create_dir(&outside).unwrap();
        symlink(&outside, root.join("allowed/link")).unwrap();
        fs::write(root.join("allowed/file"), "").unwrap();
        for path in ["allowed", "allowed/c1", "allowed/file"] {
            fs::set_permissions(root.join(path), Permissions::from_mode(0o755)).unwrap();
        }
        let allow =
            ["docker://r.example", root.join("allowed").to_str().unwrap()].map(String::from);
        let ask = |path: &Path| allowed(path, &allow);
        let says = |path: &str, want: &str| {
            let said = ask(&root.join(path)).unwrap_err();
            assert!(said.contains(want), "{path}: {said}");
        };
        if nix::unistd::geteuid().is_root() {
            assert_eq!(ask(&inside).unwrap(), inside);
            assert_eq!(
                ask(&root.join("allowed/file")).unwrap(),
                root.join("allowed/file")
            );
        }
        says("other", "add its directory to `restore.allow`");
        says("allowed/../other", "no absolute path");
        says("allowed/link", "a link there leads out");
        says("allowed/none", "cannot be opened");
        assert!(ask(Path::new("c1")).is_err());
        fs::write(inside.join("pages-1.img"), "").unwrap();
        fs::set_permissions(inside.join("pages-1.img"), Permissions::from_mode(0o666)).unwrap();
        says("allowed/c1", "pages-1.img is not root's alone");
        fs::set_permissions(&inside, Permissions::from_mode(0o777)).unwrap();
        says("allowed/c1", "c1 is not root's alone");
    }

    #[test]
    fn only_allowed_repositories() {
        let config = |allow: &str| Config {
            restore: Restore {
                allow: vec![allow.into()],
            },
            ..Config::default()
        };
        for (allow, named) in [
            ("docker://r.example", "docker://r.example.evil/a:1"),
            ("docker://r.example", "docker://r.example:5000/a:1"),
            ("docker://r.example/team", "docker://r.example/teams/a:1"),
            ("docker://r.example/team/", "docker://r.example/other:1"),
            ("/srv", "docker://r.example/a:1"),
            ("r.example", "docker://r.example/a:1"),
        ] {
            let said = find(&config(allow), named).unwrap_err();
            assert!(
                said.contains("that is not allowed"),
                "{allow} {named}: {said}"
            );
        }
    }
}
