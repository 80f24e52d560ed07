//! The device server: the GPUs, their memory, and the switches that make the driver misbehave.
//!
//! One thread a connection. A client process holds one connection while it has device memory; a
//! caller of the checkpoint API holds one for the length of a call; both are known by the pid that
//! the kernel reports for the peer, so that pid and mount namespaces do not matter as long as the
//! server runs on the outside.

pub mod config;
pub mod control;
pub mod events;
pub mod faults;
pub mod session;
pub mod tree;
pub mod world;

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use anyhow::{Context, Result};

use self::config::Config;
use self::events::Events;
use self::world::World;

/// Where the server listens unless told otherwise; also where libcuda looks.
pub const DEFAULT_SOCKET: &str = "/run/cusim/server.sock";

pub struct Server {
    world: Mutex<World>,
    /// Pids with a call of the checkpoint API under way: one call at a time each.
    calls: Mutex<Vec<i32>>,
    calls_changed: Condvar,
    pub events: Events,
}

impl Server {
    /// A server with the GPUs of this configuration.
    pub fn new(config: Config, events: Events) -> Arc<Self> {
        Arc::new(Self {
            world: Mutex::new(World::new(config)),
            calls: Mutex::new(Vec::new()),
            calls_changed: Condvar::new(),
            events,
        })
    }

    /// The shared state. A thread that panicked with it held leaves it usable.
    pub fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no other call on `pid` is under way, and takes the place.
    fn call_begin(&self, pid: i32) {
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        while calls.contains(&pid) {
            calls = self
                .calls_changed
                .wait(calls)
                .unwrap_or_else(PoisonError::into_inner);
        }
        calls.push(pid);
    }

    fn call_end(&self, pid: i32) {
        self.calls
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|p| *p != pid);
        self.calls_changed.notify_all();
    }

    /// Serves the driver socket and the control socket, for as long as the process lives.
    pub fn serve(self: &Arc<Self>, socket: &Path) -> Result<()> {
        let driver = listen(socket)?;
        let control = listen(&control_socket(socket))?;
        let server = Arc::clone(self);
        thread::spawn(move || {
            accept(&control, move |s| control::serve(&server, &s));
        });
        self.events
            .write("ready", serde_json::json!({ "socket": socket }));
        let server = Arc::clone(self);
        accept(&driver, move |s| session::serve(&server, s));
        Ok(())
    }
}

/// The control socket that goes with a driver socket.
pub fn control_socket(socket: &Path) -> PathBuf {
    let mut name = socket.as_os_str().to_owned();
    name.push(".ctl");
    PathBuf::from(name)
}

/// A listening socket that every user may connect to; one left behind by a dead server is replaced.
fn listen(path: &Path) -> Result<UnixListener> {
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    }
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            return Err(e).with_context(|| format!("cannot replace {}", path.display()));
        }
        _ => {}
    }
    let listener =
        UnixListener::bind(path).with_context(|| format!("cannot listen on {}", path.display()))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o666))
        .with_context(|| format!("cannot open {} to all users", path.display()))?;
    Ok(listener)
}

/// Hands every connection to a thread of its own.
fn accept<F: Fn(UnixStream) + Clone + Send + 'static>(listener: &UnixListener, f: F) {
    for stream in listener.incoming().flatten() {
        let f = f.clone();
        thread::spawn(move || f(stream));
    }
}
