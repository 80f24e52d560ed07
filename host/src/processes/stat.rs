//! Reads `/proc/PID/stat` and `/proc/PID/status`: whether a process lives, its parent, when it was started, its rights.

use std::fmt::Display;
use std::str::FromStr;

use crate::files::Host;

/// `PF_EXITING` of the kernel's sched.h.
const EXITING: u64 = 4;
/// SIGKILL's bit in a set of signals.
const SIGKILL: u64 = 1 << 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    /// `R`, `S`, `Z` ...
    pub state: char,
    pub parent: i32,
    /// Exiting, zombie or dead.
    pub exiting: bool,
    /// SIGKILL is pending: it ends as soon as it runs. The kernel marks each thread of a killed process so.
    pub kill_pending: bool,
    /// A zombie that a signal ended. The kernel shows this to root.
    pub killed: bool,
    /// Its start time in clock ticks since boot; with the pid it identifies a process.
    pub start_time: u64,
}

impl Stat {
    pub fn read(host: &Host, pid: i32) -> Option<Self> {
        Self::parse(&host.text(format!("/proc/{pid}/stat")).ok()?)
    }

    /// The name is in parentheses and may hold anything, parentheses too.
    pub fn parse(text: &str) -> Option<Self> {
        let mut fields = text.rsplit_once(')')?.1.split_ascii_whitespace();
        let state = fields.next()?.chars().next()?;
        let parent = fields.next()?.parse().ok()?;
        let mut number = |skipped| fields.nth(skipped).and_then(|f| f.parse::<u64>().ok());
        let flags = number(4).unwrap_or(0);
        let start_time = number(12).unwrap_or(0);
        let pending = number(8).unwrap_or(0);
        let exit_code = number(20).unwrap_or(0);
        Some(Self {
            state,
            parent,
            exiting: matches!(state, 'Z' | 'X' | 'x') || flags & EXITING != 0,
            kill_pending: pending & SIGKILL != 0,
            killed: state == 'Z' && exit_code & 0x7f != 0,
            start_time,
        })
    }
}

/// The text of `/proc/PID/status`; empty if there is no such process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StatusFile(String);

impl StatusFile {
    /// Reads that of a process, `self`, or of a thread, `PID/task/TID`.
    pub fn read(host: &Host, process: impl Display) -> Self {
        let text = host.text(format!("/proc/{process}/status"));
        Self(text.unwrap_or_default())
    }

    /// What stands behind `name:`.
    pub fn field(&self, name: &str) -> Option<&str> {
        let mut lines = self.0.lines().filter_map(|l| l.strip_prefix(name));
        lines.find_map(|l| Some(l.strip_prefix(':')?.trim()))
    }

    /// The number with which a field begins.
    pub fn number<T: FromStr>(&self, name: &str) -> Option<T> {
        self.field(name)?.split_whitespace().next()?.parse().ok()
    }

    /// All numbers of a field; `None` if one is none.
    pub fn numbers<T: FromStr>(&self, name: &str) -> Option<Vec<T>> {
        let words = self.field(name)?.split_whitespace();
        words.map(|n| n.parse().ok()).collect()
    }

    /// A set of bits: signals, capabilities.
    pub fn set(&self, name: &str) -> Option<u64> {
        u64::from_str_radix(self.field(name)?, 16).ok()
    }
}

impl From<String> for StatusFile {
    fn from(text: String) -> Self {
        Self(text)
    }
}
