//! Checks `mountpoints-*.img`: where CRIU mounts what.
//!
//! CRIU makes most mounts in its own mount namespace, where the host is to be seen: a path with `..`, or one that leads
//! through a symbolic link of the container's, could end anywhere. Paths with `..` are refused by [`check`], before
//! anything is touched; links by [`crate::security::container_links`].

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader};
use std::path::{Path, PathBuf};

use cryopod_archive::criu::message::Message;
use cryopod_archive::criu::mounts::{self, CriuMount, fs_type};
use cryopod_host::spec::Spec;
use serde_json::Value;

use super::{CheckedImages, Subject, is_clean, opened};
use crate::security::ceiling::CredentialsCeiling;
use crate::security::privileges::{PrivilegesError, top};
use crate::security::tar_end::{EndCheck, GzipMembers};

pub const PREFIX: &str = "mountpoints-";
/// Names that CRIU gives to mounts by itself, and follows without asking its caller.
const OF_CRIU: &str = "CRIU:";

pub fn check(
    images: &CheckedImages,
    subject: Subject<'_>,
    directory: &Path,
) -> Result<Vec<String>, PrivilegesError> {
    let ceiling = CredentialsCeiling::of(subject.spec);
    let mut told = Vec::new();
    let everywhere: Vec<&Message> = images.numbered(PREFIX).flat_map(|(_, all)| all).collect();
    for (file, all) in images.numbered(PREFIX) {
        for mount in all {
            told.extend(
                wrong(mount, &everywhere, subject.spec, &ceiling).map(|what| {
                    let at = mount.text("mountpoint").unwrap_or_default();
                    format!("{file}: the mount at {at:?} {what}")
                }),
            );
        }
        // CRIU finds a mount by its number.
        let mut ids: Vec<u64> = all.iter().filter_map(|m| m.number("mnt_id")).collect();
        ids.sort_unstable();
        if ids.windows(2).any(|pair| pair[0] == pair[1]) {
            told.push(format!("{file}: has two mounts with one number"));
        }
    }
    let mounts = read(images)?;
    let mut asked = Vec::new();
    for mount in &mounts {
        asked.extend(paths_of_mount(&mounts, mount));
    }
    let reached = opened::reached(images);
    let made = reached
        .made
        .iter()
        .map(|made| Path::new("/").join(&made.path));
    // Whoever may write everywhere may be led anywhere.
    let bound = reached
        .bound
        .into_iter()
        .filter(|_| !ceiling.has("DAC_OVERRIDE"));
    let in_flight = reached.in_flight.into_iter().map(|file| file.path);
    for path in made.chain(bound).chain(in_flight) {
        asked.extend(path.parent().and_then(|above| {
            let mount = top(&mounts, &above.to_string_lossy()).filter(|m| is_tmpfs(m))?;
            Some((
                mount.device,
                above.strip_prefix(&mount.path).ok()?.to_owned(),
            ))
        }));
    }
    let mut by_device: BTreeMap<u32, Vec<PathBuf>> = BTreeMap::new();
    for (device, path) in asked.into_iter().filter(|(_, p)| !p.as_os_str().is_empty()) {
        by_device.entry(device).or_default().push(path);
    }
    for (device, paths) in by_device {
        told.extend(archived_link(images, device, &paths, directory)?);
    }
    Ok(told)
}

