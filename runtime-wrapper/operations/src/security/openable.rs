//! Tells which files of volumes the spec's user could open, make or remove. CRIU opens and makes a process's files before
//! it takes the process's credentials, so it does for an archive what only root may.

use std::fs::{File, Metadata};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use cryopod_host::processes::id_map::IdMap;
use cryopod_host::spec::Spec;
use nix::errno::Errno;
use nix::fcntl::OFlag;
use rustix::fs::fstat;
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use rustix::thread::{
    CapabilitySet, capabilities, set_capabilities, set_thread_groups, set_thread_res_gid,
    set_thread_res_uid,
};

use super::ceiling::CredentialsCeiling;

/// Whoever has one of these may open all files, or may change who does.
const OPEN_ALL: [&str; 5] = ["DAC_OVERRIDE", "SETUID", "CHOWN", "FOWNER", "SYS_ADMIN"];
const READ_ALL: &str = "DAC_READ_SEARCH";
const OF_FILES: CapabilitySet = CapabilitySet::DAC_OVERRIDE.union(CapabilitySet::DAC_READ_SEARCH);

/// A file, and what the user would have to be allowed to do with it.
#[derive(Debug)]
pub struct VolumeFile {
    file: OwnedFd,
    /// As of `access`.
    mode: i32,
    /// A program may be run, and a directory passed, without being read.
    or_run: bool,
}

impl VolumeFile {
    /// A file that a process has open, with flags as of `open`.
    pub fn opened(file: OwnedFd, flags: i32, is_mapped: bool) -> Self {
        let flags = OFlag::from_bits_retain(flags);
        let mode = match flags & OFlag::O_ACCMODE {
            _ if flags.contains(OFlag::O_PATH) => libc::F_OK,
            OFlag::O_WRONLY => libc::W_OK,
            OFlag::O_RDWR => libc::R_OK | libc::W_OK,
            _ => libc::R_OK,
        };
        Self {
            file,
            mode,
            or_run: is_mapped && mode == libc::R_OK,
        }
    }

    /// A directory in which a file is made or removed.
    pub fn changed(directory: OwnedFd) -> Self {
        Self {
            file: directory,
            mode: libc::W_OK | libc::X_OK,
            or_run: false,
        }
    }
}

/// The spec's user, in the host's numbers.
#[derive(Debug, PartialEq, Eq)]
pub struct SpecUser {
    uid: u32,
    gids: Vec<u32>,
    opens_all: bool,
    reads_all: bool,
    /// Those of the user namespace; empty without one.
    users: IdMap,
    groups: IdMap,
}

impl SpecUser {
    pub fn of(spec: &Spec) -> Self {
        let ceiling = CredentialsCeiling::of(spec);
        let users = IdMap::of_spec(spec.json(), "uidMappings");
        let groups = IdMap::of_spec(spec.json(), "gidMappings");
        let host = |ids: &IdMap, id: u32| {
            let outside = ids.outside(id.into()).and_then(|id| u32::try_from(id).ok());
            outside.unwrap_or(id)
        };
        let (uid, gids) = ceiling.ids();
        Self {
            uid: host(&users, uid),
            gids: gids.iter().map(|gid| host(&groups, *gid)).collect(),
            opens_all: OPEN_ALL.iter().any(|name| ceiling.has(name)),
            reads_all: ceiling.has(READ_ALL),
            users,
            groups,
        }
    }

    /// Returns true if it may open every file: of the host, or of a user namespace, which can have files of others.
    pub fn opens_all(&self) -> bool {
        self.opens_all && self.users.is_empty()
    }

    /// Returns for each file whether the user could open it. All, where this process may not take other credentials: CRIU
    /// then has no more rights than the user.
    pub fn may_open(&self, files: &[VolumeFile]) -> Vec<bool> {
        if files.is_empty() || self.opens_all() {
            return vec![true; files.len()];
        }
        let asked = std::thread::scope(|scope| {
            let asking = || {
                self.take_credentials()?;
                Ok::<_, rustix::io::Errno>(files.iter().map(|file| self.opens(file)).collect())
            };
            scope.spawn(asking).join()
        });
        // The kernel has taken it from the whole process.
        let _ = set_dumpable_behavior(DumpableBehavior::Dumpable);
        match asked {
            Ok(Ok(may)) => may,
            Ok(Err(e)) => {
                tracing::warn!(
                    "whether the container's user could open its files is not known: {e}"
                );
                vec![true; files.len()]
            }
            Err(_) => vec![false; files.len()],
        }
    }

    /// Gives this thread, which ends with them, the user's credentials.
    fn take_credentials(&self) -> rustix::io::Result<()> {
        let uid = rustix::process::Uid::from_raw(self.uid);
        let gids: Vec<_> = self
            .gids
            .iter()
            .map(|gid| rustix::process::Gid::from_raw(*gid))
            .collect();
        set_thread_groups(&gids)?;
        if let Some(gid) = gids.first() {
            set_thread_res_gid(*gid, *gid, *gid)?;
        }
        let mut own = capabilities(None)?;
        own.effective -= OF_FILES;
        set_capabilities(None, own)?;
        set_thread_res_uid(uid, uid, uid)
    }

