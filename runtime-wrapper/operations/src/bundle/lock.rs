//! The lock of a bundle.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use crate::error::Error;

/// The lock of a bundle: whoever works at a container, has it. So a failed operation cleans up only its own work. A process
/// that goes on with the work when its operation was killed has the lock, too ([`BundleLock::share`]): a restore's guard
/// removes the container, a checkpoint's driver agent brings the GPU memory back. Nothing else begins before.
#[derive(Debug, Default)]
pub struct BundleLock(Option<Flock<File>>);

impl BundleLock {
    /// Takes the lock, which a file system without locks does not have.
    ///
    /// A restore waits with `patience` for a guard to remove the container: its engine starts a container once, perhaps
    /// with nobody there to repeat it. So does a stop. Another checkpoint has none: whoever wants it can ask again.
    ///
    /// # Errors
    /// Another process has it: `refused` says what is refused.
    pub fn take(
        bundle: &Path,
        patience: Duration,
        refused: impl FnOnce() -> String,
    ) -> Result<Self, Error> {
        let Ok(mut directory) = File::open(bundle) else {
            // The reader of the spec reports this error better.
            return Ok(Self(None));
        };
        let until = Instant::now() + patience;
        loop {
            match Flock::lock(directory, FlockArg::LockExclusiveNonblock) {
                Ok(held) => return Ok(Self(Some(held))),
                Err((same, Errno::EWOULDBLOCK)) if Instant::now() < until => directory = same,
                Err((_, Errno::EWOULDBLOCK)) => return Err(Error::untouched(refused())),
                Err((_, error)) => {
                    tracing::debug!("{}: not locked: {error}", bundle.display());
                    return Ok(Self(None));
                }
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns a descriptor for a process that goes on with the work when this one was killed. If this one drops the lock,
    /// it is free for all.
    pub fn share(&self) -> Option<OwnedFd> {
        self.0.as_ref()?.as_fd().try_clone_to_owned().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_operation_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let take = |path: &Path| BundleLock::take(path, Duration::ZERO, || "another one".into());
        let held = take(dir.path()).unwrap();
        let shared = held.share();
        let error = take(dir.path()).unwrap_err().to_string();
        assert!(error.contains("another one"), "{error}");
        drop(held);
        assert!(shared.is_some() && take(dir.path()).unwrap().share().is_some());
        assert!(take(&dir.path().join("none")).unwrap().share().is_none());
    }
}
