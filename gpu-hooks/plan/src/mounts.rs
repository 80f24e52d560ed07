//! Finds mounts of a container that its spec does not name at a checkpoint, and provides them at a restore.
//!
//! NVIDIA's hooks bind the driver's files, firmware and `/proc` directories into a container, and no spec says so. CRIU
//! cannot dump a mount whose file system begins outside the container ("doesn't have a proper root mount", "has
//! unreachable sharing"). So each such mount is declared external to CRIU, by its mount point, and a restore tells CRIU
//! where it is now. Mounts that exist in the container alone (a tmpfs over `/proc/driver/nvidia`) are left to CRIU,
//! which saves their content.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use cryopod_archive::container::surroundings::{ForeignMount, MountFacts, MountKind};
use nix::fcntl::OFlag;
use sha2::{Digest, Sha256};

use crate::ceiling::{AskedNode, Ceiling};
use crate::gpus::own_nodes;
use crate::refusal::Refusal;
use cryopod_host::destinations::{Destinations, clean};
use cryopod_host::files::{Host, open_without_links};
use cryopod_host::mountinfo::{self, Mount, below, declarable};
use cryopod_host::spec::Spec;

/// Files up to this size are recorded with a digest, in bytes.
const MAX_DIGEST: u64 = 64 << 10;
const MAX_UNNAMED: usize = 4096;

/// Returns the mounts of the container with init process `init` that its spec does not name, and those among them that
/// cannot be saved.
pub fn unnamed(
    host: &Host,
    spec: &Spec,
    mounts: &Destinations,
    init: i32,
) -> (MountFacts, Vec<Refusal>) {
    let inside = visible(mountinfo::of(host, &init.to_string()));
    let outside = mountinfo::of(host, "self");
    let known = KnownMounts::of(spec, mounts);
    let own_nodes = own_nodes::paths(host, spec);
    let mut found = MountFacts::default();
    let mut refusals = Vec::new();
    for mount in &inside {
        if known.has(mount) || own_nodes::bound(host, init, &own_nodes, &mount.point) {
            continue;
        }
        let path = mount.point.display().to_string();
        if carried(mount, &inside, &outside, &known) {
            if mount.root == Path::new("/") && found.own.len() < MAX_UNNAMED {
                found.own.push(path);
            }
            continue;
        }
        if let Err(why) = declarable(&path) {
            refusals.push(refusal(&path, why, "mount it at another path"));
            continue;
        }
        match on_host(host, init, mount, &outside) {
            Some(host_path) if found.foreign.len() < MAX_UNNAMED => {
                found
                    .foreign
                    .extend(describe(host, mount, path, host_path));
            }
            _ => refusals.push(refusal(
                &path,
                &format!(
                    "comes from a file system ({}) that this host does not show",
                    mount.fs_type
                ),
                "unmount it in the container, or mount it on the host too, where its content can be found at a restore",
            )),
        }
    }
    (found, refusals)
}

fn refusal(path: &str, what: &str, remedy: &str) -> Refusal {
    Refusal::new(
        format!("the mount {path}, which the container's spec does not name, {what}"),
        remedy,
    )
}

struct KnownMounts<'a> {
    mounts: &'a Destinations,
    /// Masked and read-only paths: mounts of the runtime's own.
    made: Vec<PathBuf>,
}

impl<'a> KnownMounts<'a> {
    fn of(spec: &Spec, mounts: &'a Destinations) -> Self {
        let list = |pointer: &str| {
            let list = spec.json().pointer(pointer).and_then(|v| v.as_array());
            list.into_iter()
                .flatten()
                .filter_map(|v| Some(clean(Path::new(v.as_str()?))))
                .collect::<Vec<_>>()
        };
        let mut made = list("/linux/maskedPaths");
        made.extend(list("/linux/readonlyPaths"));
        // The runtimes' own: the terminal.
        made.push("/dev/console".into());
        Self { mounts, made }
    }

    fn has(&self, mount: &Mount) -> bool {
        mount.point == Path::new("/")
            || mount.fs_type.starts_with("cgroup")
            || self.made.contains(&mount.point)
            || self.mounts.0.iter().any(|d| d.path == mount.point)
    }

