//! Represents the checks of a restore here as data: the recorded and found values, the verdict, the switch that relaxes
//! the check, and what the user can do.
//!
//! The vendors' modules make the checks. The runtime refuses a restore with all unmet checks at once, and `cryopod
//! check` prints the whole table.

use serde::{Deserialize, Serialize};

use crate::refusal::Refusal;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    Ok,
    /// It does not hold, but its switch is off.
    Relaxed,
    /// One side is unknown, so nothing can be said; no reason to refuse.
    Unknown,
    Refused,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// What is checked, in the field's words: `driver version`, `memory`, `KFD_FW_VER_CHECK`.
    pub name: String,
    /// What it is about: a GPU (UUID, PCI address or KFD id) or a process; empty for the host as a whole.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub subject: String,
    pub recorded: String,
    pub found: String,
    pub verdict: Verdict,
    /// What relaxes the check: an environment variable, annotation or key of the configuration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub switch: Option<String>,
    /// What the user can do if it does not hold.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub remedy: String,
}

impl Check {
    /// Converts the check to a refusal; `None` if it does not refuse.
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
        Some(Refusal::new(
            format!(
                "{}{about}: the checkpoint has {}, this host has {}",
                self.name, self.recorded, self.found
            ),
            format!("{}{switch}", self.remedy),
        ))
    }
}

pub fn refusals(checks: &[Check]) -> Vec<Refusal> {
    checks.iter().filter_map(Check::refusal).collect()
}
