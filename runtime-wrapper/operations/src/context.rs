//! Configuration, low-level runtime and command line: what every verb needs.

use std::ffi::OsString;

use crate::config::Config;
use crate::lowlevel::LowLevel;

#[derive(Debug, Clone)]
pub struct Context {
    pub config: Config,
    pub low: LowLevel,
    /// The command line, without the program's name.
    pub args: Vec<OsString>,
}

impl Context {
    /// The same with another GPU map, which root has asked for in this one restore.
    #[must_use]
    pub fn mapped(&self, map: &str) -> Self {
        let mut ctx = self.clone();
        ctx.config.gpu.map = Some(map.to_owned());
        ctx
    }
}
