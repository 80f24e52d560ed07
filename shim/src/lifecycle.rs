//! The actions that containerd calls: `start`, `delete`, `-info`.
//!
//! Each is the stock shim's, with the same arguments, and its answer is passed on. `start` puts our own process in
//! front of the shim it started (or found, for a further container of a pod); `delete` cleans up after both.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use containerd_shim::Flags;
use containerd_shim::api::{ConnectRequest, ConnectResponse, DeleteRequest, ShutdownRequest};
use containerd_shim::protos::protobuf::Message;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::address::{Address, Bootstrap};
use crate::bootstrap::Request;
use crate::options::{DEFAULT_LOW_LEVEL, DEFAULT_ROOT};
use crate::record::Record;
use crate::{Error, cleanup, criu, options, proxy, restore, rpc, stock};
use cryopod_host::cgroups::Cgroups;
use cryopod_host::files::Host;
use cryopod_host::spec::Spec;

/// The environment variable through which cryopod-runtime learns of its low-level runtime.
const LOW_LEVEL: &str = "CRYOPOD_LOW_LEVEL_RUNTIME";
/// The stock shim's address in a bundle, as containerd 1.7's writes it.
const ADDRESS: &str = "address";
/// The most that is read of standard input, as in the stock shim.
const MAX_INPUT_BYTES: u64 = 10 << 20;
/// How long a stock shim may take to get up; many at once take seconds.
const START: Duration = Duration::from_secs(10);
/// For calls on the way out; containerd gives `delete` five seconds in all.
const SHORT: Duration = Duration::from_secs(1);

/// `-info`: the stock shim's answer.
///
/// # Errors
/// [`Error`].
pub fn info(args: &[OsString]) -> Result<ExitCode, Error> {
    answer(&stock::run(args, &[], &stdin(true))?)
}

/// `start`: a stock shim, and ours in front of it.
///
/// # Errors
/// [`Error`]; a stock shim that was started is ended.
pub fn start(args: &[OsString], flags: &Flags) -> Result<ExitCode, Error> {
    let runtime = stock::runtime()?;
    let request = Request::read(&stdin(false), &flags.id, &flags.namespace);
    let wrong = |e: options::OptionsError| Error::Stock(e.to_string());
    let decoded = options::decode(request.options().as_ref()).map_err(wrong)?;
    let low_level = low_level(&decoded.binary_name, &runtime);
    let passed = request.with_options(&options::encode(&decoded).map_err(wrong)?);
    let env = [
        (LOW_LEVEL, low_level.as_os_str()),
        (stock::RUNTIME_ENV, runtime.as_os_str()),
    ];
    let said = stock::run(args, &env, &passed)?;
    let text = || String::from_utf8_lossy(&said.stdout).into_owned();
    if said.code != 0 {
        return Err(Error::Stock(text()));
    }
    let bootstrap = Bootstrap::read(&said.stdout).ok_or_else(|| Error::Address(text()))?;
    let record = Record {
        upstream: Address(bootstrap.address.clone()),
        address: Address::for_upstream(&Address(bootstrap.address.clone())),
        low_level: low_level.to_string_lossy().into_owned(),
        root: Some(decoded.root.clone()).filter(|r| !r.is_empty()),
    };
    lead_back(Path::new(ADDRESS), &record, flags);
    // containerd, which cannot reach what it is told, forgets it; one that is killed before would leave the stock shim.
    let up = || {
        front(&record, flags, &runtime, &decoded.shim_cgroup)?;
        let what = format!("{}: no answer from our process", record.address.0);
        connect(&record.address, flags, START).map_err(Error::io(what))
    };
    up().or_else(|_| up()).inspect_err(|_| {
        shut_down(&record.upstream, flags);
    })?;
    print(&bootstrap.with_address(&record.address.0))
}

/// containerd 1.7, started again, looks for its shims at the address that the stock shim has written into the bundle.
fn lead_back(file: &Path, record: &Record, flags: &Flags) {
    if !fs::read_to_string(file).is_ok_and(|a| a.trim() == record.upstream.0) {
        return;
    }
    // It reads that itself on its way up, to know which socket to remove in the end, and answers when it is up.
    if connect(&record.upstream, flags, START).is_err() {
        return;
    }
    let new = file.with_extension("new");
    let _ = fs::write(&new, &record.address.0).and_then(|()| fs::rename(&new, file));
}

