//! Gives CRIU a root of its own at a restore, which has of the host what this container needs and nothing else.
//!
//! CRIU does as root what the images say, and they may be a stranger's. The wrapper checks them; this is a second wall,
//! for what no check foresees. The low-level runtime finds this program as `criu` first on PATH. It looks at the
//! runtime's request (`criu swrk FD`) without taking it. For a restore it makes a mount namespace with a new root, and
//! becomes the real CRIU in it. So the runtime, which reads only what the engine wrote, keeps the host's files, its
//! state directory, sockets and hooks. What reads the images sees:
//!
//! | path | what it is |
//! |---|---|
//! | `/usr`, `/lib`, ... and parts of `/etc` | overlays without an upper directory: no remount makes them writable |
//! | the image directory, the work directory | overlays: what CRIU writes beside its log and statistics goes nowhere |
//! | the container's root file system, its mounts' sources, namespaces | as the runtime's request and CRIU's configuration name them |
//! | the operation directory | read-only, but for [`EXCHANGE`] |
//! | `/dev` | a tmpfs with [`NODES`], and the nodes that are mounts' sources |
//! | `/proc` | each process that there is, but CRIU itself, is covered: `/proc/1/root` would be the host. `/proc/sys` is read-only, but for what belongs to a namespace |
//! | `/sys` | read-only, without what is mounted below it; AppArmor's directory is a copy |
//! | `/run`, `/tmp` | empty tmpfs |
//!
//! So a path with `..` from a mount point or from CRIU's cgroup directory ends in an empty, read-only tmpfs.
//!
//! What it does not stop: new mounts of file systems that need no source (another cgroup's limits, a sysfs without `ro`),
//! a device node that the images themselves bring, and a process of the host that starts while CRIU works and whose pid
//! the images guess. The checks of the images are for these.
//!
//! There is no such root where a container has the host's `/` or `/proc` by its spec, as nothing is to be kept from it; and
//! where the administrator's configuration of CRIU has an action script, which may need anything of the host.

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use cryopod_archive::format::limits::OpenFilesRaised;
use cryopod_host::detached::Detached;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::stat::{Mode, umask};
use nix::unistd::{chdir, pivot_root};
use prost::Message;
use rustix::net::{RecvFlags, recv};

mod parts;
mod sharing;

use parts::{Parts, at, close_directories};

use crate::criu;
use crate::error::Error;
use crate::run::action_script::HOOK_NAME;
use crate::run::operation::{EXCHANGE, Operation};

/// The name under which this program is CRIU.
pub const NAME: &str = "criu";
/// The environment variables that name the real CRIU and the operation directory.
const PROGRAM: &str = "CRYOPOD_CRIU";
const OPERATION: &str = "CRYOPOD_OPERATION";
/// The directory of the link, in the operation directory.
const BIN: &str = "bin";
/// Directories in the operation directory that the new root is made of.
const NEW_ROOT: &str = "root";
const EMPTY: &str = "empty-layer";
const SCRATCH: &str = "scratch";

/// Programs and libraries.
const PROGRAMS: [&str; 9] = [
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix", "/gnu",
];
/// What programs need of `/etc`: directories, and files that are copied.
const ETC_DIRECTORIES: [&str; 4] = [
    "/etc/alternatives",
    "/etc/criu",
    "/etc/iproute2",
    "/etc/ld.so.conf.d",
];
const ETC_FILES: [&str; 7] = [
    "/etc/group",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/nsswitch.conf",
    "/etc/passwd",
    "/etc/protocols",
    "/etc/services",
];
/// What CRIU knows of this kernel: without it, it tries everything out again.
const KERNEL_FACTS: [&str; 2] = ["/run/criu.kdat", "/run/criu/criu.kdat"];
const NODES: [&str; 9] = [
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/dev/random",
    "/dev/urandom",
    "/dev/tty",
    "/dev/fuse",
    "/dev/net/tun",
    "/dev/userfaultfd",
];
/// What CRIU's plugin for AMD GPUs opens.
const AMD_NODES: [&str; 2] = ["/dev/kfd", "/dev/dri"];
/// Read-only in `/proc`, as in a container.
const READ_ONLY: [&str; 8] = [
    "/proc/sys",
    "/proc/sysrq-trigger",
    "/proc/irq",
    "/proc/bus",
    "/proc/fs",
    "/proc/acpi",
    "/proc/scsi",
    "/proc/mtrr",
];
/// What of `/proc/sys` belongs to a namespace, and CRIU restores.
const NAMESPACED: [&str; 4] = ["net", "fs/mqueue", "kernel/ns_last_pid", "user"];
const NAMESPACED_KERNEL: [&str; 5] = ["sem", "shm", "msg", "auto_msgmni", "hostname"];
/// CRIU's files in its work directory besides the log.
const STATISTICS: &str = "stats-restore";

