//! Implements the containerd shim `io.containerd.cryopod.v2`.
//!
//! It does not run containers itself. containerd's own `containerd-shim-runc-v2` does, with `cryopod-runtime` as its
//! OCI runtime. So exec, terminals, logging drivers, OOM events and statistics are the stock shim's. This program
//! stands between containerd and that shim's socket:
//!
//! ```text
//! containerd ──ttrpc──> containerd-shim-cryopod-v2 ──ttrpc──> containerd-shim-runc-v2 ──> cryopod-runtime ──> runc
//! ```
//!
//! - [`lifecycle`]: runs the actions that containerd calls (`start`, `delete`, `-info`) through the stock shim.
//! - [`proxy`]: forwards frames unchanged, except the calls that [`task`] changes.
//! - [`task`]: changes `Create` and other calls; [`container`].
//! - [`restore`]: prepares a container from a checkpoint until it runs; [`cleanup`], [`criu`] clean up if it never does.
//! - [`bootstrap`]: reads what containerd sends to `start`, before and since its version 2.3.
//! - [`options`]: converts the runtime options of containerd, its CRI and docker to the stock shim's.
//! - [`ttrpc`]: implements the part of ttrpc that a proxy needs.
//! - `peer`: identifies containerd's process, and the stock shim's.
//! - [`record`]: keeps socket addresses in the bundle.

pub mod bootstrap;
pub mod cleanup;
pub mod container;
pub mod criu;
pub mod lifecycle;
pub mod options;
mod peer;
pub mod proxy;
pub mod record;
pub mod restore;
pub mod stock;
pub mod task;
mod threads;
pub mod ttrpc;

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use cryopod_host::processes::signals::keep_children;

/// Errors before the shim serves.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "containerd-shim-cryopod-v2: {0}; it is started by containerd, as runtime io.containerd.cryopod.v2"
    )]
    Usage(String),
    #[error(
        "containerd-shim-runc-v2 was not found beside this program or on PATH; install containerd's own shim, or name it in the environment variable {}",
        stock::ENV
    )]
    NoStockShim,
    #[error(
        "cryopod-runtime was not found beside this program or on PATH; install it, or name it in the environment variable {}",
        stock::RUNTIME_ENV
    )]
    NoRuntime,
    /// The stock shim failed; this is its own message.
    #[error("{0}")]
    Stock(String),
    #[error("containerd-shim-runc-v2 answered {0:?} to `start`, which is no address")]
    Address(String),
    #[error("{what}: {source}")]
    Io { what: String, source: io::Error },
}

impl Error {
    /// Returns a function that adds to an I/O error what could not be done.
    pub fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}

/// Runs the program. `args` lacks the program's name.
pub fn main(args: Vec<OsString>) -> ExitCode {
    keep_children();
    match run(&args) {
        Ok(code) => code,
        Err(e) => {
            // containerd shows what a shim writes to standard error.
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &[OsString]) -> Result<ExitCode, Error> {
    if args == ["hold"] {
        return restore::holder::main();
    }
    let flags = containerd_shim::parse(args).map_err(|e| Error::Usage(e.to_string()))?;
    if flags.version {
        println!("containerd-shim-cryopod-v2 {}", env!("CARGO_PKG_VERSION"));
        return Ok(ExitCode::SUCCESS);
    }
    match flags.action.as_str() {
        _ if flags.info => lifecycle::info(args),
        "start" => lifecycle::start(args, &flags),
        "delete" => lifecycle::delete(args, &flags, &bundle(&flags.bundle)),
        "serve" => proxy::main(&flags.socket, &flags.namespace),
        other => Err(Error::Usage(format!("unknown action {other:?}"))),
    }
}

fn bundle(flag: &str) -> PathBuf {
    if flag.is_empty() {
        ".".into()
    } else {
        flag.into()
    }
}
