//! Gives a container `libcryopod_preload.so`: follows the annotation `dev.cryopod.preload = "on"` when it is created, and
//! gives a restored container the very library that its processes have mapped.
//!
//! CRIU restores a mapped file only if it is the same file as at the checkpoint, and an update of cryopod replaces the
//! installed one. So a container gets a copy, named by its digest in [`STORE`], and a checkpoint carries the library
//! along. At a restore a library from an archive can do no more than the archive's memory: it is mapped, read-only, in
//! that container alone, at a path that the archive does not choose.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use cryopod_archive::format::names;
use cryopod_host::files::{Host, open_regular, read_bounded_from, replace};
use cryopod_host::spec::Spec;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::bundle::{Edit, environment};
use crate::config::Config;
use crate::criu::plugins;
use crate::error::Error;

/// `on`: the container gets the preload library.
pub const ANNOTATION: &str = "dev.cryopod.preload";
/// The library's path in containers.
pub const DESTINATION: &str = "/run/cryopod/libcryopod_preload.so";
/// Copies of the library by their digests. Not below `/run`, from which many systems let nothing be executed.
pub const STORE: &str = "/var/lib/cryopod/preload";

const FILE: &str = "libcryopod_preload.so";
const VARIABLE: &str = "LD_PRELOAD";
const NVLS: &str = "NCCL_NVLS_ENABLE";
/// Largest library, in bytes.
const MAX_LIBRARY: u64 = 16 << 20;
/// Largest C library of a container, in bytes.
const MAX_LIBC: u64 = 64 << 20;
/// Where containers have their C library.
const LIBC: [&str; 4] = [
    "lib/x86_64-linux-gnu/libc.so.6",
    "usr/lib/x86_64-linux-gnu/libc.so.6",
    "lib64/libc.so.6",
    "usr/lib/libc.so.6",
];

/// Returns the edits that give a new container the library, if its annotation asks for it. Copies the library to
/// [`STORE`].
pub fn edits(config: &Config, bundle: &Path, spec: &Spec) -> Result<Vec<Box<dyn Edit>>, Error> {
    if spec.switch(ANNOTATION).map_err(refusal)? != Some(true) {
        return Ok(Vec::new());
    }
    let installed = installed(config)?;
    let library = read(&installed).map_err(|e| refused(format!("{}: {e}", installed.display())))?;
    fits(&library, bundle, spec).map_err(refused)?;
    let source = stored(Path::new(STORE), &library)?;
    Ok(vec![
        Box::new(LibraryMount { source }),
        Box::new(LibraryVariable),
        Box::new(NoMulticast),
    ])
}

/// Returns the edits that give a restored container the library of the image directory, if it has one. Copies the library
/// to [`STORE`].
pub fn edits_of_restore(images: &Path) -> Result<Vec<Box<dyn Edit>>, Error> {
    let path = images.join(names::PRELOAD_LIBRARY);
    let library = match read(&path) {
        Ok(library) => library,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => {
            return Err(Error::Failed(format!(
                "restore refused, nothing was started: {}: {e}",
                path.display()
            )));
        }
    };
    let source = stored(Path::new(STORE), &library)?;
    Ok(vec![Box::new(LibraryMount { source })])
}

/// At a checkpoint, puts the container's library into the image directory.
pub fn carry(spec: &Spec, images: &Path) -> Result<(), String> {
    let mounts = spec.mounts();
    let mut own = mounts
        .iter()
        .filter(|m| m.destination() == Path::new(DESTINATION));
    let Some(source) = own.next().and_then(|m| m.source().clone()) else {
        return Ok(());
    };
    let library = read(&source).map_err(|e| format!("{}: {e}", source.display()))?;
    let path = images.join(names::PRELOAD_LIBRARY);
    write_new(&path, &library, 0o600).map_err(|e| format!("{}: {e}", path.display()))
}

fn refused(what: String) -> Error {
    refusal(format!("{ANNOTATION}: {what}"))
}

fn refusal(what: String) -> Error {
    Error::Failed(format!(
        "annotation {what}. Remove the annotation to start the container without the library"
    ))
}

/// The library of this host: beside the plugin.
fn installed(config: &Config) -> Result<PathBuf, Error> {
    let plugin = plugins::find(config, &Host::system()).nvidia;
    let beside = plugin.and_then(|plugin| Some(plugin.parent()?.join(FILE)));
    let found = beside.filter(|path| path.is_file());
    found.ok_or_else(|| refused(format!("{FILE} was not found beside cryopod_nvidia.so")))
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    read_bounded_from(open_regular(path)?, MAX_LIBRARY)
}