/// CRIU's request (`images/rpc.proto`).
#[derive(Clone, PartialEq, Message)]
struct RootRequest {
    #[prost(int32, tag = "1")]
    kind: i32,
    #[prost(message, optional, tag = "2")]
    options: Option<RootOptions>,
}

/// `CRIU_REQ_TYPE__RESTORE`.
const RESTORE: i32 = 2;

#[derive(Clone, PartialEq, Message)]
struct RootOptions {
    #[prost(int32, optional, tag = "1")]
    images_dir_fd: Option<i32>,
    #[prost(string, optional, tag = "10")]
    log_file: Option<String>,
    #[prost(string, optional, tag = "13")]
    root: Option<String>,
    #[prost(int32, optional, tag = "17")]
    work_dir_fd: Option<i32>,
    #[prost(message, repeated, tag = "23")]
    mounts: Vec<MountMap>,
    #[prost(string, repeated, tag = "37")]
    external: Vec<String>,
    #[prost(message, repeated, tag = "39")]
    namespaces: Vec<JoinedNamespace>,
    #[prost(string, optional, tag = "51")]
    config_file: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
struct MountMap {
    #[prost(string, tag = "2")]
    source: String,
}

#[derive(Clone, PartialEq, Message)]
struct JoinedNamespace {
    #[prost(string, tag = "2")]
    file: String,
}

/// Puts this program in front of CRIU for an operation. Returns the low-level runtime's environment.
pub fn prepare(op: &Operation) -> Result<Vec<(&'static str, OsString)>, Error> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // Without CRIU the runtime says so.
    let Some(program) = std::env::split_paths(&path)
        .map(|directory| directory.join(NAME))
        .find(|file| file.is_file())
    else {
        return Ok(Vec::new());
    };
    let bin = op.file(BIN);
    fs::create_dir(&bin)
        .and_then(|()| symlink(format!("/proc/{}/exe", std::process::id()), bin.join(NAME)))
        .map_err(Error::at(&bin, "CRIU cannot be linked there"))?;
    let mut first = bin.into_os_string();
    first.push(":");
    first.push(&path);
    Ok(vec![
        ("PATH", first),
        (PROGRAM, program.into()),
        (OPERATION, op.dir().into()),
    ])
}

/// Runs as `criu`: makes the new root if this is a restore, and becomes CRIU.
pub fn launch(argv: &[OsString]) -> ExitCode {
    let Some(program) = std::env::var_os(PROGRAM) else {
        eprintln!("cryopod: {PROGRAM} does not name CRIU");
        return ExitCode::FAILURE;
    };
    let socket = match argv {
        [_, command, socket] if command == "swrk" => socket.to_str().and_then(|s| s.parse().ok()),
        _ => None,
    };
    // SAFETY: CRIU's socket stays open until this program becomes CRIU.
    let socket = socket.map(|socket| unsafe { BorrowedFd::borrow_raw(socket) });
    if let Some(socket) = socket
        && let Err(e) = answer(socket, Path::new(&program))
    {
        eprintln!("cryopod: {e}");
        return ExitCode::FAILURE;
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let bin = std::env::var_os(OPERATION).map(|op| Path::new(&op).join(BIN));
    let path = std::env::split_paths(&path).filter(|p| Some(p) != bin.as_ref());
    let path = std::env::join_paths(path).unwrap_or_default();
    let mut command = Command::new(&program);
    command.arg0(NAME).args(&argv[1..]).env("PATH", path);
    let e = command.env_remove(PROGRAM).env_remove(OPERATION).exec();
    eprintln!("cryopod: {}: {e}", Path::new(&program).display());
    ExitCode::FAILURE
}

/// Makes the root for a request to restore. CRIU's log names an error.
fn answer(socket: BorrowedFd<'_>, program: &Path) -> io::Result<()> {
    let request = RootRequest::decode(&*peek(socket)?).map_err(io::Error::other)?;
    let Some(options) = request.options.filter(|_| request.kind == RESTORE) else {
        return Ok(());
    };
    // The process that made the socket: CRIU opens the runtime's descriptors as `/proc/PEER/fd/FD`.
    let peer = getsockopt(&socket, PeerCredentials)?.pid();
    let directory = |fd: Option<i32>| {
        let fd = fd.filter(|fd| *fd >= 0)?;
        Some(fs::read_link(format!("/proc/{peer}/fd/{fd}")).map(|path| (fd, path)))
    };
    let images = directory(options.images_dir_fd).transpose()?;
    let work = directory(options.work_dir_fd).transpose()?;
    let Some((_, cwd)) = work.as_ref().or(images.as_ref()) else {
        return Ok(()); // CRIU refuses it
    };
    // The file that the runtime names comes after what it sends.
    let named = options.config_file.as_ref().map(settings_of);
    let named = named.into_iter().flatten();
    let mut named = named.filter(|(name, value)| name == "log-file" && !value.contains('/'));
    let name = named.next_back().map(|(_, value)| value);
    let name = name.or_else(|| options.log_file.clone());
    let name = name.as_deref().unwrap_or("restore.log");
    let log = cwd.join(name);
    let mut log = OpenOptions::new().create(true).append(true).open(log)?;
    let statistics = cwd.join(STATISTICS);
    OpenOptions::new()
        .create(true)
        .append(true)
        .open(statistics)?;
    let operation = std::env::var_os(OPERATION).map(PathBuf::from);
    let operation = operation.ok_or_else(|| io::Error::other(format!("{OPERATION} is not set")))?;
    let view = View {
        options: &options,
        peer,
        images: images.as_ref(),
        work: work.as_ref(),
        written: [cwd.join(name), cwd.join(STATISTICS)],
        operation: &operation,
        program,
    };
    let before = umask(Mode::empty());
    // Each mount is a descriptor until it is attached.
    let raised = OpenFilesRaised::new();
    let made = view.make();
    drop(raised);
    umask(before);
    if let Err(e) = &made {
        let _ = writeln!(log, "Error (cryopod): CRIU's own root cannot be made: {e}");
    }
    made
}

/// Options and values of a configuration file of CRIU's.
fn settings_of(file: impl AsRef<Path>) -> Vec<(String, String)> {
    let text = fs::read_to_string(file).unwrap_or_default();
    let words = |line: &str| {
        let line = line.trim().trim_start_matches('-');
        let (name, value) = line.split_once(|c: char| c.is_whitespace() || c == '=')?;
        let value = value.trim_matches(|c: char| c.is_whitespace() || "=\"".contains(c));
        Some((name.to_owned(), value.to_owned()))
    };
    text.lines().filter_map(words).collect()
}

/// Reads a message and leaves it there.
fn peek(socket: BorrowedFd<'_>) -> io::Result<Vec<u8>> {
    let mut message = vec![0; 1 << 20];
    let (read, _) = recv(socket, &mut message[..], RecvFlags::PEEK)?;
    message.truncate(read);
    Ok(message)
}

struct View<'a> {
    options: &'a RootOptions,
    peer: i32,
    /// Descriptors of the peer, and where they lead.
    images: Option<&'a (i32, PathBuf)>,
    work: Option<&'a (i32, PathBuf)>,
    written: [PathBuf; 2],
    operation: &'a Path,
    program: &'a Path,
}

impl View<'_> {
    fn make(&self) -> io::Result<()> {
        let settings = self.settings();
        let sources = self.sources(&settings);
        let whole = |s: &PathBuf| matches!(s.to_str(), Some("/" | "/proc"));
        let scripts = settings.iter().filter(|(name, _)| name == "action-script");
        let mut scripts = scripts.map(|(_, script)| Path::new(script));
        if sources.iter().any(whole) || scripts.any(|s| !s.starts_with(self.operation)) {
            return Ok(());
        }
        unshare(CloneFlags::CLONE_NEWNS)?;
        let mut parts = Parts::new(self.operation)?;
        self.programs(&mut parts)?;
        self.operation(&mut parts)?;
        self.directories(&mut parts)?;
        self.kernel(&mut parts)?;
        for source in &sources {
            parts.bind(source)?;
        }
        parts.below_kernels_own(&sources)?;
        if let Some((_, images)) = self.images {
            parts.image_directory(images)?;
        }
        if let Some(root) = &self.options.root {
            parts.bind(Path::new(root))?;
        }
        for namespace in &self.options.namespaces {
            parts.bind(Path::new(&namespace.file))?;
        }
        self.enter(parts)
    }

