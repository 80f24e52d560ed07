//! Freezes a container's cgroup while its files are read.
//!
//! For a container with a GPU, CRIU stops the processes of its tree by ptrace and leaves the cgroup alone. Processes
//! that an engine's `exec` started are in the cgroup but not in that tree: they would go on writing.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use cryopod_archive::format::text::printable;
use cryopod_gpu_plan::live;
use cryopod_host::files::{Host, if_there, read_bounded};
use cryopod_host::limited::wait_until;
use cryopod_host::spec::Spec;

const LIMIT: Duration = Duration::from_secs(5);
const TICK: Duration = Duration::from_millis(1);
/// crun's own cgroup in that of a container which it restores, where systemd or version 1 manages cgroups.
const OF_CRUN: &str = ".proxy-crun";
/// Names the cgroup that crun makes for the container in the one that systemd makes; without it [`SUBGROUP`].
const SUBGROUP_ANNOTATION: &str = "run.oci.systemd.subgroup";
const SUBGROUP: &str = "container";

/// A container's frozen cgroup. Dropped, it is as it was.
#[derive(Debug, Default)]
pub struct Frozen {
    /// The file to write to, and the text that thaws; `None` if the cgroup was frozen already, or needs no freezing.
    thaw: Option<(PathBuf, &'static str)>,
    /// Says how to thaw it if this process is killed: [`thaw_noted`].
    note: Option<PathBuf>,
}

/// In an operation's directory while a cgroup is frozen: the file to write to, and the text that thaws.
const NOTE: &str = "frozen";
const NOTE_MAX: u64 = 64 << 10;

struct Freezer {
    dir: PathBuf,
    /// The cgroup of the init process: this one, or one below that the container has made.
    innermost: PathBuf,
    /// The cgroup of this program, in the same hierarchy.
    beside: PathBuf,
    v2: bool,
}

impl Freezer {
    /// Finds the cgroup of the container with the init process `init`: the one that the low-level runtime pauses. None that
    /// would freeze this program, too.
    fn of(host: &Host, spec: &Spec, init: i32) -> Option<Self> {
        let cgroups = host.text(format!("/proc/{init}/cgroup")).ok()?;
        let own = host.text("/proc/self/cgroup").unwrap_or_default();
        let found = cgroups.lines().filter_map(|line| {
            let (kind, innermost) = parsed(line)?;
            let path = find_own(spec, innermost);
            // A container without a cgroup of its own (podman's `--cgroups=disabled`): this program would freeze
            // itself.
            let mut ours = own.lines().filter_map(parsed);
            let ours = ours.find(|(of, _)| *of == kind).map(|(_, own)| own);
            let ours = ours.unwrap_or(Path::new("/"));
            if ours.starts_with(path) {
                return None;
            }
            // Never the root; `..` leads out of this program's cgroup namespace.
            let innermost = innermost.strip_prefix("/").ok()?;
            let path = path.strip_prefix("/").ok()?;
            let mut names = innermost.components();
            if path == Path::new("") || !names.all(|c| matches!(c, Component::Normal(_))) {
                return None;
            }
            let (roots, file, v2) = match kind {
                "" => (
                    &["/sys/fs/cgroup", "/sys/fs/cgroup/unified"][..],
                    "cgroup.freeze",
                    true,
                ),
                kind if kind.split(',').any(|k| k == "freezer") => (
                    &["/sys/fs/cgroup/freezer", "/sys/fs/cgroup"][..],
                    "freezer.state",
                    false,
                ),
                _ => return None,
            };
            let mut roots = roots.iter().map(|root| host.path(root));
            let root = roots.find(|root| root.join(path).join(file).exists())?;
            Some(Self {
                dir: root.join(path),
                innermost: root.join(innermost),
                beside: root.join(ours.strip_prefix("/").unwrap_or(ours)),
                v2,
            })
        });
        // On a hybrid host the container's limits, and so its members, are in version 1.
        found.min_by_key(|freezer| freezer.v2)
    }

