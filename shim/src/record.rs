//! What a shim remembers in the bundle of each container, for a `delete` that comes after it died.

use std::path::Path;
use std::{fs, io};

use serde::{Deserialize, Serialize};

use crate::address::Address;

/// The file, in the bundle.
pub const FILE: &str = "cryopod-shim.json";

/// The record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Where the stock shim listens.
    pub upstream: Address,
    /// Where ours does.
    pub address: Address,
    /// The low-level runtime, as cryopod-runtime takes it from its environment.
    pub low_level: String,
    /// Where that keeps its containers, if the options say.
    #[serde(default)]
    pub root: Option<String>,
}

impl Record {
    /// Writes it.
    ///
    /// # Errors
    /// The bundle cannot be written.
    pub fn write(&self, bundle: &Path) -> io::Result<()> {
        fs::write(bundle.join(FILE), serde_json::to_vec(self)?)
    }

    /// Reads it; `None` if there is none that can be used.
    pub fn read(bundle: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(bundle.join(FILE)).ok()?).ok()
    }
}