    /// The sources of the container's mounts on the host, and other places that CRIU mounts from.
    fn sources(&self, settings: &[(String, String)]) -> BTreeSet<PathBuf> {
        let mounts = self.options.mounts.iter();
        let mut all: BTreeSet<PathBuf> = mounts.map(|m| PathBuf::from(&m.source)).collect();
        let configured = settings.iter().filter(|(name, _)| name == "external");
        let configured = configured.map(|(_, value)| value);
        let external = self.options.external.iter().chain(configured);
        all.extend(external.filter_map(|value| external_source(value)));
        let yards = settings.iter().filter(|(name, _)| name == "cgroup-yard");
        all.extend(yards.map(|(_, path)| PathBuf::from(path)));
        // CRIU's own words, as AUTO, are no paths.
        all.retain(|source| source.is_absolute());
        all
    }

    /// Options and values of CRIU's configuration files.
    fn settings(&self) -> Vec<(String, String)> {
        let mut files = self.configurations();
        files.push("/etc/criu/default.conf".into());
        files.iter().flat_map(settings_of).collect()
    }

    /// CRIU's configuration files that have no fixed place.
    fn configurations(&self) -> Vec<PathBuf> {
        let home = std::env::var_os("HOME");
        let home = home.map(|home| Path::new(&home).join(".criu/default.conf"));
        let named = std::env::var_os("CRIU_CONFIG_FILE").map(PathBuf::from);
        let runtime = self.options.config_file.as_ref().map(PathBuf::from);
        home.into_iter().chain(named).chain(runtime).collect()
    }