    fn file(&self) -> PathBuf {
        let name = if self.v2 {
            "cgroup.freeze"
        } else {
            "freezer.state"
        };
        self.dir.join(name)
    }

    fn is_frozen(&self) -> bool {
        if self.v2 {
            reads(&self.dir.join("cgroup.events"), "frozen 1")
        } else {
            reads(&self.dir.join("freezer.state"), "FROZEN")
        }
    }

    /// The cgroups from the init process's up to the container's own that are frozen themselves.
    fn frozen(&self) -> impl Iterator<Item = &Path> {
        let all = self.innermost.ancestors();
        let all = all.take_while(|dir| dir.starts_with(&self.dir));
        all.filter(|dir| match self.v2 {
            true => reads(&dir.join("cgroup.freeze"), "1"),
            false => !reads(&dir.join("freezer.state"), "THAWED"),
        })
    }

    /// Freezes it; `operation` gets the note.
    fn freeze(&self, operation: Option<&Path>) -> io::Result<Frozen> {
        if self.is_frozen() {
            return Ok(Frozen::default());
        }
        let (freeze, thaw) = if self.v2 {
            ("1", "0")
        } else {
            ("FROZEN", "THAWED")
        };
        let note = operation.map(|operation| operation.join(NOTE));
        if let Some(note) = &note {
            std::fs::write(note, serde_json::to_vec(&(self.file(), thaw))?)?;
        }
        // From here on the drop thaws it, whatever happens.
        let mut frozen = Frozen {
            thaw: Some((self.file(), thaw)),
            note,
        };
        if let Err(e) = write(&self.file(), freeze) {
            // Who cannot write there has frozen nothing, and could thaw nothing.
            frozen.thaw = None;
            return Err(e);
        }
        match wait_until(LIMIT, TICK, || self.is_frozen()) {
            true => Ok(frozen),
            false => Err(io::ErrorKind::TimedOut.into()),
        }
    }

    fn members(&self) -> Vec<i32> {
        let mut found = Vec::new();
        let mut dirs = vec![self.dir.clone()];
        while let Some(dir) = dirs.pop() {
            let pids = std::fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
            found.extend(pids.lines().filter_map(|l| l.parse::<i32>().ok()));
            let below = std::fs::read_dir(dir).into_iter().flatten().flatten();
            let below = below.filter(|e| e.file_type().is_ok_and(|t| t.is_dir()));
            dirs.extend(below.map(|e| e.path()));
        }
        found
    }
}

/// Returns the cgroup that the low-level runtime has made for a container, whose init process is in `innermost`. Without one
/// in the spec that is all there is to know.
fn find_own<'a>(spec: &Spec, innermost: &'a Path) -> &'a Path {
    let named = spec.cgroup_path().map(PathBuf::from);
    let named = named.filter(|named| innermost.starts_with(named));
    let subgroup = spec.annotation(SUBGROUP_ANNOTATION).unwrap_or(SUBGROUP);
    let of_crun = named.as_ref().filter(|_| spec.names_a_slice());
    let of_crun = of_crun.map(|named| named.join(subgroup));
    let is_own = |path: &&Path| {
        [&of_crun, &named]
            .iter()
            .any(|own| own.as_deref() == Some(*path))
    };
    innermost.ancestors().find(is_own).unwrap_or(innermost)
}

fn reads(file: &Path, line: &str) -> bool {
    std::fs::read_to_string(file).is_ok_and(|text| text.lines().any(|found| found == line))
}

/// Parses controllers and path from a line of `/proc/PID/cgroup`.
fn parsed(line: &str) -> Option<(&str, &Path)> {
    let mut parts = line.splitn(3, ':').skip(1);
    Some((parts.next()?, Path::new(parts.next()?)))
}

fn write(file: &Path, text: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).open(file)?;
    file.write_all(text.as_bytes())
}

