//! Defines a reason to refuse a checkpoint or restore, with its remedy.

use std::fmt;

use cryopod_cuda::preflight;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// The process, if it is about one: pid on the host and name.
    pub process: Option<(i32, String)>,
    pub what: String,
    pub remedy: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((pid, comm)) = &self.process {
            write!(f, "process {pid} ({comm}): ")?;
        }
        write!(f, "{}; {}", self.what, self.remedy)
    }
}

impl From<preflight::Refusal> for Refusal {
    fn from(found: preflight::Refusal) -> Self {
        Self {
            process: (found.pid > 0).then_some((found.pid, found.comm)),
            what: found.what,
            remedy: found.remedy,
        }
    }
}