    fn programs(&self, parts: &mut Parts) -> io::Result<()> {
        for directory in PROGRAMS.into_iter().chain(ETC_DIRECTORIES) {
            parts.read_only(Path::new(directory))?;
        }
        // Where cryopod is below a directory of its own, CRIU and its libraries are there, too.
        let own = criu::program::beside();
        let own = own.filter(|own| !PROGRAMS.iter().any(|p| own.starts_with(p)));
        if let Some(own) = &own {
            parts.read_only(own)?;
        }
        for file in ETC_FILES.into_iter().chain(KERNEL_FACTS) {
            if let Ok(content) = fs::read(file) {
                parts.copies.push((file.into(), content));
            }
        }
        let mut others = self.configurations();
        others.push(fs::canonicalize(self.program)?);
        others.push(self.program.to_owned());
        let plugins = fs::read_dir(self.operation.join("plugins"));
        let plugins = plugins.into_iter().flatten().flatten();
        others.extend(plugins.filter_map(|entry| fs::read_link(entry.path()).ok()));
        for file in others {
            let programs = PROGRAMS.iter().map(Path::new);
            let is_shown = programs.chain(own.as_deref()).any(|p| file.starts_with(p));
            if !is_shown && !file.starts_with(self.operation) && file.exists() {
                parts.limited(&file)?;
            }
        }
        Ok(())
    }

