//! The process that stays, between containerd and the stock shim.
//!
//! For each connection of containerd's there is one to the stock shim, and a thread in each direction. Frames pass
//! as they are: only requests are looked at, and of those only the ones that [`crate::task`] changes are decoded. A
//! third connection to the stock shim, on which nothing is said, tells when that shim ends; then this process does.

use std::io::{self, Read};
use std::net::Shutdown;
use std::os::fd::{FromRawFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use containerd_shim::protos::protobuf::Message;
use containerd_shim::protos::ttrpc::proto::MESSAGE_TYPE_RESPONSE;
use containerd_shim::protos::ttrpc::{Code, Request};

use crate::address::Address;
use crate::frame::Frame;
use crate::task::{self, Fate};
use crate::{Error, rpc, stock};

/// The number under which `start` hands over the listening socket.
pub const LISTENER: RawFd = 3;
/// Threads here read and write frames; their stacks need not be large.
const STACK_BYTES: usize = 256 << 10;
/// How long the last answers of a stock shim that ends may take to get to containerd.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Serves until the stock shim ends.
///
/// # Errors
/// [`Error`]: the stock shim is not there.
pub fn main(upstream: &str) -> Result<ExitCode, Error> {
    let upstream = Address(upstream.to_owned());
    let ours = Address::for_upstream(&upstream);
    let runtime = stock::runtime()?;
    // SAFETY: `start`, the only caller of this action, put the listening socket there, and nothing else owns it.
    let listener = unsafe { UnixListener::from_raw_fd(LISTENER) };
    let watched = upstream.connect().map_err(|source| {
        ours.remove();
        Error::Io {
            what: format!("{}: the stock shim does not answer", upstream.0),
            source,
        }
    })?;
    let open = Arc::new(AtomicUsize::new(0));
    let server = Server {
        upstream,
        runtime,
        open: Arc::clone(&open),
    };
    spawn("accept", move || server.accept(&listener)).map_err(Error::io("threads"))?;
    wait_for_end(watched);
    ours.remove();
    let until = Instant::now() + LAST_WORDS;
    while open.load(Ordering::Acquire) > 0 && Instant::now() < until {
        thread::sleep(Duration::from_millis(5));
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns when the other side closes.
fn wait_for_end(mut stream: UnixStream) {
    let mut byte = [0u8; 64];
    loop {
        match stream.read(&mut byte) {
            Ok(0) => return,
            Err(e) if e.kind() != io::ErrorKind::Interrupted => return,
            _ => {}
        }
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new()
        .name(name.into())
        .stack_size(STACK_BYTES)
        .spawn(work)
        .map(drop)
}

struct Server {
    upstream: Address,
    runtime: PathBuf,
    open: Arc<AtomicUsize>,
}

impl Server {
    fn accept(&self, listener: &UnixListener) {
        for client in listener.incoming() {
            // Too many open files, at worst: containerd tries again.
            let Ok(client) = client else {
                thread::sleep(Duration::from_millis(20));
                continue;
            };
            if let Err(e) = self.serve(client) {
                eprintln!("cryopod: a connection of containerd's: {e}");
            }
        }
    }

    fn serve(&self, client: UnixStream) -> io::Result<()> {
        let stock = self.upstream.connect()?;
        let answers = (
            stock.try_clone()?,
            Arc::new(Mutex::new(client.try_clone()?)),
        );
        let to_client = Arc::clone(&answers.1);
        let runtime = self.runtime.clone();
        let open = Arc::clone(&self.open);
        open.fetch_add(1, Ordering::AcqRel);
        spawn("answers", move || {
            let (mut from, to) = answers;
            let _ = pump_answers(&mut from, &to);
            // The stock shim is gone: so are we, as far as containerd is concerned.
            let _ = lock(&to).shutdown(Shutdown::Both);
            open.fetch_sub(1, Ordering::AcqRel);
        })
        .inspect_err(|_| {
            self.open.fetch_sub(1, Ordering::AcqRel);
        })?;
        spawn("requests", move || {
            let (mut from, mut to) = (client, stock);
            let _ = pump_requests(&mut from, &mut to, &to_client, &runtime);
            // No more requests: what is under way still gets its answer.
            let _ = to.shutdown(Shutdown::Write);
        })
    }
}

fn lock(stream: &Mutex<UnixStream>) -> std::sync::MutexGuard<'_, UnixStream> {
    stream.lock().unwrap_or_else(PoisonError::into_inner)
}

fn pump_answers(from: &mut UnixStream, to: &Mutex<UnixStream>) -> io::Result<()> {
    while let Some(frame) = Frame::read(from)? {
        frame.write(&mut *lock(to))?;
    }
    Ok(())
}

fn pump_requests(
    from: &mut UnixStream,
    to: &mut UnixStream,
    answers: &Mutex<UnixStream>,
    runtime: &Path,
) -> io::Result<()> {
    while let Some(mut frame) = Frame::read(from)? {
        if frame.is_request() {
            let fate = match Request::parse_from_bytes(&frame.body) {
                Ok(request) => task::request(&request, runtime),
                // Not for us to judge.
                Err(_) => Fate::Pass,
            };
            match fate {
                Fate::Pass => {}
                Fate::Changed(request) => {
                    frame.body = request.write_to_bytes().map_err(io::Error::other)?
                }
                Fate::Answered(response) => {
                    frame.header.type_ = MESSAGE_TYPE_RESPONSE;
                    frame.header.flags = 0;
                    frame.body = response
                        .write_to_bytes()
                        .or_else(|e| rpc::failure(Code::INTERNAL, e.to_string()).write_to_bytes())
                        .map_err(io::Error::other)?;
                    frame.write(&mut *lock(answers))?;
                    continue;
                }
            }
        }
        frame.write(to)?;
    }
    Ok(())
}
