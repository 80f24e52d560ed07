//! Ends a frozen container as if TERM had ended its init process.

use std::io;

use cryopod_cuda::inject;
use cryopod_gpu_plan::live;
use cryopod_host::files::Host;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Ends a container whose cgroup is frozen. No process of it runs another instruction of its own.
///
/// The init process of a PID namespace ignores a TERM that it does not handle, and a KILL would give another exit code.
/// So the init process calls exit_group(2).
///
/// # Errors
/// Why the container was killed in place of that.
pub fn end(init: i32, code: i32, thaw: impl FnOnce()) -> io::Result<()> {
    for pid in live::tree(&Host::system(), init) {
        if pid != init {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
    let mut thaw = Some(thaw);
    let ended = inject::exit(init, code, || {
        if let Some(thaw) = thaw.take() {
            thaw();
        }
    });
    if ended.is_err() {
        // While its threads are still stopped.
        let _ = kill(Pid::from_raw(init), Signal::SIGKILL);
    }
    if let Some(thaw) = thaw {
        thaw();
    }
    ended
}