impl Frozen {
    /// Freezes the cgroup of the container with the init process `init`, whose process tree is stopped. Where no cgroup
    /// can be frozen, the tree must be all that the cgroup has. If this process is killed, `operation` says how to thaw it.
    ///
    /// # Errors
    /// A text that names a process which would go on running.
    pub fn of(
        host: &Host,
        spec: &Spec,
        init: i32,
        operation: Option<&Path>,
    ) -> Result<Self, String> {
        let nothing = Self::default();
        let Some(freezer) = Freezer::of(host, spec, init) else {
            return Ok(nothing);
        };
        let why = match freezer.freeze(operation) {
            Ok(frozen) => return Ok(frozen),
            Err(e) => e,
        };
        let tree = live::tree(host, init);
        let members = freezer.members();
        let Some(other) = members.iter().find(|pid| !tree.contains(pid)) else {
            return Ok(nothing);
        };
        let comm = host.line(format!("/proc/{other}/comm")).unwrap_or_default();
        Err(format!(
            "process {other} ({}) is in the container's cgroup {} and not among the descendants of its first process, so it would go on changing files, and the cgroup cannot be frozen ({why}); end it (it may be an exec), then checkpoint again",
            printable(&comm),
            freezer.dir.display()
        ))
    }
}

impl Frozen {
    /// Freezes the cgroup of a container whose process tree is stopped. If this process is killed, `operation` says how
    /// to thaw it.
    ///
    /// # Errors
    /// A text that says why it cannot be frozen.
    pub fn stopped(host: &Host, spec: &Spec, init: i32, operation: &Path) -> Result<Self, String> {
        let freezer = Freezer::of(host, spec, init);
        let freezer = freezer.ok_or("the container has no cgroup that can be frozen")?;
        let frozen = freezer.freeze(Some(operation));
        frozen.map_err(|e| format!("{}: {e}", freezer.file().display()))
    }

    /// Freezes the cgroup of a container that CRIU restores, and leaves it so. CRIU itself must go on: runc starts it in
    /// the container's cgroup. It is moved to the cgroup of this program, which must be outside of the container and of
    /// its PID namespace.
    ///
    /// # Errors
    /// A text that says what cannot be moved or frozen.
    pub fn at_restore(host: &Host, spec: &Spec, init: i32) -> Result<(), String> {
        let freezer = Freezer::of(host, spec, init);
        let freezer = freezer.ok_or("the container has no cgroup that can be frozen")?;
        let tree = live::tree(host, init);
        for pid in freezer.members() {
            if !tree.contains(&pid) && !move_crun_aside(host, pid) {
                let procs = freezer.beside.join("cgroup.procs");
                let text = pid.to_string();
                write(&procs, &text).map_err(|e| format!("{}: {text}: {e}", procs.display()))?;
            }
        }
        let frozen = freezer.freeze(None);
        let mut frozen = frozen.map_err(|e| format!("{}: {e}", freezer.file().display()))?;
        frozen.thaw = None;
        Ok(())
    }

    /// Leaves the cgroup frozen if this process is killed: nobody may let the container go on any more.
    pub fn forget_note(&mut self) {
        if let Some(note) = self.note.take() {
            let _ = std::fs::remove_file(note);
        }
    }
}

/// Moves the process that crun has waiting in the container's cgroup while CRIU restores, and that crun waits for in the
/// end. That process goes to the parent of the cgroup where it is, and removes this one. So it gets one of its own, in
/// each hierarchy below the cgroup of this program. Returns false for any other process, and if it would be frozen.
fn move_crun_aside(host: &Host, pid: i32) -> bool {
    let of = |process: &str| host.text(format!("/proc/{process}/cgroup"));
    let (Ok(all), Ok(ours)) = (of(&pid.to_string()), of("self")) else {
        return false;
    };
    let mut aside = false;
    for (kind, path) in all.lines().filter_map(parsed) {
        if !path.ends_with(OF_CRUN) {
            continue;
        }
        let mut ours = ours.lines().filter_map(parsed);
        let beside = ours.find(|(of, _)| *of == kind).map(|(_, own)| own);
        let beside = beside.unwrap_or(Path::new("/"));
        let below = |root: &Path, path: &Path| root.join(path.strip_prefix("/").unwrap_or(path));
        let Some(root) = hierarchy(host, kind, path) else {
            continue;
        };
        let to = below(&root, beside).join(format!("{OF_CRUN}-{pid}"));
        // Of a helper with this pid that was killed.
        let _ = std::fs::remove_dir(&to);
        let moved = std::fs::create_dir(&to)
            .and_then(|()| write(&to.join("cgroup.procs"), &pid.to_string()));
        match moved {
            Ok(()) => aside |= kind.is_empty() || kind.split(',').any(|k| k == "freezer"),
            Err(e) => tracing::warn!("{}: process {pid} of crun: {e}", to.display()),
        }
        let _ = std::fs::remove_dir(below(&root, path));
    }
    aside
}

