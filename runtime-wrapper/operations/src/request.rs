//! Holds what a checkpoint or a restore was asked to do: the command line and the container's bundle, read once.

pub mod argv;
pub mod context;
pub mod lowlevel;
pub mod passthrough;
pub mod state;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cryopod_cuda::sharing;
use cryopod_host::destinations::Destinations;
use cryopod_host::files::Host;
use cryopod_host::programs::SystemTools;
use cryopod_host::spec::Spec;

use crate::bundle::lock::BundleLock;
use crate::config::Config;
use crate::request::argv::Invocation;
use crate::request::context::Context;
use crate::request::lowlevel::RuntimeKind;
use crate::request::state::ContainerState;

/// What a checkpoint or a restore was asked to do.
pub struct Request<'a> {
    pub ctx: &'a Context,
    pub inv: &'a Invocation,
    pub host: Host,
    pub tools: SystemTools,
    pub bundle: PathBuf,
    pub spec: Spec,
    /// Where the spec's mounts end up in the container.
    pub mounts: Destinations,
    /// The image directory. It need not exist yet at a checkpoint.
    pub images: PathBuf,
    /// The container ends with its checkpoint by cryopod's hands ([`crate::checkpoint::on_stop`]): CRIU and the low-level
    /// runtime leave it frozen.
    pub ends: bool,
    /// The checkpoint goes into a place, which other hosts may read ([`crate::images::place`]).
    pub into_place: bool,
    /// Taken while it is checkpointed.
    pub lock: BundleLock,
}

impl<'a> Request<'a> {
    /// The checkpoint of a container that the low-level runtime knows.
    pub fn checkpoint(ctx: &'a Context, inv: &'a Invocation, state: &ContainerState) -> Self {
        let spec = state.spec(ctx, inv);
        Self::new(ctx, inv, state.bundle.clone(), spec, inv.image_path())
    }

    /// A restore of these images into the bundle that the command line names. `spec`: what the container will have.
    pub fn restore(ctx: &'a Context, inv: &'a Invocation, spec: Spec, images: PathBuf) -> Self {
        Self::new(ctx, inv, inv.bundle(), spec, images)
    }

    fn new(
        ctx: &'a Context,
        inv: &'a Invocation,
        bundle: PathBuf,
        spec: Spec,
        images: PathBuf,
    ) -> Self {
        let host = Host::system();
        Self {
            mounts: Destinations::of(&host, &spec, &bundle),
            tools: SystemTools::from_env(),
            ctx,
            inv,
            host,
            bundle,
            spec,
            images,
            ends: false,
            into_place: false,
            lock: BundleLock::default(),
        }
    }

    /// Returns the container's id.
    pub fn id(&self) -> &str {
        &self.inv.id
    }

    /// What happens to a container whose processes share GPU memory.
    pub fn sharing(&self) -> Result<sharing::Policy, String> {
        sharing::Policy::of(&self.spec, self.config().nvidia.sharing)
    }

    /// Returns the configuration.
    pub fn config(&self) -> &Config {
        &self.ctx.config
    }

    /// Returns which low-level runtime this is.
    pub fn low(&self) -> RuntimeKind {
        self.ctx.low.kind
    }

    /// Returns true if the command line has this flag.
    pub fn flag(&self, name: &str) -> bool {
        self.inv.flags.has(name)
    }

    /// Returns true for a checkpoint of the memory alone, upon which another one builds.
    pub fn pre_dump(&self) -> bool {
        self.flag("pre-dump")
    }

    /// Returns true if the container is to run on after its checkpoint.
    pub fn leave_running(&self) -> bool {
        self.flag("leave-running") && !self.ends
    }

    /// How long another program may take to report something.
    pub fn tool_limit(&self) -> Duration {
        self.config().limits.tool()
    }

    /// The file of this name in the directory of CRIU's logs.
    pub fn log(&self, name: &str) -> PathBuf {
        self.inv.work_path().join(name)
    }

    /// Inserts flags behind the verb of a command line.
    pub fn with_flags(&self, args: &[OsString], flags: &[&str]) -> Vec<OsString> {
        with_flags(args, self.inv.verb_at, flags)
    }

    /// The directory in which the low-level runtime keeps its containers' state.
    pub fn state_root(&self) -> Option<&Path> {
        self.inv.globals.root.as_deref()
    }
}

/// Inserts flags behind the verb.
pub fn with_flags(args: &[OsString], verb_at: usize, flags: &[&str]) -> Vec<OsString> {
    let mut line = args.to_vec();
    let at = (verb_at + 1).min(line.len());
    line.splice(at..at, flags.iter().map(OsString::from));
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_go_behind_the_verb() {
        let line: Vec<OsString> = ["--root", "/r", "restore", "c1"]
            .map(OsString::from)
            .to_vec();
        assert_eq!(
            with_flags(&line, 2, &["--work-path", "/w"]),
            ["--root", "/r", "restore", "--work-path", "/w", "c1"]
        );
    }
}
