//! Parses the table `[store]`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

/// The store where the configuration names none. It is made if it is missing.
pub const DEFAULT: &str = "/var/lib/cryopod/store";
/// Default of `grace_s`.
const GRACE: Duration = Duration::from_secs(120);

/// `[store]`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StoreOptions {
    /// The directory for the large files of checkpoints.
    pub path: Option<PathBuf>,
    /// Which containers use it.
    #[serde(rename = "use")]
    pub used: Option<Use>,
    /// Further directories that restores search.
    pub search: Vec<PathBuf>,
    /// `false`: a restore does not compare the digests of CRIU's memory images.
    pub verify: Option<bool>,
    /// Whether entries that nothing refers to are removed.
    pub clean: Option<bool>,
    /// Age up to which an entry is not removed.
    pub grace_s: Option<u64>,
    /// Further directories with checkpoints that need their entries.
    pub used_in: Vec<PathBuf>,
}

impl StoreOptions {
    /// The store that takes the files of new checkpoints.
    pub fn path(&self) -> &Path {
        self.path.as_deref().unwrap_or(Path::new(DEFAULT))
    }

    /// All stores of this host; checkpoints go to the first.
    pub fn directories(&self) -> Vec<PathBuf> {
        let default = Path::new(DEFAULT);
        let mut all = vec![self.path().to_owned()];
        all.extend(self.search.iter().cloned());
        // It may have entries from before the configuration named another one.
        if self.path() != default && default.exists() {
            all.push(default.to_owned());
        }
        all
    }

    /// A store that the configuration names is for all containers, as long as it does not say otherwise.
    pub fn used(&self) -> Use {
        let named = self.path.as_ref().map(|_| Use::On);
        self.used.or(named).unwrap_or_default()
    }

    /// Other hosts may use a store that the configuration names.
    pub fn cleans(&self) -> bool {
        self.clean.unwrap_or(self.path.is_none())
    }

    /// Returns the age up to which an entry of the store is not removed.
    pub fn grace(&self) -> Duration {
        self.grace_s.map_or(GRACE, Duration::from_secs)
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Use {
    /// Containers whose engine packs the image directory by itself and keeps what it packs: docker, nerdctl, ctr.
    #[default]
    Auto,
    /// All containers, except those that opt out.
    On,
    /// Only containers that opt in.
    Off,
}
