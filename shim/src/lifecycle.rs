//! Runs the actions that containerd calls: `start`, `delete`, `-info`.
//!
//! Each runs the stock shim with the same arguments, and passes on its answer. `start` puts our own process in front of
//! the stock shim, which it has started or, for a further container of a pod, found. `delete` cleans up after both.

use std::ffi::OsString;
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
use containerd_shim::protos::protobuf::well_known_types::any::Any;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::bootstrap::StartRequest;
use crate::options::{DEFAULT_ROOT, OptionsError};
use crate::record::Record;
use crate::ttrpc::address::{Address, Bootstrap};
use crate::{Error, cleanup, criu, options, proxy, restore, stock, ttrpc::rpc};
use cryopod_host::cgroups::Cgroups;
use cryopod_host::files::Host;
use cryopod_host::spec::Spec;

/// The stock shim's address in a bundle, as containerd 1.7's writes it.
const ADDRESS: &str = "address";
/// Most bytes of standard input that are read, as in the stock shim.
const MAX_INPUT_BYTES: u64 = 10 << 20;
/// Time limit for a stock shim to start; many at once take seconds.
const START: Duration = Duration::from_secs(10);
/// Time limit for calls during a shutdown; containerd gives `delete` five seconds in all.
const SHORT: Duration = Duration::from_secs(1);

/// Prints the stock shim's answer to `-info`.
pub fn info(args: &[OsString]) -> Result<ExitCode, Error> {
    let mut passed = stdin(true);
    // Nothing means no options, and the stock shim judges what is no `Any`.
    if !passed.is_empty()
        && let Ok(given) = Any::parse_from_bytes(&passed)
    {
        let encoded = options::decode(Some(&given)).and_then(|o| options::encode(&o));
        passed = encoded
            .map_err(wrong_options)?
            .write_to_bytes()
            .map_err(|e| Error::Stock(e.to_string()))?;
    }
    answer(&stock::run(args, &[], &passed)?)
}

fn wrong_options(e: OptionsError) -> Error {
    Error::Stock(e.to_string())
}