/// Our process in front of the stock shim, unless it is there already.
fn front(record: &Record, flags: &Flags, runtime: &Path, cgroup: &str) -> Result<(), Error> {
    let at = |what: &str| format!("{}: {what}", record.address.0);
    record.write(Path::new(".")).map_err(Error::io(format!(
        "{}: cannot be written",
        crate::record::FILE
    )))?;
    let Some(listener) = record
        .address
        .listen()
        .map_err(Error::io(at("cannot listen")))?
    else {
        return Ok(());
    };
    let own = std::env::current_exe().map_err(Error::io("/proc/self/exe"))?;
    let mut command = Command::new(own);
    command
        .args(["-namespace", &flags.namespace, "-id", &flags.id])
        .args([
            "-address",
            &flags.address,
            "-socket",
            &record.upstream.0,
            "serve",
        ])
        .env(stock::RUNTIME_ENV, runtime)
        .env(LOW_LEVEL, &record.low_level)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0);
    if stock::in_place(std::env::args_os().next().as_deref()) {
        command.env(proxy::IN_PLACE, "1");
    }
    let fd = listener.as_raw_fd();
    // SAFETY: between fork and exec only dup2 and fcntl are called, which are async-signal-safe; the listener
    // lives until after spawn.
    unsafe {
        command.pre_exec(move || {
            // A listener that has the number already would lose it at exec.
            let done = match fd == proxy::LISTENER {
                true => libc::fcntl(fd, libc::F_SETFD, 0),
                false => libc::dup2(fd, proxy::LISTENER),
            };
            match done {
                -1 => Err(std::io::Error::last_os_error()),
                _ => Ok(()),
            }
        });
    }
    let child = command.spawn().map_err(|source| {
        record.address.remove();
        Error::Io {
            what: at("no process can be started for it"),
            source,
        }
    })?;
    settle(child.id(), cgroup);
    Ok(())
}

/// The place of a shim: its own cgroup if one is wanted, and an OOM score one above containerd's.
fn settle(pid: u32, cgroup: &str) {
    let parent = std::os::unix::process::parent_id();
    let score = fs::read_to_string(format!("/proc/{parent}/oom_score_adj"))
        .ok()
        .and_then(|s| s.trim().parse::<i32>().ok())
        .map_or(0, |s| (s + 1).min(1000));
    // A machine may forbid it; the stock shim's own failure to do so is told by the stock shim.
    let _ = fs::write(format!("/proc/{pid}/oom_score_adj"), score.to_string());
    if cgroup.is_empty() {
        return;
    }
    let cgroup = cgroup.trim_start_matches('/');
    let root = Path::new("/sys/fs/cgroup");
    let unified = root.join("cgroup.controllers").exists();
    let hierarchies = match unified {
        true => vec![root.to_owned()],
        false => fs::read_dir(root)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path())
            .collect(),
    };
    for hierarchy in hierarchies {
        let _ = fs::write(hierarchy.join(cgroup).join("cgroup.procs"), pid.to_string());
    }
}

/// `delete`: what is left of a container after its shim died, or could not start.
///
/// # Errors
/// [`Error`].
pub fn delete(args: &[OsString], flags: &Flags, bundle: &Path) -> Result<ExitCode, Error> {
    let record = Record::read(bundle);
    let low_level = record.as_ref().map_or(DEFAULT_LOW_LEVEL, |r| &r.low_level);
    let runtime = stock::runtime()?;
    let env = [
        (LOW_LEVEL, OsStr::new(low_level)),
        (stock::RUNTIME_ENV, runtime.as_os_str()),
    ];
    if let Some(record) = &record
        && end_abandoned(record, flags)
    {
        criu::end(&criu::directories(bundle, ""));
    }
    let said = stock::run(args, &env, &[])?;
    if !flags.id.is_empty() {
        let root = record.as_ref().and_then(|r| r.root.as_deref());
        let root = Path::new(root.unwrap_or(DEFAULT_ROOT)).join(&flags.namespace);
        cleanup::sweep(&root.join(&flags.id));
        if let Ok(spec) = Spec::of_bundle(bundle)
            && let Some(path) = spec.cgroup(&flags.id)
        {
            let _ = Cgroups::vacant(&Host::system(), path).remove(Duration::ZERO);
        }
    }
    if let Some(record) = record {
        // A container of a shim that goes on with others.
        let mut gone = DeleteRequest::new();
        gone.id = flags.id.clone();
        let _ = rpc::task_call(&record.upstream, &flags.namespace, "Delete", &gone, SHORT);
        shut_down(&record.upstream, flags);
        if record.address.connect().is_err() {
            record.address.remove();
        }
    }
    restore::remove(bundle);
    answer(&said)
}

