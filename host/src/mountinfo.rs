//! Parses `/proc/PID/mountinfo`.

use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, umount2};

use crate::files::Host;

/// Mounts of one namespace that are examined; a container can make as many as it likes.
const MAX_MOUNTS: usize = 100_000;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// The mount's id, which `/proc/PID/fdinfo` names.
    pub id: u64,
    /// The file system's device number, `0:48`.
    pub device: String,
    /// The mounted directory of the file system.
    pub root: PathBuf,
    /// The mount point, from the process's root.
    pub point: PathBuf,
    pub options: Vec<String>,
    pub fs_type: String,
}

/// The mounts that a process sees, in their order; empty if it is gone.
pub fn of(host: &Host, process: &str) -> Vec<Mount> {
    let text = host
        .text(format!("/proc/{process}/mountinfo"))
        .unwrap_or_default();
    text.lines().take(MAX_MOUNTS).filter_map(parse).collect()
}

fn parse(line: &str) -> Option<Mount> {
    let (front, back) = line.split_once(" - ")?;
    let mut front = front.split(' ');
    let id = front.next()?.parse().ok()?;
    let device = front.nth(1)?.to_owned();
    let root = unescape(front.next()?);
    let point = unescape(front.next()?);
    let options = front.next()?.split(',').map(str::to_owned).collect();
    Some(Mount {
        id,
        device,
        root: root.into(),
        point: point.into(),
        options,
        fs_type: back.split(' ').next()?.to_owned(),
    })
}

/// The kernel writes space, tab, newline and backslash as octal numbers.
fn unescape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        let code = rest.get(at + 1..at + 4);
        match code.and_then(|c| u8::from_str_radix(c, 8).ok()) {
            Some(byte) if byte.is_ascii() => {
                out.push(char::from(byte));
                rest = &rest[at + 4..];
            }
            _ => {
                out.push('\\');
                rest = &rest[at + 1..];
            }
        }
    }
    out.push_str(rest);
    out
}

/// The rest of `path` below `base`, which may be `/`; `""` for `base` itself.
pub fn below<'a>(path: &'a Path, base: &Path) -> Option<&'a Path> {
    path.strip_prefix(base).ok()
}

/// Checks that CRIU's configuration and its `external mnt[PATH]:KEY` can hold this path. The error says why not.
pub fn declarable(path: &str) -> Result<(), &'static str> {
    let odd = |c: char| c.is_whitespace() || c.is_control() || "[]\"'\\#".contains(c);
    if path.chars().any(odd) || path.contains(char::REPLACEMENT_CHARACTER) {
        return Err("has a name that cannot be told to CRIU");
    }
    Ok(())
}

/// Unmounts a directory and all that is mounted in it, the last first.
pub fn unmount_below(directory: &Path) {
    for mount in of(&Host::system(), "self").iter().rev() {
        if mount.point.starts_with(directory) {
            let _ = umount2(
                &mount.point,
                MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW,
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines() {
        let m = parse(r"167 166 0:43 /opt/a\040b /proc/driver/nvidia/gpus/0000:65:00.0 ro,nosuid master:1 - overlay overlay rw,lowerdir=lower").unwrap();
        assert_eq!((m.id, m.device.as_str()), (167, "0:43"));
        assert_eq!(m.root, Path::new("/opt/a b"));
        assert_eq!(m.point, Path::new("/proc/driver/nvidia/gpus/0000:65:00.0"));
        assert_eq!(m.options, ["ro", "nosuid"]);
        assert_eq!(m.fs_type, "overlay");
        assert_eq!(parse("no line"), None);
        assert_eq!(unescape(r"a\134b\x\0"), r"a\b\x\0");
    }
}