/// Starts a stock shim, and our process in front of it. After an error it ends a stock shim that it started.
pub fn start(args: &[OsString], flags: &Flags) -> Result<ExitCode, Error> {
    let runtime = stock::runtime()?;
    let request = StartRequest::read(&stdin(false), &flags.id, &flags.namespace);
    let decoded = options::decode(request.options().as_ref()).map_err(wrong_options)?;
    let low_level = low_level(&decoded.binary_name, &runtime);
    let passed = request.with_options(&options::encode(&decoded).map_err(wrong_options)?);
    let env = [
        (stock::LOW_LEVEL_ENV, low_level.as_os_str()),
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
    // containerd forgets an address that it cannot reach. If killed before, it would leave the stock shim behind.
    let up = || {
        front(&record, flags, &runtime, &decoded.shim_cgroup)?;
        let what = format!("{}: no answer from our process", record.address.0);
        connect(&record.address, flags, START).map_err(Error::io(what))
    };
    up().or_else(|_| up()).inspect_err(|_| {
        shut_down(&record.upstream, flags);
    })?;
    // containerd may have died, and knows of no shim that it has to end.
    print(&bootstrap.with_address(&record.address.0)).inspect_err(|_| {
        shut_down(&record.upstream, flags);
    })
}

/// Points the bundle's address file to our socket: containerd 1.7 looks there for its shims after its own restart.
fn lead_back(file: &Path, record: &Record, flags: &Flags) {
    if !fs::read_to_string(file).is_ok_and(|a| a.trim() == record.upstream.0) {
        return;
    }
    // The stock shim reads the file itself while starting, to know which socket to remove at its end. It answers once
    // it is up.
    if connect(&record.upstream, flags, START).is_err() {
        return;
    }
    let new = file.with_extension("new");
    let _ = fs::write(&new, &record.address.0).and_then(|()| fs::rename(&new, file));
}

/// Starts our process in front of the stock shim, unless it exists already.
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
        .env(stock::LOW_LEVEL_ENV, &record.low_level)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0);
    if stock::in_place(std::env::args_os().next().as_deref()) {
        command.env(proxy::IN_PLACE, "1");
    }
    let fd = listener.as_raw_fd();
    // SAFETY: between fork and exec only dup2 and fcntl are called, which are async-signal-safe; the listener lives
    // until after spawn.
    unsafe {
        command.pre_exec(move || {
            // A listener that already has this number would be closed at exec.
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

/// Moves a shim to its own cgroup if requested, and sets its OOM score to containerd's plus one.
fn settle(pid: u32, cgroup: &str) {
    let parent = std::os::unix::process::parent_id();
    let score = fs::read_to_string(format!("/proc/{parent}/oom_score_adj"))
        .ok()
        .and_then(|s| s.trim().parse::<i32>().ok())
        .map_or(0, |s| (s + 1).min(1000));
    // The host may forbid it. The stock shim reports its own failure to do so.
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

/// Removes what is left of a container whose shim died or could not start.
pub fn delete(args: &[OsString], flags: &Flags, bundle: &Path) -> Result<ExitCode, Error> {
    let record = Record::read(bundle);
    let low_level = record.as_ref().map(|r| OsString::from(&r.low_level));
    let low_level = low_level.unwrap_or_else(stock::inherited_low_level);
    let runtime = stock::runtime()?;
    let env = [
        (stock::LOW_LEVEL_ENV, low_level.as_os_str()),
        (stock::RUNTIME_ENV, runtime.as_os_str()),
    ];
    if let Some(record) = &record
        && end_abandoned(record, flags)
    {
        criu::end(&criu::directories(bundle, ""));
    }
    // containerd died before the container was created. Without this file, which `create` writes, the stock shim refuses, and
    // the bundle stays.
    let file = bundle.join("runtime");
    if !flags.id.is_empty() && !file.exists() {
        let _ = fs::write(file, runtime.as_os_str().as_encoded_bytes());
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
        // The shim continues with other containers.
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

/// Ends a stock shim if our process in front of it has died. Returns `true` if it has.
///
/// containerd has then lost all of its containers and deletes each, as after the death of any shim. A stock shim that
/// outlives them would get no more requests. In the middle of a checkpoint or a restore it would continue with a
/// container that is being deleted.
fn end_abandoned(record: &Record, flags: &Flags) -> bool {
    if answers(&record.address, flags, SHORT) {
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
    // Its runtimes exit after it, one after the other.
    std::thread::sleep(Duration::from_millis(200));
    record.upstream.remove();
    true
}

/// Returns true if a process of ours answers at an address. Accepted connections prove nothing: a killed process closes
/// its sockets one after the other. containerd may call us when only the first is closed.
fn answers(address: &Address, flags: &Flags, limit: Duration) -> bool {
    match connect(address, flags, limit) {
        Ok(_) => true,
        // A slow process is still there, with all of its containers.
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

/// Returns the low-level runtime under cryopod-runtime: the one in the options unless that is cryopod-runtime itself;
/// else the one in containerd's environment; else runc, as with the stock shim.
fn low_level(named: &str, runtime: &Path) -> OsString {
    let ours = Path::new(named).file_name() == runtime.file_name();
    if !named.is_empty() && !ours {
        return named.into();
    }
    stock::inherited_low_level()
}

/// Reads standard input, bounded; empty if it is a terminal.
fn stdin(info: bool) -> Vec<u8> {
    use std::io::IsTerminal;
    let input = std::io::stdin();
    let mut bytes = Vec::new();
    if !(info && input.is_terminal()) {
        let _ = input.lock().take(MAX_INPUT_BYTES).read_to_end(&mut bytes);
    }
    bytes
}

fn answer(said: &stock::StockAnswer) -> Result<ExitCode, Error> {
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
        assert!(!answers(&address, &flags, SHORT), "nobody");
        let listener = UnixListener::bind(&path).unwrap();
        let dying = thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            drop(listener);
        });
        let long = Duration::from_secs(60);
        assert!(!answers(&address, &flags, long), "it ends");
        dying.join().unwrap();
        std::fs::remove_file(&path).unwrap();
        let _slow = UnixListener::bind(&path).unwrap();
        assert!(answers(&address, &flags, SHORT), "it is slow, but there");
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