    fn makes(&self, mount: &Mount) -> bool {
        let mut all = self.mounts.0.iter();
        all.any(|d| !d.bind && d.path == mount.point)
    }
}

/// Only the last mount at a mount point is visible.
fn visible(all: Vec<Mount>) -> Vec<Mount> {
    let mut seen: Vec<Mount> = Vec::with_capacity(all.len());
    for mount in all {
        if let Some(hidden) = seen.iter_mut().find(|m| m.point == mount.point) {
            *hidden = mount;
        } else {
            seen.push(mount);
        }
    }
    seen
}

/// Returns true if CRIU can make this mount again from what it saves: a file system of the container's own, or part of
/// one.
fn carried(mount: &Mount, inside: &[Mount], outside: &[Mount], known: &KnownMounts<'_>) -> bool {
    inside
        .iter()
        .filter(|m| m.device == mount.device && below(&mount.root, &m.root).is_some())
        .any(|m| {
            m.point == Path::new("/")
                || known.makes(m)
                || m.root == Path::new("/") && !outside.iter().any(|o| o.device == m.device)
        })
}

/// Where a mount's content lies on the host.
fn on_host(host: &Host, init: i32, mount: &Mount, outside: &[Mount]) -> Option<PathBuf> {
    let there = host.path(format!("/proc/{init}/root{}", mount.point.display()));
    let identity = |path: &Path| {
        let meta = fs::metadata(path).ok()?;
        Some((meta.dev(), meta.ino()))
    };
    let wanted = identity(&there);
    outside
        .iter()
        .filter(|m| m.device == mount.device)
        .filter_map(|m| {
            let rest = below(&mount.root, &m.root)?;
            Some(m.point.components().chain(rest.components()).collect())
        })
        .find(|path: &PathBuf| wanted.is_some() && identity(&host.path(path)) == wanted)
}

/// The type of what lies at a path; `None` if nothing does, or a type that cannot be mounted.
fn kind(path: &Path) -> Option<(MountKind, fs::Metadata)> {
    let meta = fs::metadata(path).ok()?;
    let of = meta.file_type();
    let kind = if of.is_dir() {
        MountKind::Directory
    } else if of.is_file() {
        MountKind::File
    } else if of.is_char_device() || of.is_block_device() {
        MountKind::Device
    } else {
        MountKind::Socket
    };
    Some((kind, meta))
}

fn describe(host: &Host, mount: &Mount, path: String, host_path: PathBuf) -> Option<ForeignMount> {
    let file = host.path(&host_path);
    let (kind, meta) = kind(&file)?;
    let size = (kind == MountKind::File).then_some(meta.len());
    Some(ForeignMount {
        fs_type: mount.fs_type.clone(),
        options: mount.options.clone(),
        size,
        sha256: size
            .filter(|s| *s <= MAX_DIGEST)
            .and_then(|_| digest(&file)),
        ..ForeignMount::new(path, kind, host_path.display().to_string())
    })
}

/// SHA-256 of a small file; `None` if it cannot be read.
fn digest(path: &Path) -> Option<String> {
    use std::io::Read;
    let mut content = Vec::new();
    let file = fs::File::open(path).ok()?;
    file.take(MAX_DIGEST).read_to_end(&mut content).ok()?;
    let hash = Sha256::digest(&content);
    Some(hash.iter().map(|b| format!("{b:02x}")).collect())
}

pub struct Provider<'a> {
    /// This host, the spec of the bundle that is restored, and the configuration's `mounts.allow`.
    pub ceiling: Ceiling<'a>,
    pub mounts: &'a Destinations,
    pub recorded_driver: Option<&'a str>,
    pub driver: Option<&'a str>,
    /// Replacements of a path's parts: PCI addresses of GPUs that replace others.
    pub renamed: &'a [(String, String)],
    /// Device nodes that lead elsewhere now: path in the container, path on this host.
    pub nodes: &'a [(String, String)],
}

#[derive(Debug)]
pub struct Provided {
    pub path: String,
    pub source: PathBuf,
    pub kind: MountKind,
    /// The content itself, as it was compared: an O_PATH descriptor.
    pub opened: OwnedFd,
    /// It is a driver's file or directory, which neither the spec nor the configuration names: never writable.
    pub read_only: bool,
    /// It lies in a volume of the spec, where the container can exchange it.
    pub in_volume: bool,
}

