//! Parses the table `[encrypt]`.

use std::path::PathBuf;

use cryopod_archive::{Error, Identities, Recipients};
use serde::Deserialize;

/// `[encrypt]`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EncryptOptions {
    /// For whom archives are encrypted: recipients of `age`, public keys of SSH, or files with them.
    pub recipients: Vec<String>,
    /// Files with the keys that read encrypted archives.
    pub identities: Vec<PathBuf>,
}

impl EncryptOptions {
    /// Returns the recipients that a command names, else those of the configuration.
    pub fn recipients(&self, named: &[String]) -> Result<Option<Recipients>, Error> {
        match named.is_empty() {
            true => Recipients::parse(&self.recipients),
            false => Recipients::parse(named),
        }
    }

    /// Reads the identities.
    pub fn identities(&self) -> Identities {
        Identities::read(&self.identities)
    }

    /// Returns true if a runtime that an engine starts has the same identities: it has another directory and another
    /// environment.
    pub fn is_the_runtimes(&self) -> bool {
        let host = std::env::var_os("CRYOPOD_CONFIG").is_none();
        host && self.identities.iter().all(|path| path.is_absolute())
    }
}
