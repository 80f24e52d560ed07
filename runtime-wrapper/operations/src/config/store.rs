//! `[store]`.

use std::path::PathBuf;

use serde::Deserialize;

/// `[store]`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// The directory that the large files of checkpoints go to.
    pub path: Option<PathBuf>,
    /// Whose.
    #[serde(rename = "use")]
    pub used: Use,
    /// Further directories in which restores look.
    pub search: Vec<PathBuf>,
    /// `false`: a restore does not compare the digests of CRIU's files of memory.
    pub verify: Option<bool>,
}

impl Options {
    /// All stores of this host, the one that checkpoints go to first.
    pub fn directories(&self) -> Vec<PathBuf> {
        self.path.iter().chain(&self.search).cloned().collect()
    }
}

/// `store.use`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Use {
    /// All containers', but for those that say no.
    #[default]
    On,
    /// Of containers that say so.
    Off,
}