/// Returns what is wrong with a mount by itself.
fn wrong(
    mount: &Message,
    all: &[&Message],
    spec: &Spec,
    ceiling: &CredentialsCeiling,
) -> Option<String> {
    let text = |name: &str| mount.text(name).unwrap_or_default();
    let at = text("mountpoint");
    let path = at.strip_prefix('.').unwrap_or(&at);
    let is_text = |field| std::str::from_utf8(mount.bytes(field).unwrap_or_default()).is_ok();
    if !is_clean(path) || !is_text("mountpoint") || !is_text("root") {
        return Some("has no plain path".into());
    }
    let root = text("root");
    let root = root.strip_suffix("//deleted").unwrap_or(&root);
    let number = mount.u32("fstype").unwrap_or(0);
    let is_cgroup = matches!(number, 12 | 23); // seen from another cgroup namespace it is at `/..`
    let is_above = is_cgroup && root.split('/').skip(1).all(|n| n == "..");
    if !is_clean(root) && !is_above {
        return Some(format!("is of {root:?}, no plain path"));
    }
    if mount.has("ext_mount") || mount.number("with_plugin").unwrap_or(0) != 0 {
        return Some("is of a kind that no runtime makes".into());
    }
    if !mount.has("sb_flags") {
        return Some(
            "has no sb_flags, without which CRIU takes other flags than those it says".into(),
        );
    }
    if let Some(key) = mount.text("ext_key").filter(|k| !k.is_empty()) {
        return key
            .starts_with(OF_CRIU)
            .then(|| format!("has the name {key:?}, with which CRIU mounts what the image says"));
    }
    if path == "/" {
        return is_other_root(mount, all)
            .then(|| "is another root than the container's".to_owned());
    }
    let Some(name) = fs_type(number).filter(|n| !matches!(*n, "auto" | "overlay")) else {
        // A bind mount that the container has made, or another mount namespace's, of what the runtime mounts: CRIU binds
        // it from there.
        let device = mount.number("root_dev");
        let is_given = |m: &Message| is_root(m) || m.text("ext_key").is_some_and(|k| !k.is_empty());
        let mut given = all.iter().filter(|m| is_given(m));
        let is_bind = given.any(|m| {
            m.number("root_dev") == device && is_below(root, &m.text("root").unwrap_or_default())
        });
        return match is_bind && ceiling.has("SYS_ADMIN") {
            true => None,
            false => Some("is of a file system that no spec names".into()),
        };
    };
    if mount.has("fsname") {
        return Some("names its file system".into());
    }
    // These show the host: the whole of one at another path, or a part over a mask, shows what the spec hides.
    let shows_host = |directory: &str| match root {
        "/" => has_mount(spec, name, path),
        // Below, there are links to the roots of processes.
        _ => path == format!("{directory}{root}") && !is_masked(spec, path),
    };
    let made_by_kernel = match name {
        "proc" => shows_host("/proc"),
        "sysfs" => shows_host("/sys"),
        _ if root == "/" || is_cgroup => true,
        "devpts" => root[1..].bytes().all(|b| b.is_ascii_digit()) || root == "/ptmx",
        _ => false,
    };
    (!made_by_kernel && !ceiling.has("SYS_ADMIN"))
        .then(|| format!("is of {root:?} of a {name}, which no runtime mounts"))
}

/// Returns true if the spec mounts a file system of this type there.
fn has_mount(spec: &Spec, fs_type: &str, path: &str) -> bool {
    let list = spec.json().get("mounts").and_then(Value::as_array);
    list.into_iter().flatten().any(|mount| {
        let text = |key: &str| mount.get(key).and_then(Value::as_str).unwrap_or_default();
        text("type") == fs_type && text("destination").trim_end_matches('/') == path
    })
}

/// Returns true if the spec masks the path, or a directory above it.
fn is_masked(spec: &Spec, path: &str) -> bool {
    let list = spec.json().pointer("/linux/maskedPaths");
    let masked = list.and_then(Value::as_array).into_iter().flatten();
    let mut masked = masked.filter_map(Value::as_str);
    masked.any(|m| Path::new(path).starts_with(m))
}

/// Returns true if the directory `inner` of a file system is `outer` or in it.
fn is_below(inner: &str, outer: &str) -> bool {
    Path::new(inner).starts_with(outer)
}

fn is_root(mount: &Message) -> bool {
    let at = mount.text("mountpoint").unwrap_or_default();
    matches!(&at[..], "/" | "./")
}

/// Returns true if this root of a mount namespace is not mounted from the container's root: CRIU would mount it anew.
fn is_other_root(mount: &Message, all: &[&Message]) -> bool {
    let first = all
        .iter()
        .filter(|m| is_root(m))
        .map(|m| m.number("root_dev"));
    first
        .into_iter()
        .any(|device| device != mount.number("root_dev"))
}

/// Reads all mounts, as CRIU will.
pub fn read(images: &CheckedImages) -> Result<Vec<CriuMount>, PrivilegesError> {
    let mut all = Vec::new();
    for (name, _) in images.numbered(PREFIX) {
        let content = images.content(name).unwrap_or_default();
        all.extend(mounts::read(name, &content)?);
    }
    Ok(all)
}