impl Provider<'_> {
    /// Finds the source of every mount on this host. The error names every mount that has none.
    pub fn provide(&self, recorded: &[ForeignMount]) -> Result<Vec<Provided>, Vec<Refusal>> {
        let mut provided = Vec::new();
        let mut refusals = Vec::new();
        for mount in recorded.iter().take(MAX_UNNAMED) {
            match self.one(mount) {
                Ok(found) => provided.push(found),
                Err((what, remedy)) => refusals.push(Refusal::new(
                    format!("the mount {} cannot be provided: {what}", mount.path),
                    remedy,
                )),
            }
        }
        if refusals.is_empty() {
            Ok(provided)
        } else {
            Err(refusals)
        }
    }

    fn one(&self, mount: &ForeignMount) -> Result<Provided, (String, String)> {
        let fail = |what: String, remedy: &str| Err((what, remedy.to_owned()));
        for path in [&mount.path, &mount.host_path] {
            if let Err(why) = declarable(path) {
                return fail(format!("it {why}"), "the checkpoint cannot be used");
            }
            if !path.starts_with('/') || clean(Path::new(path)) != Path::new(path) {
                return fail(
                    format!("{path:?} is no clean path"),
                    "the checkpoint cannot be used",
                );
            }
        }
        let host = self.ceiling.host;
        let places = self.candidates(mount);
        let Some(source) = places.iter().find(|p| host.path(p).exists()) else {
            let tried: Vec<String> = places.iter().map(|p| p.display().to_string()).collect();
            return fail(
                format!("this host has no {}", tried.join(", nor ")),
                "install the same driver files on this host, or restore on a host that has them",
            );
        };
        let of_spec = self
            .of_spec(mount)
            .filter(|(root, rest)| root.join(rest) == *source);
        let opened = match &of_spec {
            // The container writes there: none of its links may lead out of what the engine gave.
            Some((root, rest)) => open_beneath(&host.path(root), rest),
            // The file itself counts, not a link to it from an allowed place.
            None => fs::canonicalize(host.path(source)).and_then(|real| {
                open_beneath(Path::new("/"), real.strip_prefix("/").unwrap_or(&real))
            }),
        };
        let opened = match opened {
            Ok(opened) => opened,
            Err(e) => {
                return fail(
                    format!(
                        "{} cannot be opened without following links: {e}",
                        source.display()
                    ),
                    "put the file itself there, not a link to it",
                );
            }
        };
        let file = PathBuf::from(format!("/proc/self/fd/{}", opened.as_raw_fd()));
        let Some((kind, meta)) = kind(&file) else {
            return fail(
                format!("{} cannot be looked at", source.display()),
                "see why on this host",
            );
        };
        let mut place = source.clone();
        let mut read_only = matches!(kind, MountKind::File | MountKind::Directory);
        if of_spec.is_some() {
            read_only = false;
        } else {
            let real = fs::read_link(&file).ok();
            let real = real.and_then(|p| {
                let root = fs::canonicalize(host.root()).ok()?;
                Some(Path::new("/").join(p.strip_prefix(root).ok()?))
            });
            let real = real.unwrap_or_else(|| source.clone());
            let asked = AskedNode::Mount {
                source: &real,
                kind,
            };
            if let Err(refused) = self.ceiling.admit(asked) {
                return Err((refused.what, refused.remedy));
            }
            let allowed = self.ceiling.lifts.mounts;
            read_only &= !allowed.iter().any(|p| real.starts_with(p));
            place = real;
        }
        if kind != mount.kind {
            return fail(
                format!(
                    "it was a {} and {} is a {}",
                    mount.kind.word(),
                    source.display(),
                    kind.word()
                ),
                "install the same driver files on this host",
            );
        }
        let other_size = mount.size.is_some_and(|s| s != meta.len());
        let other_content = || match (&mount.sha256, digest(&file)) {
            (Some(was), Some(is)) => *was != is,
            _ => false,
        };
        if mount.in_use && kind == MountKind::File && (other_size || other_content()) {
            return fail(
                format!(
                    "a process had it open or mapped, and {} is another version",
                    source.display()
                ),
                "restore on a host with the same driver version",
            );
        }
        Ok(Provided {
            path: mount.path.clone(),
            source: place,
            kind,
            opened,
            read_only,
            in_volume: of_spec.is_some(),
        })
    }

    /// Where a mount's content may be, best first.
    fn candidates(&self, mount: &ForeignMount) -> Vec<PathBuf> {
        let mut moved = mount.host_path.clone();
        // At most one replacement: GPUs may have been swapped with each other.
        let named = |(old, _): &&(String, String)| !old.is_empty() && moved.contains(old.as_str());
        if let Some((old, new)) = self.renamed.iter().find(named) {
            moved = moved.replace(old.as_str(), new);
        }
        let mut places: Vec<PathBuf> = Vec::new();
        let node = self.nodes.iter().find(|(path, _)| *path == mount.path);
        places.extend(node.map(|(_, host_path)| host_path.into()));
        let versions = (self.recorded_driver, self.driver);
        if let (Some(old), Some(new)) = versions
            && old != new
            && moved.contains(old)
        {
            places.push(moved.replace(old, new).into());
        }
        places.extend(self.of_spec(mount).map(|(root, rest)| root.join(rest)));
        places.push(moved.clone().into());
        places.extend(self.other_version(&moved));
        places.dedup();
        places
    }

    /// For a mount below a bind mount of the spec: the same place below that one's source now. Returns the source and
    /// the place.
    fn of_spec(&self, mount: &ForeignMount) -> Option<(PathBuf, PathBuf)> {
        let path = Path::new(&mount.path);
        let mounts = self.mounts.0.iter();
        let (rest, source) = mounts
            .filter_map(|m| Some((below(path, &m.path)?.to_owned(), m.source.clone()?)))
            .min_by_key(|(rest, _)| rest.components().count())?;
        let directory = source.is_absolute() && self.ceiling.host.path(&source).is_dir();
        (directory && !rest.as_os_str().is_empty()).then_some((source, rest))
    }

    /// The one path that differs from a missing one in its version only: `lib/560.35.03/libcuda.so.560.35.03` is now
    /// `lib/570.10/libcuda.so.570.10`.
    fn other_version(&self, path: &str) -> Option<PathBuf> {
        let old = self
            .recorded_driver
            .filter(|v| path.contains(*v))
            .or_else(|| path.split('/').find_map(version_in))?;
        let at = path.find(old)?;
        let start = path[..at].rfind('/')? + 1;
        let end = path[at..].find('/').map_or(path.len(), |i| at + i);
        let (front, back) = path[start..end].split_once(old)?;
        let mut found: Vec<PathBuf> = self
            .ceiling
            .host
            .names(&path[..start])
            .iter()
            .filter_map(|name| {
                let new = name.strip_prefix(front)?.strip_suffix(back)?;
                (version_in(new) == Some(new)).then(|| path.replace(old, new).into())
            })
            .filter(|p: &PathBuf| self.ceiling.host.path(p).exists())
            .collect();
        found.pop().filter(|_| found.is_empty())
    }
}

/// Opens `rest` below a directory, through no link. The caller vouches for the directory itself.
fn open_beneath(directory: &Path, rest: &Path) -> io::Result<OwnedFd> {
    Ok(open_without_links(
        fs::File::open(directory)?,
        rest,
        OFlag::O_PATH,
    )?)
}

/// A driver's version within a word: numbers with dots, the first of three digits: `560.35.03`.
fn version_in(word: &str) -> Option<&str> {
    let bytes = word.as_bytes();
    let mut from = 0;
    while from < bytes.len() {
        let length = bytes[from..]
            .iter()
            .take_while(|b| b.is_ascii_digit() || **b == b'.')
            .count();
        let run = &word[from..from + length];
        let run = run.trim_matches('.');
        let mut parts = run.split('.');
        if parts.next().is_some_and(|p| p.len() == 3)
            && parts.clone().count() >= 1
            && parts.all(|p| !p.is_empty())
        {
            return Some(run);
        }
        from += length.max(1);
        while !word.is_char_boundary(from) {
            from += 1;
        }
    }
    None
}

#[cfg(test)]
#[path = "mounts_tests.rs"]
mod tests;