/// Writes a file and renames it into place.
fn write_new(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let partial = path.with_file_name(format!(".{name}.{}", std::process::id()));
    replace(path, &partial, mode, bytes)
}

/// The path of the library's copy, which is made if it is not there.
fn stored(store: &Path, library: &[u8]) -> Result<PathBuf, Error> {
    let digest = Sha256::digest(library);
    let name: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    let path = store.join(format!("{name}.so"));
    // Also a copy that someone has damaged is made anew.
    if read(&path).is_ok_and(|there| there == library) {
        return Ok(path);
    }
    let make = || {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(store)?;
        write_new(&path, library, 0o644)
    };
    make().map_err(Error::at(&path, "cannot be written"))?;
    Ok(path)
}

/// Checks that the container's C library can load the library. A program whose C library is too old for it does not
/// start at all.
fn fits(library: &[u8], bundle: &Path, spec: &Spec) -> Result<(), String> {
    let root = spec.json().pointer("/root/path").and_then(Value::as_str);
    let Some(root) = root.and_then(|root| File::open(bundle.join(root)).ok()) else {
        // The low-level runtime reports it.
        return Ok(());
    };
    let how = OpenHow::new()
        .flags(OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    let open = |path: &&str| openat2(&root, *path, how).ok();
    let Some(libc) = LIBC.iter().find_map(open).map(File::from) else {
        return Err("the container has no glibc for x86-64".into());
    };
    if !libc.metadata().is_ok_and(|m| m.is_file()) {
        return Err("the container's libc.so.6 is not a regular file".into());
    }
    let libc = read_bounded_from(libc, MAX_LIBC).map_err(|e| format!("libc.so.6: {e}"))?;
    let (needed, there) = (glibc_versions(library), glibc_versions(&libc));
    match needed.difference(&there).last() {
        None => Ok(()),
        Some(missing) => Err(format!(
            "the container's C library is too old: it lacks {missing}"
        )),
    }
}

/// The names of glibc's symbol versions in a library: `GLIBC_2.34`.
fn glibc_versions(library: &[u8]) -> BTreeSet<String> {
    const PREFIX: &[u8] = b"GLIBC_2.";
    let starts = library.windows(PREFIX.len()).enumerate();
    let starts = starts.filter(|(_, window)| *window == PREFIX);
    let version = |at: usize| {
        let rest = &library[at + PREFIX.len()..];
        let is_part = |byte: &&u8| byte.is_ascii_digit() || **byte == b'.';
        let length = rest.iter().take(16).take_while(is_part).count();
        // A version ends with the string.
        let whole = length > 0 && rest.get(length) == Some(&0);
        whole.then(|| {
            let text = &library[at..at + PREFIX.len() + length];
            String::from_utf8_lossy(text).into_owned()
        })
    };
    starts.filter_map(|(at, _)| version(at)).collect()
}

struct LibraryMount {
    source: PathBuf,
}

impl Edit for LibraryMount {
    fn name(&self) -> &'static str {
        "the mount of libcryopod_preload.so"
    }

    fn apply(&self, _: &Host, spec: &mut Value) -> Result<(), Error> {
        let Some(spec) = spec.as_object_mut() else {
            return Ok(());
        };
        let mounts = spec.entry("mounts").or_insert_with(|| json!([]));
        let Some(mounts) = mounts.as_array_mut() else {
            return Ok(());
        };
        let is_at =
            |mount: &Value| mount.get("destination").and_then(Value::as_str) == Some(DESTINATION);
        mounts.retain(|mount| !is_at(mount));
        mounts.push(json!({
            "destination": DESTINATION,
            "type": "bind",
            "source": self.source,
            "options": ["bind", "ro", "nosuid", "nodev"],
        }));
        Ok(())
    }
}

struct LibraryVariable;

impl Edit for LibraryVariable {
    fn name(&self) -> &'static str {
        "LD_PRELOAD of libcryopod_preload.so"
    }

    fn apply(&self, _: &Host, spec: &mut Value) -> Result<(), Error> {
        let Some(env) = environment(spec) else {
            return Ok(());
        };
        let prefix = format!("{VARIABLE}=");
        let own = |entry: &&mut Value| entry.as_str().is_some_and(|e| e.starts_with(&prefix));
        match env.iter_mut().rfind(own) {
            // Before the container's own libraries: behind it they would see the driver's calls.
            Some(entry) => {
                let text = entry.as_str().unwrap_or_default();
                let others = text.strip_prefix(&prefix).unwrap_or_default();
                if !others.split([':', ' ']).any(|path| path == DESTINATION) {
                    *entry = json!(format!("{prefix}{DESTINATION}:{others}"));
                }
            }
            None => env.push(json!(format!("{prefix}{DESTINATION}"))),
        }
        Ok(())
    }
}

