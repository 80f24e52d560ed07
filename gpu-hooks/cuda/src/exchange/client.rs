//! Connects the plugin to the agent. No call blocks longer than its limit, and a lost agent never raises SIGPIPE in
//! CRIU.

use crate::messages::protocol::{FrameError, LineBuffer, Op, Reply, Request, encode};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{self, MsgFlags};
use std::io::{ErrorKind, Read};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long a write may take: the agent always reads.
const SEND_LIMIT: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("{0}")]
    Io(#[from] std::io::Error),
    #[error("the driver agent ended unexpectedly")]
    Closed,
    #[error("{0}")]
    Frame(#[from] FrameError),
    #[error("the driver agent did not answer within {0:.1} s")]
    Silent(f64),
}

impl ClientError {
    /// Returns true if the agent has ended: it undoes nothing any more.
    pub fn is_end(&self) -> bool {
        matches!(self, Self::Closed | Self::Io(_))
    }
}

#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    buffer: LineBuffer,
    next_id: u64,
}

impl Client {
    pub fn connect(path: &Path) -> Result<Self, ClientError> {
        let stream = UnixStream::connect(path)?;
        stream.set_nonblocking(true)?;
        Ok(Self {
            stream,
            buffer: LineBuffer::default(),
            next_id: 1,
        })
    }

    /// The socket, to poll beside others.
    pub fn fd(&self) -> BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&self.stream)
    }

    pub fn send(&mut self, op: Op) -> Result<u64, ClientError> {
        let id = self.next_id;
        self.next_id += 1;
        let line = encode(&Request { id, request: op })?;
        let deadline = Instant::now() + SEND_LIMIT;
        let mut rest = &line[..];
        while !rest.is_empty() {
            match socket::send(self.stream.as_raw_fd(), rest, MsgFlags::MSG_NOSIGNAL) {
                Ok(sent) => rest = &rest[sent..],
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => {
                    if Instant::now() >= deadline {
                        return Err(ClientError::Silent(SEND_LIMIT.as_secs_f64()));
                    }
                    self.wait(PollFlags::POLLOUT, Duration::from_millis(50))?;
                }
                Err(Errno::EPIPE) => return Err(ClientError::Closed),
                Err(error) => return Err(std::io::Error::from(error).into()),
            }
        }
        Ok(id)
    }

    /// Returns the next reply, waiting at most `limit`; `None` if none came, or a signal did.
    pub fn receive(&mut self, limit: Duration) -> Result<Option<Reply>, ClientError> {
        if let Some(reply) = self.buffer.next_message()? {
            return Ok(Some(reply));
        }
        self.wait(PollFlags::POLLIN, limit)?;
        let mut bytes = [0u8; 4096];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => return Err(ClientError::Closed),
                Ok(count) => {
                    self.buffer.push(&bytes[..count]);
                    if let Some(reply) = self.buffer.next_message()? {
                        return Ok(Some(reply));
                    }
                }
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock | ErrorKind::Interrupted => return Ok(None),
                    ErrorKind::ConnectionReset => return Err(ClientError::Closed),
                    _ => return Err(error.into()),
                },
            }
        }
    }

    /// Sends one request and waits for its reply; other replies are dropped.
    pub fn call(&mut self, op: Op, limit: Duration) -> Result<Reply, ClientError> {
        let id = self.send(op)?;
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.receive(left)? {
                Some(reply) if reply.id == id => return Ok(reply),
                Some(_) => {}
                None if left.is_zero() => return Err(ClientError::Silent(limit.as_secs_f64())),
                None => {}
            }
        }
    }

    fn wait(&self, events: PollFlags, limit: Duration) -> Result<(), ClientError> {
        let limit = PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(self.fd(), events)], limit) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(error) => Err(std::io::Error::from(error).into()),
        }
    }
}
