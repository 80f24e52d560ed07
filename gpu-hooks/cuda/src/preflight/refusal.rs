//! Defines a reason to refuse a checkpoint or restore, with its remedy.

use std::fmt;

use cryopod_host::processes::Process;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// The process, if it is about one: pid on the host and name.
    pub process: Option<(i32, String)>,
    pub what: String,
    pub remedy: String,
}

impl Refusal {
    /// A reason that is about no single process.
    pub fn new(what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            process: None,
            what: what.into(),
            remedy: remedy.into(),
        }
    }

    /// A reason that is about this process.
    pub fn of(process: &Process, what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(what, remedy).about(process.pid, &process.comm)
    }

    #[must_use]
    pub fn about(mut self, pid: i32, comm: &str) -> Self {
        self.process = Some((pid, comm.to_owned()));
        self
    }

    /// The process and what is wrong, without the remedy.
    pub fn cause(&self) -> String {
        match &self.process {
            Some((pid, comm)) => format!("process {pid} ({comm}): {}", self.what),
            None => self.what.clone(),
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.cause(), self.remedy)
    }
}