/// NCCL's multicast memory: a driver that is to checkpoint a process with such memory hangs.
struct NoMulticast;

impl Edit for NoMulticast {
    fn name(&self) -> &'static str {
        NVLS
    }

    fn apply(&self, _: &Host, spec: &mut Value) -> Result<(), Error> {
        let Some(env) = environment(spec) else {
            return Ok(());
        };
        let names = |entry: &Value| {
            let name = entry.as_str().and_then(|entry| entry.split_once('='));
            name.is_some_and(|(name, _)| name == NVLS)
        };
        // What the container sets itself stays.
        if !env.iter().any(names) {
            env.push(json!(format!("{NVLS}=0")));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::TempDir;

    fn applied(mut spec: Value) -> Value {
        let source = "/var/lib/cryopod/preload/0.so".into();
        LibraryMount { source }
            .apply(&Host::system(), &mut spec)
            .unwrap();
        LibraryVariable.apply(&Host::system(), &mut spec).unwrap();
        NoMulticast.apply(&Host::system(), &mut spec).unwrap();
        spec
    }

    #[test]
    fn the_library_is_mounted_and_loaded_once() {
        let spec = applied(json!({"process": {"env": ["A=1"]}, "mounts": []}));
        assert_eq!(
            spec["process"]["env"],
            json!([
                "A=1",
                format!("LD_PRELOAD={DESTINATION}"),
                "NCCL_NVLS_ENABLE=0"
            ])
        );
        assert_eq!(spec["mounts"][0]["destination"], DESTINATION);
        assert_eq!(applied(spec.clone()), spec);
        let env = json!(["LD_PRELOAD=/a.so", "NCCL_NVLS_ENABLE=1"]);
        let other = applied(json!({"process": {"env": env}}));
        assert_eq!(
            other["process"]["env"],
            json!([
                format!("LD_PRELOAD={DESTINATION}:/a.so"),
                "NCCL_NVLS_ENABLE=1"
            ])
        );
    }

    #[test]
    fn a_container_with_an_older_c_library_is_refused() {
        let dir = TempDir::new().unwrap();
        let library = b"..\0GLIBC_2.17\0GLIBC_2.34\0GLIBC_2.9x\0";
        let spec = |root: &str| Spec::from_json(json!({"root": {"path": root}}));
        let usr = dir.path().join("rootfs/usr/lib");
        fs::create_dir_all(&usr).unwrap();
        let check = || fits(library, dir.path(), &spec("rootfs"));
        assert!(check().unwrap_err().contains("no glibc"));
        // A link is followed within the container alone.
        std::os::unix::fs::symlink("/usr/lib", dir.path().join("rootfs/lib64")).unwrap();
        fs::write(usr.join("libc.so.6"), b"\0GLIBC_2.17\0GLIBC_2.31\0").unwrap();
        assert!(check().unwrap_err().ends_with("it lacks GLIBC_2.34"));
        fs::write(usr.join("libc.so.6"), b"\0GLIBC_2.17\0GLIBC_2.34\0").unwrap();
        check().unwrap();
    }

    #[test]
    fn a_copy_is_made_once_and_repaired() {
        let dir = TempDir::new().unwrap();
        let store = dir.path().join("a/b");
        let path = stored(&store, b"library").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"library");
        fs::write(&path, b"damaged").unwrap();
        assert_eq!(stored(&store, b"library").unwrap(), path);
        assert_eq!(fs::read(&path).unwrap(), b"library");
        assert_eq!(fs::read_dir(&store).unwrap().count(), 1);
    }

    #[test]
    fn an_image_directory_without_the_library_changes_nothing() {
        let dir = TempDir::new().unwrap();
        assert!(edits_of_restore(dir.path()).unwrap().is_empty());
        std::os::unix::fs::symlink("/etc/passwd", dir.path().join(names::PRELOAD_LIBRARY)).unwrap();
        let error = edits_of_restore(dir.path()).err().unwrap().to_string();
        assert!(error.contains(names::PRELOAD_LIBRARY), "{error}");
    }
}