    /// The operation directory, entry by entry.
    fn operation(&self, parts: &mut Parts) -> io::Result<()> {
        for entry in fs::read_dir(self.operation)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default();
            match name.to_str() {
                Some(BIN | NEW_ROOT | EMPTY | SCRATCH | crate::run::operation::SHOWN) => {}
                Some(EXCHANGE) => parts.bind(&path)?,
                Some(HOOK_NAME) => parts.this_program(path)?,
                _ if path.is_symlink() => parts.links.push((fs::read_link(&path)?, path)),
                _ => parts.limited(&path)?,
            }
        }
        Ok(())
    }

    /// The image directory and the work directory.
    fn directories(&self, parts: &mut Parts) -> io::Result<()> {
        let images = self.images.iter().map(|(_, path)| path);
        let work = self.work.iter().map(|(_, path)| path);
        let mut shown: BTreeSet<PathBuf> = BTreeSet::new();
        for images in images.clone() {
            // The operation's own has links to where the files are.
            for entry in fs::read_dir(images)?.flatten() {
                if entry.file_type().is_ok_and(|t| t.is_symlink())
                    && let Ok(target) = fs::canonicalize(entry.path())
                    && !target.starts_with(images)
                {
                    let directory = if target.is_dir() {
                        Some(&*target)
                    } else {
                        target.parent()
                    };
                    shown.extend(directory.map(Path::to_owned));
                }
            }
        }
        let writable = work.clone().chain(images.clone()).next();
        shown.extend(images.cloned());
        for directory in shown.iter().filter(|d| Some(*d) != writable) {
            parts.read_only(directory)?;
        }
        if let Some(directory) = writable {
            parts.private(directory)?;
            for file in &self.written {
                parts.bind(file)?;
            }
        }
        Ok(())
    }

    /// `/dev`, `/proc` and `/sys`.
    fn kernel(&self, parts: &mut Parts) -> io::Result<()> {
        for directory in ["/dev", "/run", "/tmp"] {
            parts.tmpfs(directory)?;
        }
        let amd = self
            .operation
            .join("plugins")
            .join(crate::criu::plugins::AMD_PLUGIN);
        let amd = AMD_NODES.into_iter().filter(|_| amd.exists());
        for node in NODES.into_iter().chain(amd) {
            if Path::new(node).exists() {
                parts.bind(Path::new(node))?;
            }
        }
        let lock = Path::new("/run/xtables.lock");
        if lock.exists() {
            parts.bind(lock)?;
        }
        parts
            .mounts
            .push(("/proc".into(), Detached::of(Path::new("/proc"), false)?));
        for path in READ_ONLY {
            if Path::new(path).exists() {
                parts.limited(Path::new(path))?;
            }
        }
        let sysctls = Path::new("/proc/sys");
        let kernel = fs::read_dir(sysctls.join("kernel"))?.flatten();
        let kernel = kernel.map(|entry| entry.path()).filter(|path| {
            let name = path.file_name().unwrap_or_default().as_bytes();
            NAMESPACED_KERNEL
                .iter()
                .any(|n| name.starts_with(n.as_bytes()))
                || name == b"domainname"
        });
        for path in NAMESPACED
            .map(|n| sysctls.join(n))
            .into_iter()
            .chain(kernel)
        {
            if path.exists() {
                parts.bind(&path)?;
            }
        }
        self.cover(parts)?;
        parts.sysfs()
    }

    /// Covers every process. What CRIU opens in one by its path is there.
    fn cover(&self, parts: &mut Parts) -> io::Result<()> {
        let own = i32::try_from(std::process::id()).unwrap_or(0);
        let mut open: BTreeSet<i32> = BTreeSet::from([self.peer]);
        let namespaces = self.options.namespaces.iter();
        open.extend(namespaces.filter_map(|n| {
            n.file
                .strip_prefix("/proc/")?
                .split('/')
                .next()?
                .parse::<i32>()
                .ok()
        }));
        let pids = fs::read_dir("/proc")?.flatten();
        let pids = pids.filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok());
        for pid in pids.filter(|pid| *pid != own) {
            let at = PathBuf::from(format!("/proc/{pid}"));
            match open.contains(&pid) {
                true => parts
                    .mounts
                    .push((at, Detached::new(c"tmpfs", &[(c"mode", "755")])?)),
                false => parts.covered.push(at),
            }
        }
        let descriptors = [self.images, self.work].into_iter().flatten();
        for (fd, path) in descriptors {
            let link = format!("/proc/{}/fd/{fd}", self.peer);
            parts.links.push((path.clone(), link.into()));
        }
        Ok(())
    }

    /// Makes the root, and enters it.
    fn enter(&self, parts: Parts) -> io::Result<()> {
        let root = self.operation.join(NEW_ROOT);
        let none = None::<&str>;
        fs::create_dir_all(&root)?;
        mount(
            Some("cryopod"),
            &root,
            Some("tmpfs"),
            MsFlags::empty(),
            Some("mode=755"),
        )?;
        let old = root.join("old");
        fs::create_dir(&old)?;
        pivot_root(&root, &old).map_err(|e| at(Path::new("pivot"))(e.into()))?;
        chdir("/")?;
        umount2("/old", MntFlags::MNT_DETACH)?;
        fs::remove_dir("/old")?;
        parts.attach()?;
        close_directories()?;
        mount(
            none,
            "/",
            none,
            MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY,
            none,
        )?;
        Ok(())
    }
}

/// The path of `mnt[KEY]:PATH`.
fn external_source(value: &str) -> Option<PathBuf> {
    let (_, source) = value.strip_prefix("mnt[")?.rsplit_once("]:")?;
    Some(source.into())
}