    /// Returns true if the user may remove a file of this directory, in which it may write: in one like `/tmp` only its own.
    pub fn may_remove(&self, directory: &Metadata, file: &Metadata) -> bool {
        let owners = [directory.uid(), file.uid()];
        self.opens_all() || directory.mode() & libc::S_ISVTX == 0 || owners.contains(&self.uid)
    }

    fn opens(&self, file: &VolumeFile) -> bool {
        let all = self.opens_all || file.mode == libc::R_OK && self.reads_all;
        // The owner may give itself the right.
        let owner = fstat(&file.file).map(|stat| stat.st_uid);
        if owner == Ok(self.uid) || all && self.is_of_namespace(&file.file) {
            return true;
        }
        let access = |mode: i32| {
            // SAFETY: the path is a string that ends with a zero byte, and the call writes nothing.
            let done = unsafe {
                libc::syscall(
                    libc::SYS_faccessat2,
                    file.file.as_raw_fd(),
                    c"".as_ptr(),
                    mode,
                    libc::AT_EMPTY_PATH | libc::AT_EACCESS,
                )
            };
            // A read-only file system does not open for writing for anybody.
            done == 0 || !matches!(Errno::last(), Errno::EACCES | Errno::EPERM)
        };
        access(file.mode) || file.or_run && access(libc::X_OK)
    }

    /// Capabilities reach as far as the files of the namespace's users.
    fn is_of_namespace(&self, file: &OwnedFd) -> bool {
        let meta = file.try_clone().map(File::from).and_then(|f| f.metadata());
        let owned = |m: Metadata| {
            let (user, group) = (u64::from(m.uid()), u64::from(m.gid()));
            self.users.inside(user).is_some() && self.groups.inside(group).is_some()
        };
        self.users.is_empty() || meta.is_ok_and(owned)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::os::unix::fs::PermissionsExt;

    fn user(uid: u32, capabilities: &[&str], maps: &Value) -> SpecUser {
        let set =
            json!({"bounding": capabilities, "permitted": capabilities, "effective": capabilities});
        SpecUser::of(&Spec::from_json(json!({
            "process": {"user": {"uid": uid, "gid": 7, "additionalGids": [8]}, "noNewPrivileges": true, "capabilities": set},
            "linux": {"uidMappings": maps, "gidMappings": maps},
        })))
    }

    #[test]
    fn what_only_root_may_open() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "x").unwrap();
        let may = |user: &SpecUser, mode, owner: (u32, u32), flags, is_mapped| {
            std::os::unix::fs::chown(&path, Some(owner.0), Some(owner.1)).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            let file = File::open(&path).unwrap().into();
            let file = VolumeFile::opened(file, flags, is_mapped);
            user.may_open(&[file])[0]
        };
        let (read, write) = (libc::O_RDONLY, libc::O_RDWR);
        let plain = user(1000, &[], &Value::Null);
        let root = user(0, &[], &Value::Null);
        for (user, mode, owner, flags, want) in [
            (&plain, 0o600, (0, 0), read, false),
            (&plain, 0o644, (0, 0), read, true),
            (&plain, 0o644, (0, 0), write, false),
            (&plain, 0o640, (0, 8), read, true),
            (&plain, 0o640, (0, 9), read, false),
            (&plain, 0o600, (1000, 0), write, true),
            (&plain, 0o400, (1000, 0), write, true), // which may change the mode
            (&plain, 0o600, (0, 0), libc::O_PATH, true),
            (&root, 0o600, (1000, 0), read, false),
            (&root, 0o600, (0, 0), write, true),
            (
                &user(1000, &["CAP_DAC_OVERRIDE"], &Value::Null),
                0o600,
                (0, 0),
                write,
                true,
            ),
            (
                &user(1000, &["CAP_DAC_READ_SEARCH"], &Value::Null),
                0o600,
                (0, 0),
                read,
                true,
            ),
            (
                &user(1000, &["CAP_DAC_READ_SEARCH"], &Value::Null),
                0o600,
                (0, 0),
                write,
                false,
            ),
        ] {
            assert_eq!(
                may(user, mode, owner, flags, false),
                want,
                "{user:?} {mode:o} {owner:?} {flags}"
            );
        }
        assert!(
            may(&plain, 0o711, (0, 0), read, true),
            "a program that runs"
        );
        // Root in a user namespace has files of its own.
        let maps = json!([{"containerID": 0, "hostID": 100_000, "size": 65536}]);
        let inside = user(0, &["CAP_DAC_OVERRIDE"], &maps);
        assert!(may(&inside, 0o600, (100_005, 100_005), write, false));
        assert!(!may(&inside, 0o600, (0, 0), read, false));
        assert!(may(&inside, 0o604, (0, 0), read, false));
        // This process is as it was.
        assert!(File::open(&path).is_ok());
    }
}
