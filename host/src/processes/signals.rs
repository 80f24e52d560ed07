//! Signals that the caller of a program ignores, as `nohup` does: every program that it starts inherits that.

use nix::sys::signal::{SigHandler, SigSet, Signal, signal};

use super::stat::StatusFile;
use crate::files::Host;

/// Has the ends of this process's children wait until it asks for them: call it first. Where SIGCHLD is ignored, the
/// kernel discards them.
pub fn keep_children() {
    // SAFETY: installs no handler.
    unsafe {
        let _ = signal(Signal::SIGCHLD, SigHandler::SigDfl);
    }
}

/// Returns those of the signals that this process does not ignore. Once it blocks an ignored one, the kernel queues it.
pub fn not_ignored(signals: &[Signal]) -> SigSet {
    let ignored = StatusFile::read(&Host::system(), "self").set("SigIgn");
    heard(signals, ignored.unwrap_or(0))
}

fn heard(signals: &[Signal], ignored: u64) -> SigSet {
    let heard = |signal: &&Signal| ignored & (1 << (**signal as i32 - 1)) == 0;
    signals.iter().filter(heard).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nohup_ignores_is_left_out() {
        let (hup, term) = (Signal::SIGHUP, Signal::SIGTERM);
        assert_eq!(heard(&[hup, term], 1), SigSet::from_iter([term]));
        // Rust's start-up ignores it.
        let (pipe, set) = (Signal::SIGPIPE, not_ignored(&[Signal::SIGPIPE, term]));
        assert!(!set.contains(pipe) && set.contains(term));
    }
}
