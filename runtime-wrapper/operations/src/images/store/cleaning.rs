//! Cleans the store up beside a checkpoint.

use std::thread::{self, JoinHandle};
use std::time::Duration;

use cryopod_host::limited::wait_until;

use super::clean;
use crate::config::Config;

/// Longest time that a checkpoint waits for a clean-up that outlasts it. The next one goes on.
const WAIT: Duration = Duration::from_secs(5);

/// Removes unused entries while the checkpoint is made.
pub struct Cleaning(Option<JoinHandle<()>>);

impl Cleaning {
    /// Starts a thread that removes what nothing refers to.
    pub fn start(config: &Config) -> Self {
        let config = config.clone();
        let work = move || match clean(&config) {
            Ok(removed) => {
                for entry in removed {
                    tracing::info!("store: {} removed: nothing refers to it", entry.id);
                }
            }
            Err(e) => tracing::warn!("{e}"),
        };
        let thread = thread::Builder::new().name("clean".into()).spawn(work);
        Self(thread.ok())
    }
}

impl Drop for Cleaning {
    fn drop(&mut self) {
        let Some(thread) = self.0.take() else { return };
        wait_until(WAIT, Duration::from_millis(5), || thread.is_finished());
    }
}
