//! Holds a network namespace for a container that is not restored yet.
//!
//! docker (28 and newer) connects a container to its networks between Create and Start, through the namespace of the
//! process in the Create response. A container from a checkpoint has no process before Start. So a process of ours
//! holds a new network namespace until then, and the restore goes into it. The namespace stays mounted in the bundle as
//! long as the container exists: the runtime asks for it again at the next checkpoint.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};

use cryopod_host::limited;

use crate::Error;

/// What the holder prints when it is ready.
const READY: &str = "ready";
/// Time limit for its start. A new network namespace takes milliseconds; many at once take seconds.
const START: Duration = Duration::from_secs(60);
/// The mount's name in its directory.
const NAME: &str = "netns";

/// The process that holds a namespace; ends when dropped.
#[derive(Debug)]
pub struct NamespaceHolder {
    child: Child,
}

impl NamespaceHolder {
    /// Starts the process, and mounts its namespace in `directory`.
    pub fn start(directory: &Path) -> io::Result<Self> {
        let mut child = Command::new("/proc/self/exe")
            .arg("hold")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let out = child.stdout.take();
        let mut holder = Self { child };
        let line = limited::within(
            &mut holder.child,
            Instant::now() + START,
            START,
            move || {
                let mut line = String::new();
                if let Some(out) = out {
                    BufReader::new(out.take(64)).read_line(&mut line)?;
                }
                Ok(line)
            },
        );
        let line = line.map_err(|e| {
            let what = format!("a network namespace: {e}; is `unshare --net true` as slow?");
            io::Error::new(e.kind(), what)
        })?;
        if line.trim() != READY {
            return Err(io::Error::other(
                "a network namespace cannot be made (`unshare --net` as root shows why)",
            ));
        }
        let place = place(directory);
        std::fs::File::create(&place)?;
        mount(
            Some(format!("/proc/{}/ns/net", holder.pid()).as_str()),
            &place,
            None::<&str>,
            MsFlags::MS_BIND,
            None::<&str>,
        )?;
        Ok(holder)
    }

    /// Returns the id of the process that holds the network namespace.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for NamespaceHolder {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the path of the network namespace below our directory in a bundle.
pub fn place(directory: &Path) -> PathBuf {
    directory.join(NAME)
}

/// Unmounts the namespace, if it is mounted.
pub fn release(directory: &Path) {
    let place = place(directory);
    let _ = umount2(&place, MntFlags::MNT_DETACH);
    let _ = std::fs::remove_file(&place);
}

/// Runs the holder process: creates a namespace and waits until its parent is gone.
pub fn main() -> Result<ExitCode, Error> {
    unshare(CloneFlags::CLONE_NEWNET).map_err(|e| Error::io("unshare")(e.into()))?;
    let mut out = io::stdout().lock();
    writeln!(out, "{READY}")
        .and_then(|()| out.flush())
        .map_err(Error::io("standard output"))?;
    let _ = io::stdin().lock().read(&mut [0u8]);
    Ok(ExitCode::SUCCESS)
}
