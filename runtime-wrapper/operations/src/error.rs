//! Errors that end an operation.

use std::fmt;
use std::path::{Path, PathBuf};

/// Why no low-level runtime was found.
#[derive(Debug, thiserror::Error)]
pub enum LowLevelError {
    #[error("the low-level runtime {name:?} ({origin}) was not found{}; install it or name another one", if name.contains('/') { "" } else { " on PATH" })]
    Named { name: String, origin: String },
    #[error(
        "no low-level runtime: neither crun nor runc is on PATH; install one or name it as `runtime.low_level` in {}",
        crate::config::PATH
    )]
    None,
    /// The name leads to this very program.
    #[error("the low-level runtime {0:?} is cryopod-runtime itself; name crun or runc")]
    Myself(PathBuf),
}

/// Why an operation ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Config(#[from] crate::config::ConfigError),
    #[error(transparent)]
    LowLevel(#[from] LowLevelError),
    #[error(transparent)]
    Metadata(#[from] cryopod_archive::metadata::MetadataError),
    #[error(transparent)]
    Spec(#[from] cryopod_host::spec::SpecError),
    #[error(transparent)]
    Plan(#[from] cryopod_gpu_plan::plan::PlanError),
    #[error(transparent)]
    Tool(#[from] cryopod_host::programs::ToolError),
    #[error("the restore was refused and the checkpoint is untouched: {0}")]
    Privileges(#[from] crate::security::privileges::PrivilegesError),
    #[error(transparent)]
    Namespace(#[from] cryopod_host::detached::NamespaceError),
    #[error("{what}: {source}")]
    Io {
        what: String,
        source: std::io::Error,
    },
    /// The operation was refused before it changed anything.
    #[error("{what}. {untouched}")]
    Refused { what: String, untouched: Untouched },
    /// Anything else that ends the operation; the text is complete.
    #[error("{0}")]
    Failed(String),
}

/// What a refused operation has left as it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Untouched {
    /// The running container.
    Container,
    /// The container that was to start.
    NewContainer,
}

impl fmt::Display for Untouched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Container => "Nothing was touched",
            Self::NewContainer => "Nothing was started",
        })
    }
}

impl Error {
    /// Returns the refusal of an operation that has touched nothing. `what` needs no sentence that says so.
    pub fn untouched(what: impl Into<String>) -> Self {
        let (what, untouched) = (what.into(), Untouched::Container);
        Self::Refused { what, untouched }
    }

    /// Returns the refusal of a container that has not been started.
    pub fn not_started(what: impl Into<String>) -> Self {
        let (what, untouched) = (what.into(), Untouched::NewContainer);
        Self::Refused { what, untouched }
    }

    /// Returns what makes an [`Error::Io`] of an I/O error. `what`: what failed, on what.
    pub fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }

    /// Returns what makes an [`Error::Io`] of an I/O error on a path.
    pub fn at(path: &Path, what: &str) -> impl FnOnce(std::io::Error) -> Self + use<> {
        Self::io(format!("{}: {what}", path.display()))
    }
}
