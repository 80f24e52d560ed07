//! Runs the agent as a server: accepts connections, answers requests, and settles the processes when a connection has
//! ended.
//!
//! A connection has ended when its socket is closed or the process at its other end has ended: CRIU's children inherit
//! the socket, so it may be closed late.
//!
//! When `stop` is set (the wrapper closed our stdin, or died), no further connection is accepted. Open ones are served
//! to their end: CRIU may well outlive the wrapper, and a process must not be put back in the middle of its dump.

use crate::agent::{Agent, Begun, Limits};
use crate::driver::Driver;
use crate::messages::protocol::{Hello, LineBuffer, Op, Outcome, Reply, Request, Work, encode};
use crate::messages::report::{AgentOutcome, AgentReport};
use cryopod_host::pidfd;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;

pub struct Server<D> {
    pub agent: Arc<Agent<D>>,
    pub hello: Hello,
    pub report: Option<PathBuf>,
    pub limits: Limits,
}

/// Listens on a socket that only its owner can reach.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    use std::os::unix::fs::PermissionsExt;
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

impl<D: Driver> Server<D> {
    /// Serves until `stop` is readable or closed and no connection is left. Returns the worst outcome of all
    /// connections.
    pub fn run(
        self: Arc<Self>,
        listener: &UnixListener,
        stop: BorrowedFd<'_>,
    ) -> io::Result<AgentOutcome> {
        let mut connections = Vec::new();
        loop {
            let ready = poll_in([Some(listener.as_fd()), Some(stop)])?;
            if ready[0] {
                match listener.accept() {
                    Ok((stream, _)) => {
                        let server = Arc::clone(&self);
                        let name = "connection".to_owned();
                        let thread = std::thread::Builder::new()
                            .name(name)
                            .spawn(move || server.connection(stream))?;
                        connections.push(thread);
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => tracing::warn!("accept: {error}"),
                }
            } else if ready[1] && at_end(stop)? {
                break;
            }
        }
        let mut worst = AgentOutcome::Clean;
        for thread in connections {
            let outcome = thread.join().unwrap_or(AgentOutcome::RollbackFailed);
            worst = worst.max(outcome);
        }
        self.agent.vram_files().settle();
        Ok(worst)
    }

    fn connection(self: Arc<Self>, stream: UnixStream) -> AgentOutcome {
        let mut end = ConnectionEnd::default();
        if let Err(error) = self.serve(&stream, &mut end) {
            tracing::warn!("connection: {error}");
        }
        drop(stream);
        if !end.worked {
            return AgentOutcome::Clean;
        }
        let begin = |report: &AgentReport| self.write_report(report);
        let report = self.agent.settle(end.committed, self.limits, begin);
        self.write_report(&report);
        report.outcome
    }

    fn serve(self: &Arc<Self>, stream: &UnixStream, end: &mut ConnectionEnd) -> io::Result<()> {
        stream.set_nonblocking(false)?;
        let peer = peer_process(stream);
        let writer = Arc::new(Mutex::new(stream.try_clone()?));
        let mut buffer = LineBuffer::default();
        let mut bytes = [0u8; 16 * 1024];
        loop {
            let ready = poll_in([Some(stream.as_fd()), peer.as_ref().map(OwnedFd::as_fd)])?;
            if !ready[0] {
                // Everything that was sent has been read and the other process has ended.
                return Ok(());
            }
            let mut reader = stream;
            let count = match reader.read(&mut bytes) {
                Ok(0) => return Ok(()),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            buffer.push(&bytes[..count]);
            while let Some(request) = buffer.next_message::<Request>().map_err(io::Error::other)? {
                self.handle(request, &writer, end)?;
            }
        }
    }

    fn handle(
        self: &Arc<Self>,
        request: Request,
        writer: &Arc<Mutex<UnixStream>>,
        end: &mut ConnectionEnd,
    ) -> io::Result<()> {
        let Request { id, request: op } = request;
        tracing::debug!(id, ?op);
        let answer = |outcome| {
            let micros = 0;
            let reply = Reply {
                id,
                micros,
                outcome,
            };
            send(writer, &reply);
        };
        match op {
            Op::Hello => answer(Outcome::Hello(self.hello.clone())),
            Op::Keep => {
                end.worked = false;
                self.agent.keep();
                answer(Outcome::Done);
            }
            Op::Commit => {
                end.committed = true;
                answer(Outcome::Done);
            }
            // Nobody waits for its answer. Begun after a later request has said what is complete, it would never hear of
            // that, and would remove what is written by then.
            Op::VramWriteAhead { .. } => {
                let outcome = self.agent.vram_files().perform(&op);
                answer(outcome.unwrap_or(Outcome::Done));
            }
            op => {
                let changes = op.work() == Work::Changes;
                end.worked |= changes || matches!(op, Op::NcclDown { .. });
                let start = Instant::now();
                let (agent, writer) = (Arc::clone(&self.agent), Arc::clone(writer));
                // Begun here, so that the end of the connection, read next, finds the process busy.
                let begun = changes.then(|| agent.begin(&op));
                std::thread::Builder::new()
                    .name("request".into())
                    .spawn(move || {
                        let outcome = match begun {
                            Some(begun) => begun.map_or_else(Outcome::Error, Begun::wait),
                            None => (agent.vram_files().perform(&op))
                                .or_else(|| agent.preloads().perform(&op, agent.vram_files()))
                                .or_else(|| agent.communicators().perform(&op))
                                .unwrap_or_else(|| agent.perform(&op)),
                        };
                        let micros = cryopod_host::micros(start.elapsed());
                        if let Outcome::Error(error) = &outcome {
                            tracing::info!(op = op.name(), pid = op.pid(), "{error}");
                        }
                        send(
                            &writer,
                            &Reply {
                                id,
                                micros,
                                outcome,
                            },
                        );
                    })?;
            }
        }
        Ok(())
    }

    fn write_report(&self, report: &AgentReport) {
        let Some(path) = &self.report else { return };
        if let Err(error) = crate::write_json(path, report) {
            tracing::error!("cannot write {}: {error}", path.display());
        }
    }
}

#[derive(Default)]
struct ConnectionEnd {
    committed: bool,
    /// True if it asked for anything but information.
    worked: bool,
}

fn send(writer: &Mutex<UnixStream>, reply: &Reply) {
    let line = match encode(reply) {
        Ok(line) => line,
        Err(error) => return tracing::error!("reply {}: {error}", reply.id),
    };
    let mut stream = writer
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Err(error) = stream.write_all(&line) {
        tracing::debug!("reply {}: {error}", reply.id);
    }
}

/// Opens a descriptor that becomes readable when the process at the other end ends.
fn peer_process(stream: &UnixStream) -> Option<OwnedFd> {
    let peer = getsockopt(stream, PeerCredentials).ok()?;
    pidfd::open(peer.pid()).ok()
}

/// Waits until one of these is readable or at its end; returns which are. `None` never is.
fn poll_in(fds: [Option<BorrowedFd<'_>>; 2]) -> io::Result<[bool; 2]> {
    let mut polls: Vec<PollFd<'_>> = fds
        .iter()
        .flatten()
        .map(|fd| PollFd::new(*fd, PollFlags::POLLIN))
        .collect();
    loop {
        match poll(&mut polls, PollTimeout::NONE) {
            Ok(_) => break,
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let mut ready = polls.iter().map(|one| one.any().unwrap_or(true));
    Ok(fds.map(|fd| fd.is_some() && ready.next().unwrap_or(false)))
}

/// Reads what is there; true at the end of the stream.
fn at_end(stop: BorrowedFd<'_>) -> io::Result<bool> {
    let mut file = std::fs::File::from(stop.as_fd().try_clone_to_owned()?);
    Ok(file.read(&mut [0u8; 256])? == 0)
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