/// Returns where the hierarchy of these controllers is mounted, by a cgroup that it has.
fn hierarchy(host: &Host, controllers: &str, has: &Path) -> Option<PathBuf> {
    let names = [controllers].into_iter().chain(controllers.split(','));
    let names = names.map(|name| name.trim_start_matches("name="));
    let roots = names.chain(["unified"]);
    let roots = roots.map(|name| host.path("/sys/fs/cgroup").join(name));
    let has = has.strip_prefix("/").unwrap_or(has);
    roots.into_iter().find(|root| root.join(has).is_dir())
}

/// Thaws the cgroup that the killed wrapper of the operation in this directory had frozen, if it had.
pub fn thaw_noted(operation: &Path) {
    let note = operation.join(NOTE);
    let noted = read_bounded(&note, NOTE_MAX).ok();
    let noted = noted.and_then(|text| serde_json::from_slice::<(PathBuf, String)>(&text).ok());
    if let Some((file, thaw)) = noted {
        let thawed = write(&file, &thaw);
        tracing::warn!("{}: was left frozen: {thawed:?}", file.display());
        // Whoever freezes it from now on wants that.
        let _ = std::fs::remove_file(note);
    }
}

/// Thaws a cgroup, so that its killed processes end.
pub fn thaw(cgroup: &Path) {
    for (file, text) in [("cgroup.freeze", "0"), ("freezer.state", "THAWED")] {
        let _ = write(&cgroup.join(file), text);
    }
}

/// Thaws the cgroup of version 1 that holds a process, and no other.
pub fn thaw_v1(host: &Host, pid: i32) {
    if let Some(freezer) = Freezer::of(host, &Spec::default(), pid).filter(|f| !f.v2) {
        thaw(&freezer.dir);
    }
}

/// Thaws a container that nobody has paused, and a killed CRIU has left frozen.
pub fn thaw_left(host: &Host, spec: &Spec, init: i32) {
    let Some(freezer) = Freezer::of(host, spec, init) else {
        return;
    };
    for dir in freezer.frozen() {
        tracing::warn!("{}: was left frozen, and is thawed", dir.display());
        thaw(dir);
    }
}

const CGROUP_IMAGE: &str = "cgroup.img";
const IMAGE_MAX: u64 = 16 << 20;
/// `CgroupPropEntry` of criu/images/cgroup.proto: the name, then the value (field 2) of 6 bytes.
const RESTORED_FROZEN: &[u8] = b"freezer.state\x12\x06FROZEN";
const RESTORED_THAWED: &[u8] = b"freezer.state\x12\x06THAWED";

/// Edits the images so that a container dumped while paused runs after its restore: CRIU records that version 1's
/// freezer was frozen, and freezes again.
pub fn restored_thawed(images: &Path) -> io::Result<()> {
    let path = images.join(CGROUP_IMAGE);
    let Some(mut image) = if_there(read_bounded(&path, IMAGE_MAX))? else {
        return Ok(());
    };
    let mut changed = false;
    for at in 0..image.len().saturating_sub(RESTORED_FROZEN.len() - 1) {
        let here = &mut image[at..at + RESTORED_FROZEN.len()];
        if here == RESTORED_FROZEN {
            here.copy_from_slice(RESTORED_THAWED);
            changed = true;
        }
    }
    if changed {
        std::fs::write(&path, &image)?;
    }
    Ok(())
}

