//! What every verb needs.

use std::ffi::OsString;

use crate::config::Config;
use crate::lowlevel::LowLevel;

/// What every verb needs.
#[derive(Debug)]
pub struct Context {
    /// The configuration.
    pub config: Config,
    /// The runtime underneath.
    pub low: LowLevel,
    /// The command line, without the program's name.
    pub args: Vec<OsString>,
}
