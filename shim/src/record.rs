//! Stores a shim's facts in each container's bundle, for a `delete` after the shim's death.

use std::path::Path;
use std::{fs, io};

use serde::{Deserialize, Serialize};

use crate::ttrpc::address::Address;

/// In the bundle.
pub const FILE: &str = "cryopod-shim.json";
const PARTIAL: &str = ".cryopod-shim.json";

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The stock shim's socket.
    pub upstream: Address,
    /// Our socket.
    pub address: Address,
    /// The low-level runtime, as cryopod-runtime reads it from its environment.
    pub low_level: String,
    /// The low-level runtime's root, if the options state it.
    #[serde(default)]
    pub root: Option<String>,
}

impl Record {
    /// Writes the record into a bundle. A write that fails leaves an earlier record as it was.
    pub fn write(&self, bundle: &Path) -> io::Result<()> {
        let partial = bundle.join(PARTIAL);
        fs::write(&partial, serde_json::to_vec(self)?)?;
        fs::rename(partial, bundle.join(FILE))
    }

    /// Reads the record; `None` if there is no usable one.
    pub fn read(bundle: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(bundle.join(FILE)).ok()?).ok()
    }
}
