//! Prepares cgroups for a restore by crun where only the unified hierarchy is mounted and the kernel has version 1
//! hierarchies besides.
//!
//! crun names the container's cgroup to CRIU for all hierarchies (`criu_add_cg_root(NULL, path)`) although it makes the
//! one of version 2 only. CRIU makes the others, and fails at `cpuset`: a new cgroup of that controller has no CPUs,
//! and none below it can have any (`Failed writing 0-1 to cpuset//.../cpuset.cpus: Permission denied`, seen with crun
//! 1.21 and 1.28, CRIU 4.1.1 and 4.2.1). crun's `--manage-cgroups-mode ignore` does not reach CRIU at a restore. A CRIU
//! that ignores cgroups would leave all processes but the first in crun's own. So this module makes the parent cgroups
//! beforehand, each with the CPUs of its parent, as crun does itself where it sees version 1.

use std::ffi::{CStr, CString};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::{Component, Path, PathBuf};

use cryopod_gpu_plan::refusal::Refusal;
use cryopod_host::files::Host;
use cryopod_host::spec::Spec;

use crate::error::Error;
use cryopod_host::cgroups::{self, Setup};

/// `f_type` of the unified hierarchy.
const CGROUP2: i64 = 0x6367_7270;

/// Returns the controllers in the hierarchy of `cpuset`, if crun's restore needs cgroups there.
fn needed(host: &Host) -> Option<Vec<String>> {
    let unified = nix::sys::statfs::statfs(&host.path("/sys/fs/cgroup")).ok()?;
    if cgroups::setup(host) != Setup::Hybrid || unified.filesystem_type().0 as i64 != CGROUP2 {
        return None;
    }
    let text = host.text("/proc/self/cgroup").ok()?;
    // "3:cpuset:/path"
    let mut lines = text.lines().filter_map(|l| l.split(':').nth(1));
    let line = lines.find(|l| l.split(',').any(|c| c == "cpuset"))?;
    Some(line.split(',').map(str::to_owned).collect())
}

/// Returns the parents of the container's cgroup, from the root down; `None` where systemd names them.
fn above(spec: &Spec) -> Option<Vec<PathBuf>> {
    let path = spec.json().pointer("/linux/cgroupsPath");
    let path = path.and_then(|p| p.as_str()).unwrap_or_default();
    if path.contains(':') {
        return None;
    }
    let mut at = PathBuf::new();
    let names = Path::new(path).components().filter_map(|c| match c {
        Component::Normal(name) => Some(name),
        _ => None,
    });
    let mut all: Vec<PathBuf> = names
        .map(|name| {
            at.push(name);
            at.clone()
        })
        .collect();
    all.pop();
    Some(all)
}

pub fn obstacle(host: &Host, spec: &Spec) -> Option<Refusal> {
    let controllers = needed(host)?;
    let why = match above(spec) {
        None => "systemd makes its cgroup in v2 alone".to_owned(),
        Some(_) => hierarchy(&controllers).err()?.to_string(),
    };
    Some(Refusal {
        process: None,
        what: format!(
            "crun has CRIU restore the container's cgroup in the v1 hierarchies of this host too, where it fails on cpuset.cpus ({why})"
        ),
        remedy: "use runc, or a host with cgroup v2 alone".into(),
    })
}

pub fn prepare(host: &Host, spec: &Spec) -> Result<(), Error> {
    let (Some(controllers), Some(above)) = (needed(host), above(spec)) else {
        return Ok(());
    };
    let made = hierarchy(&controllers).and_then(|root| {
        // A path through the descriptor: the hierarchy is mounted nowhere.
        let root = PathBuf::from(format!("/proc/self/fd/{}", root.as_raw_fd()));
        above.iter().try_for_each(|path| inherit(&root.join(path)))
    });
    made.map_err(Error::io(
        "the container's cgroup cannot be made in the cpuset hierarchy; use runc",
    ))
}

/// Makes a cgroup with the CPUs and memory nodes of its parent.
fn inherit(directory: &Path) -> io::Result<()> {
    match fs::create_dir(directory) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    for name in ["cpuset.cpus", "cpuset.mems"] {
        if fs::read_to_string(directory.join(name))?.trim().is_empty() {
            let of_parent = fs::read_to_string(directory.join("..").join(name))?;
            fs::write(directory.join(name), of_parent.trim())?;
        }
    }
    Ok(())
}

/// Opens the root of a version 1 hierarchy, as this process's cgroup namespace has it, without a mount point.
fn hierarchy(controllers: &[String]) -> io::Result<File> {
    const SET_FLAG: u32 = 0;
    const CREATE: u32 = 6;
    let context = new_fd(|| {
        // SAFETY: a system call with a string that lives as long as the call.
        unsafe { libc::syscall(libc::SYS_fsopen, c"cgroup".as_ptr(), 1) }
    })?;
    let configure = |command: u32, key: Option<&CStr>| {
        let key = key.map_or(std::ptr::null(), CStr::as_ptr);
        let none = std::ptr::null::<libc::c_char>();
        // SAFETY: likewise; commands without a value take null.
        let done = unsafe {
            libc::syscall(
                libc::SYS_fsconfig,
                context.as_raw_fd(),
                command,
                key,
                none,
                0,
            )
        };
        match done {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    for controller in controllers {
        configure(SET_FLAG, Some(&CString::new(controller.as_str())?))?;
    }
    configure(CREATE, None)?;
    let mount = new_fd(|| {
        // SAFETY: a system call with numbers only.
        unsafe { libc::syscall(libc::SYS_fsmount, context.as_raw_fd(), 1, 0) }
    })?;
    Ok(File::from(mount))
}

fn new_fd(call: impl FnOnce() -> libc::c_long) -> io::Result<OwnedFd> {
    match RawFd::try_from(call()) {
        // SAFETY: the kernel has just made this descriptor for us.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_cgroups_above_a_container() {
        let of = |path: &str| above(&Spec::from_json(json!({"linux": {"cgroupsPath": path}})));
        let paths = |all: &[&str]| Some(all.iter().map(PathBuf::from).collect::<Vec<_>>());
        assert_eq!(of("/libpod_parent/libpod-1"), paths(&["libpod_parent"]));
        assert_eq!(of("/a/../b/c"), paths(&["a", "a/b"]));
        assert_eq!(of("user.slice:libpod:1"), None);
        assert_eq!(above(&Spec::from_json(json!({}))), paths(&[]));
    }

    #[test]
    fn only_beside_v1() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(needed(&Host::at(dir.path())), None);
    }
}
