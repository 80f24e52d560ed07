//! Why an operation cannot do its part.

/// Why the wrapper could not do its part.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration is wrong.
    #[error(transparent)]
    Config(#[from] crate::config::ConfigError),
    /// There is no low-level runtime.
    #[error(transparent)]
    LowLevel(#[from] crate::lowlevel::LowLevelError),
    /// The metadata cannot be read or written.
    #[error(transparent)]
    Metadata(#[from] cryopod_archive::metadata::MetadataError),
    /// The spec cannot be read.
    #[error(transparent)]
    Spec(#[from] cryopod_host::spec::SpecError),
    /// The plan says no.
    #[error(transparent)]
    Plan(#[from] cryopod_gpu_plan::plan::PlanError),
    /// Another program gave no answer.
    #[error(transparent)]
    Tool(#[from] cryopod_host::programs::ToolError),
    /// What the images give cannot be compared with the spec.
    #[error("the restore was refused and the checkpoint is untouched: {0}")]
    Privileges(#[from] crate::privileges::PrivilegesError),
    /// Something of the operation's own could not be set up.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// Anything else that ends the operation, in full words.
    #[error("{0}")]
    Failed(String),
}

impl Error {
    /// An [`Error::Io`] with its context.
    pub fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}