impl Drop for Frozen {
    fn drop(&mut self) {
        if let Some((file, thaw)) = &self.thaw
            && let Err(e) = write(file, thaw)
        {
            tracing::error!(
                "{}: the container's cgroup cannot be thawed: {e}; write {thaw} to that file",
                file.display()
            );
        }
        self.forget_note();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryopod_test_files::TestFiles;
    use std::fs;

    fn host(cgroups: &str, files: &[(&str, &str)]) -> (tempfile::TempDir, Host) {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::at(dir.path());
        dir.put("proc/7/cgroup", cgroups);
        dir.put("proc/7/stat", "7 (init) t 1 7 7");
        for (name, text) in files {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        (dir, host)
    }

    #[test]
    fn a_paused_container_is_restored_running() {
        let dir = tempfile::tempdir().unwrap();
        restored_thawed(dir.path()).unwrap();
        let path = dir.path().join(CGROUP_IMAGE);
        for (before, after) in [
            (RESTORED_FROZEN, RESTORED_THAWED),
            (b"freezer.state\x12\x06FRO", b"freezer.state\x12\x06FRO"),
            (b"", b""),
        ] {
            let surroundings = |image: &[u8]| [b"x".as_slice(), image, b"y"].concat();
            fs::write(&path, surroundings(before)).unwrap();
            restored_thawed(dir.path()).unwrap();
            assert_eq!(fs::read(&path).unwrap(), surroundings(after));
        }
    }

    #[test]
    fn what_is_frozen_stays_frozen() {
        for (cgroups, file, frozen) in [
            ("0::/c\n", "sys/fs/cgroup/c/cgroup.freeze", "1"),
            (
                "3:cpu,freezer:/c\n0::/\n",
                "sys/fs/cgroup/freezer/c/freezer.state",
                "FROZEN",
            ),
        ] {
            let events = ("sys/fs/cgroup/c/cgroup.events", "populated 1\nfrozen 1\n");
            let (dir, host) = host(cgroups, &[(file, frozen), events]);
            drop(Frozen::of(&host, &Spec::default(), 7, None).unwrap());
            assert_eq!(fs::read_to_string(dir.path().join(file)).unwrap(), frozen);
        }
    }

    #[test]
    fn what_a_killed_wrapper_has_frozen_is_thawed() {
        let file = "sys/fs/cgroup/freezer/c/freezer.state";
        let (dir, host) = host("3:cpu,freezer:/c\n0::/\n", &[(file, "THAWED")]);
        let operation = tempfile::tempdir().unwrap();
        let state = || fs::read_to_string(dir.path().join(file)).unwrap();
        let freeze = || Frozen::of(&host, &Spec::default(), 7, Some(operation.path())).unwrap();
        std::mem::forget(freeze());
        assert_eq!(state(), "FROZEN");
        thaw_noted(operation.path());
        assert_eq!(state(), "THAWED");
        drop(freeze());
        // The container must not go on, whoever is killed.
        let mut ending = freeze();
        ending.forget_note();
        std::mem::forget(ending);
        thaw_noted(operation.path());
        assert_eq!(state(), "FROZEN");
        // Somebody else pauses the container later.
        dir.put(file, "FROZEN");
        thaw_noted(operation.path());
        assert_eq!(state(), "FROZEN");
    }

    #[test]
    fn the_root_and_other_namespaces_cgroups_are_left_alone() {
        for cgroups in ["0::/\n", "0::/../x\n", "0::/a/../../x\n"] {
            let (_dir, host) = host(
                cgroups,
                &[
                    ("sys/fs/cgroup/cgroup.freeze", "0"),
                    ("sys/fs/x/cgroup.freeze", "0"),
                    ("sys/fs/cgroup/x/cgroup.freeze", "0"),
                ],
            );
            assert!(
                Freezer::of(&host, &Spec::default(), 7).is_none(),
                "{cgroups}"
            );
        }
    }

    #[test]
    fn this_program_does_not_freeze_itself() {
        for (own, frozen) in [("0::/c\n", false), ("0::/c/x\n", false), ("0::/d\n", true)] {
            let files = [
                ("proc/self/cgroup", own),
                ("sys/fs/cgroup/c/cgroup.freeze", "0"),
            ];
            let (_dir, host) = host("0::/c\n", &files);
            assert_eq!(
                Freezer::of(&host, &Spec::default(), 7).is_some(),
                frozen,
                "{own}"
            );
        }
    }

    /// A cgroup that does not freeze may have no other members.
    #[test]
    fn members_outside_of_the_tree_are_refused_where_nothing_freezes() {
        let (dir, host) = host(
            "0::/c\n",
            &[
                ("sys/fs/cgroup/c/cgroup.procs", "7\n"),
                ("sys/fs/cgroup/c/below/cgroup.procs", ""),
                ("proc/8/comm", "ba\x1b[2Jd\n"),
            ],
        );
        // Opening it for writing fails, also for root.
        dir.dir("sys/fs/cgroup/c/cgroup.freeze");
        Frozen::of(&host, &Spec::default(), 7, None).unwrap();
        let below = dir.path().join("sys/fs/cgroup/c/below/cgroup.procs");
        fs::write(below, "8\n").unwrap();
        let error = Frozen::of(&host, &Spec::default(), 7, None).unwrap_err();
        assert!(error.contains("process 8"), "{error}");
        assert!(!error.contains('\x1b'), "{error:?}");
    }

    /// As in a container whose systemd has moved itself.
    #[test]
    fn the_cgroup_that_the_runtime_pauses() {
        for (named, innermost, own) in [
            ("/pod/c", "/pod/c/init.scope", "/pod/c"),
            ("/pod/c", "/pod/c/container", "/pod/c"),
            (
                "s.slice:libpod:1",
                "/s.slice/libpod-1.scope/container/a",
                "/s.slice/libpod-1.scope/container",
            ),
            (
                "s.slice:runc:1",
                "/s.slice/runc-1.scope/init.scope",
                "/s.slice/runc-1.scope",
            ),
            ("/pod/c", "/elsewhere/x", "/elsewhere/x"),
            ("", "/c/x", "/c/x"),
        ] {
            let spec = Spec::from_json(serde_json::json!({"linux": {"cgroupsPath": named}}));
            assert_eq!(
                find_own(&spec, Path::new(innermost)),
                Path::new(own),
                "{named}"
            );
        }
        let spec = Spec::from_json(serde_json::json!({
            "annotations": {SUBGROUP_ANNOTATION: ""},
            "linux": {"cgroupsPath": "s.slice:libpod:1"},
        }));
        let scope = Path::new("/s.slice/libpod-1.scope");
        assert_eq!(find_own(&spec, &scope.join("container")), scope);
    }

    #[test]
    fn each_cgroup_of_a_container_is_thawed_and_no_other() {
        let file = |of: &str| format!("sys/fs/cgroup/{of}cgroup.freeze");
        let (above, own, inner) = (file("pod/"), file("pod/c/"), file("pod/c/init.scope/"));
        let frozen = [
            (above.as_str(), "1\n"),
            (own.as_str(), "1\n"),
            (inner.as_str(), "0\n"),
        ];
        let (dir, host) = host("0::/pod/c/init.scope\n", &frozen);
        let spec = Spec::from_json(serde_json::json!({"linux": {"cgroupsPath": "/pod/c"}}));
        thaw_left(&host, &spec, 7);
        let reads = |file: &str| fs::read_to_string(dir.path().join(file)).unwrap();
        assert_eq!(
            [&above, &own, &inner].map(|f| reads(f)),
            ["1\n", "0\n", "0\n"]
        );
    }
}