/// Returns the paths in a tmpfs, by its device, over which this mount lies and which it shows.
fn paths_of_mount(all: &[CriuMount], mount: &CriuMount) -> Vec<(u32, PathBuf)> {
    let mut paths = Vec::new();
    if let Some(parent) = all.iter().find(|m| m.id == mount.parent)
        && is_tmpfs(parent)
        && let Ok(below) = Path::new(&mount.path).strip_prefix(&parent.path)
    {
        paths.push((parent.device, below.to_owned()));
    }
    if is_tmpfs(mount) && mount.root != "/" {
        paths.push((mount.device, mount.root.trim_start_matches('/').into()));
    }
    paths
}

/// Returns what is wrong if one of these paths of an archived tmpfs leads through a symbolic link.
fn archived_link(
    images: &CheckedImages,
    device: u32,
    paths: &[PathBuf],
    directory: &Path,
) -> Result<Option<String>, PrivilegesError> {
    for name in [
        format!("tmpfs-dev-{device}.tar.gz.img"),
        format!("tmpfs-{device}.tar.gz.img"),
    ] {
        let file = directory.join(&name);
        if images.shows(&name)
            && let Some(path) = through_link(&file, paths)
                .map_err(|source| PrivilegesError::Read { path: file, source })?
        {
            return Ok(Some(format!(
                "{name}: {} is a link, and a mount, a deleted file or a socket is there",
                path.display()
            )));
        }
    }
    Ok(None)
}

fn is_tmpfs(mount: &CriuMount) -> bool {
    !mount.external && matches!(fs_type(mount.fs_type), Some("tmpfs" | "devtmpfs"))
}

/// Returns a path of which a part is a link in the archive.
fn through_link<'a>(archive: &Path, paths: &'a [PathBuf]) -> io::Result<Option<&'a PathBuf>> {
    let file = File::open(archive)?;
    // Several members, one behind the other: the gzip that CRIU runs reads them all.
    let mut archive = tar::Archive::new(EndCheck::new(GzipMembers::new(BufReader::new(file))));
    for entry in archive.entries()? {
        let entry = entry?;
        let is_link =
            entry.header().entry_type().is_symlink() || entry.header().entry_type().is_hard_link();
        let name = entry.path()?;
        let name = name.strip_prefix(".").unwrap_or(&name);
        if is_link && let Some(path) = paths.iter().find(|p| p.starts_with(name)) {
            return Ok(Some(path));
        }
    }
    archive.into_inner().finish()?;
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_of_an_archived_tmpfs() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tmpfs-dev-60.tar.gz.img");
        let file = File::create(&path).unwrap();
        let gzip = flate2::write::GzEncoder::new(file, flate2::Compression::fast());
        let mut tar = tar::Builder::new(gzip);
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Symlink);
        header.set_size(0);
        tar.append_link(&mut header, "./pts", "/usr/bin").unwrap();
        header.set_entry_type(tar::EntryType::Directory);
        tar.append_data(&mut header, "./shm", io::empty()).unwrap();
        tar.into_inner().unwrap().finish().unwrap();
        let leads = |to: &str| through_link(&path, &[to.into()]).unwrap().is_some();
        assert!(leads("pts"));
        assert!(leads("pts/x"));
        assert!(!leads("shm"));
        assert!(!leads("ptsx"));
        // tar's last record is filled with zeros.
        std::fs::write(
            &path,
            [&std::fs::read(&path).unwrap()[..], &[0; 9000]].concat(),
        )
        .unwrap();
        assert!(!leads("shm"));
        // Two members; gzip's checksum of the last one; nothing.
        let whole = std::fs::read(&path).unwrap();
        let mut tar = Vec::new();
        io::Read::read_to_end(&mut GzipMembers::new(&whole[..]), &mut tar).unwrap();
        let gzip = |bytes: &[u8]| {
            let mut packed = Vec::new();
            let mut gzip = flate2::read::GzEncoder::new(bytes, flate2::Compression::fast());
            io::Read::read_to_end(&mut gzip, &mut packed).unwrap();
            packed
        };
        let links = &tar[..512];
        std::fs::write(&path, [gzip(b""), gzip(links), gzip(&tar[512..])].concat()).unwrap();
        assert!(leads("pts"));
        let refused = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            through_link(&path, &["shm".into()])
                .unwrap_err()
                .to_string()
        };
        assert!(refused(&gzip(links)).contains("cut off"));
        assert!(refused(&gzip(b"")).contains("cut off"));
        let mut damaged = whole;
        damaged.truncate(damaged.len() - 9000);
        let at = damaged.len() - 8;
        damaged[at] ^= 1;
        assert!(refused(&damaged).contains("corrupt"));
    }
}
