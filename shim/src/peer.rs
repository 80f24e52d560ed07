//! Identifies the process at the other end of a connection.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;
use std::{io, thread};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;

use cryopod_host::pidfd;

/// Returns the pid of the process that connected, or that began to listen.
pub fn pid(stream: &UnixStream) -> io::Result<i32> {
    Ok(getsockopt(stream, PeerCredentials)?.pid())
}

/// The process that connected.
pub struct PeerProcess(
    /// `None` if it has ended, or cannot be opened.
    Option<OwnedFd>,
);

impl PeerProcess {
    pub fn of(stream: &UnixStream) -> Self {
        pid(stream).map_or(Self(None), Self::with_pid)
    }

    pub fn with_pid(pid: i32) -> Self {
        Self(pidfd::open(pid).ok())
    }

    /// Waits for the process's end, at most for `limit`. Returns true if it has ended.
    pub fn ends_within(&self, limit: Duration) -> bool {
        let Some(process) = &self.0 else { return true };
        let mut polled = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
        let limit_ms = PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX);
        match poll(&mut polled, limit_ms) {
            Ok(ready) => ready > 0,
            Err(Errno::EINTR) => false,
            Err(_) => {
                thread::sleep(limit);
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn the_end_of_a_process() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let of_child = PeerProcess::with_pid(i32::try_from(child.id()).unwrap());
        assert!(!of_child.ends_within(Duration::from_millis(10)));
        child.kill().unwrap();
        assert!(of_child.ends_within(Duration::from_secs(60)));
        child.wait().unwrap();
        let (_own, stream) = UnixStream::pair().unwrap();
        assert!(!PeerProcess::of(&stream).ends_within(Duration::from_millis(10)));
        assert!(PeerProcess(None).ends_within(Duration::from_secs(60)));
    }
}