/// Ends a stock shim whose front, our process, has died. containerd has lost all of its containers, and has each
/// deleted, as after the death of a shim of its own; a stock shim that outlives them would be asked nothing any more,
/// and in the middle of a checkpoint or a restore it would go on with what is being deleted.
/// `true` if its front has died.
fn end_abandoned(record: &Record, flags: &Flags) -> bool {
    if answers(&record.address, flags) {
        return false;
    }
    let pid = connect(&record.upstream, flags, SHORT).map(|answer| answer.shim_pid);
    let Some(pid) = pid
        .ok()
        .and_then(|p| i32::try_from(p).ok())
        .filter(|p| *p > 1)
    else {
        return true;
    };
    let pid = Pid::from_raw(pid);
    let _ = kill(pid, Signal::SIGKILL);
    for _ in 0..50 {
        if kill(pid, None).is_err() {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    // The runtimes that it ran end with it, one after the other.
    std::thread::sleep(Duration::from_millis(200));
    record.upstream.remove();
    true
}

/// Is there a process of ours behind an address? That it takes connections does not tell: a killed process closes its
/// sockets one after the other, and containerd, which has lost one, may have called us before the last.
fn answers(address: &Address, flags: &Flags) -> bool {
    match connect(address, flags, SHORT) {
        Ok(_) => true,
        // One that is slow is there, with all the containers that it has.
        Err(e) => matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
    }
}

fn connect(address: &Address, flags: &Flags, limit: Duration) -> std::io::Result<ConnectResponse> {
    let mut request = ConnectRequest::new();
    request.id = flags.id.clone();
    let response = rpc::task_call(address, &flags.namespace, "Connect", &request, limit)?;
    ConnectResponse::parse_from_bytes(&response.payload).map_err(std::io::Error::other)
}

fn shut_down(upstream: &Address, flags: &Flags) {
    let mut request = ShutdownRequest::new();
    request.id = flags.id.clone();
    let _ = rpc::task_call(upstream, &flags.namespace, "Shutdown", &request, SHORT);
}

/// The low-level runtime under cryopod-runtime: the one that the options name, unless they name cryopod-runtime
/// itself; what containerd's environment says; runc, as with the stock shim.
fn low_level(named: &str, runtime: &Path) -> OsString {
    let ours = Path::new(named).file_name() == runtime.file_name();
    if !named.is_empty() && !ours {
        return named.into();
    }
    std::env::var_os(LOW_LEVEL)
        .filter(|v| !v.is_empty())
        .unwrap_or_else(|| DEFAULT_LOW_LEVEL.into())
}

/// Standard input, bounded; empty if it is a terminal.
fn stdin(info: bool) -> Vec<u8> {
    use std::io::IsTerminal;
    let input = std::io::stdin();
    let mut bytes = Vec::new();
    if !(info && input.is_terminal()) {
        let _ = input.lock().take(MAX_INPUT_BYTES).read_to_end(&mut bytes);
    }
    bytes
}

fn answer(said: &stock::Answer) -> Result<ExitCode, Error> {
    print(&said.stdout)?;
    Ok(ExitCode::from(said.code))
}

fn print(bytes: &[u8]) -> Result<ExitCode, Error> {
    let mut out = std::io::stdout().lock();
    out.write_all(bytes)
        .and_then(|()| out.flush())
        .map_err(Error::io("standard output"))?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::thread;

    use super::*;

    #[test]
    fn a_socket_that_a_dying_process_has_yet_to_close_is_no_answer() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let address = Address(format!("unix://{}", path.display()));
        let flags = Flags {
            id: "c1".into(),
            namespace: "default".into(),
            ..Flags::default()
        };
        assert!(!answers(&address, &flags), "nobody");
        let listener = UnixListener::bind(&path).unwrap();
        let dying = thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            drop(listener);
        });
        assert!(!answers(&address, &flags), "it ends");
        dying.join().unwrap();
        std::fs::remove_file(&path).unwrap();
        let _slow = UnixListener::bind(&path).unwrap();
        assert!(answers(&address, &flags), "it is slow, but there");
    }

    #[test]
    fn the_runtime_that_the_options_name_goes_under_ours() {
        let runtime = Path::new("/usr/bin/cryopod-runtime");
        assert_eq!(low_level("crun", runtime), "crun");
        assert_eq!(
            low_level("/opt/nvidia-container-runtime", runtime),
            "/opt/nvidia-container-runtime"
        );
        assert_eq!(low_level("", runtime), "runc");
        assert_eq!(low_level("/x/cryopod-runtime", runtime), "runc");
    }
}
