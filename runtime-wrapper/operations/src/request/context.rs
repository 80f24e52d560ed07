//! Configuration, low-level runtime and command line: what every verb needs.

use std::ffi::OsString;

use crate::config::Config;
use crate::request::lowlevel::LowLevel;

/// What every verb needs.
#[derive(Debug, Clone)]
pub struct Context {
    pub config: Config,
    pub low: LowLevel,
    /// The command line, without the program's name.
    pub args: Vec<OsString>,
}
