//! Parses the table `[cache]`.

use std::path::PathBuf;

use serde::Deserialize;

/// `[cache]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CacheOptions {
    /// The directory for the images of archives from which containers are created.
    pub path: PathBuf,
    /// The most that it holds. Beyond it, what was not used for the longest time is removed.
    pub max_gib: u64,
    /// Registries (`HOST[:PORT]`) whose certificate is not checked, or that have no TLS.
    pub insecure_registries: Vec<String>,
}

impl Default for CacheOptions {
    fn default() -> Self {
        Self {
            path: "/var/cache/cryopod".into(),
            max_gib: 64,
            insecure_registries: Vec::new(),
        }
    }
}

impl CacheOptions {
    /// Returns the size up to which the cache may grow, in bytes.
    pub fn max_bytes(&self) -> u64 {
        self.max_gib.saturating_mul(1 << 30)
    }

    /// Returns true for a registry of [`Self::insecure_registries`].
    pub fn is_insecure(&self, registry: &str) -> bool {
        let mut insecure = self.insecure_registries.iter();
        insecure.any(|r| r.eq_ignore_ascii_case(registry))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_hosts_have_no_case() {
        let cache = CacheOptions {
            insecure_registries: vec!["R.example:5000".into()],
            ..CacheOptions::default()
        };
        assert!(cache.is_insecure("r.example:5000") && !cache.is_insecure("r.example"));
    }
}
