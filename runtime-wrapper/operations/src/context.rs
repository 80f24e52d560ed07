//! Configuration, low-level runtime and command line: what every verb needs.

use std::ffi::OsString;

use crate::config::Config;
use crate::handover::Handed;
use crate::lowlevel::LowLevel;

#[derive(Debug, Clone)]
pub struct Context {
    pub config: Config,
    pub low: LowLevel,
    /// The command line, without the program's name.
    pub args: Vec<OsString>,
}

impl Context {
    /// The same with what root has handed to this one restore: another GPU map, and the place of large files.
    #[must_use]
    pub fn with(&self, handed: &Handed) -> Self {
        let mut ctx = self.clone();
        if let Some(map) = &handed.map {
            ctx.config.gpu.map = Some(map.clone());
        }
        ctx.config.store.search.extend(handed.places.clone());
        ctx
    }
}
