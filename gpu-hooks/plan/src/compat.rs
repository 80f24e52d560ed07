//! Would this checkpoint restore here? Each thing that must hold, as data: what was recorded, what was found,
//! the verdict, the switch that relaxes it, and what the user can do.
//!
//! The vendors' modules make the checks; the runtime refuses a restore with all that are not met at once, and
//! `cryopod check` prints the whole table.

use serde::{Deserialize, Serialize};

use crate::refusal::Refusal;

/// How a check came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// It holds.
    Ok,
    /// It does not hold, but its switch says that it need not.
    Relaxed,
    /// One side is not known, so that nothing can be said; no reason to refuse.
    Unknown,
    /// It does not hold: the restore is refused.
    Refused,
}

/// One thing that must hold for a restore.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// What is checked, in the field's words: `driver version`, `memory`, `KFD_FW_VER_CHECK`.
    pub name: String,
    /// What it is about: a GPU (UUID, PCI address or KFD id) or a process; empty for the host as a whole.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub subject: String,
    /// What the checkpoint says, for people.
    pub recorded: String,
    /// What this host has, for people.
    pub found: String,
    /// How it came out.
    pub verdict: Verdict,
    /// What relaxes the check: an environment variable, annotation or key of the configuration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub switch: Option<String>,
    /// What the user can do if it does not hold.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub remedy: String,
}

impl Check {
    /// The check as a reason to refuse; `None` if it is none.
    pub fn refusal(&self) -> Option<Refusal> {
        if self.verdict != Verdict::Refused {
            return None;
        }
        let about = match self.subject.as_str() {
            "" => String::new(),
            s => format!(" of {s}"),
        };
        let switch = self
            .switch
            .as_deref()
            .map_or_else(String::new, |s| format!(" (relaxed by {s})"));
        Some(Refusal {
            process: None,
            what: format!(
                "{}{about}: the checkpoint has {}, this host has {}",
                self.name, self.recorded, self.found
            ),
            remedy: format!("{}{switch}", self.remedy),
        })
    }
}

/// All reasons to refuse among some checks.
pub fn refusals(checks: &[Check]) -> Vec<Refusal> {
    checks.iter().filter_map(Check::refusal).collect()
}
