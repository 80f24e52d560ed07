//! Parses the table `[store]`.

use std::path::PathBuf;

use serde::Deserialize;

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// The directory for the large files of checkpoints.
    pub path: Option<PathBuf>,
    /// Which containers use it.
    #[serde(rename = "use")]
    pub used: Use,
    /// Further directories that restores search.
    pub search: Vec<PathBuf>,
    /// `false`: a restore does not compare the digests of CRIU's memory images.
    pub verify: Option<bool>,
}

impl Options {
    /// All stores of this host; checkpoints go to the first.
    pub fn directories(&self) -> Vec<PathBuf> {
        self.path.iter().chain(&self.search).cloned().collect()
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Use {
    /// All containers, except those that opt out.
    #[default]
    On,
    /// Only containers that opt in.
    Off,
}
