//! Asks the low-level runtime for a container's state, and reads its spec.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cryopod_host::destinations::Destinations;
use cryopod_host::mountinfo;
use cryopod_host::programs::{Output, ToolError, Tools};
use cryopod_host::spec::Spec;
use serde_json::Value;

use crate::request::argv::Invocation;
use crate::request::context::Context;
use crate::request::lowlevel::RuntimeKind;
use crate::rootfs;

/// A container's state, as the low-level runtime reports it.
pub struct ContainerState {
    pub init: i32,
    pub bundle: PathBuf,
    pub paused: bool,
    /// It is made and waits for its start.
    pub created: bool,
}

impl ContainerState {
    /// Asks for the state. `None`: the low-level runtime reports whatever is wrong.
    pub fn ask(ctx: &Context, inv: &Invocation, tools: &dyn Tools) -> Option<Self> {
        let out = verb(ctx, inv, "state", tools).ok()?;
        let out = Some(out).filter(|o| o.code == 0)?;
        let json: Value = serde_json::from_str(&out.stdout).ok()?;
        Some(Self {
            init: i32::try_from(json.get("pid")?.as_i64()?)
                .ok()
                .filter(|p| *p > 0)?,
            bundle: json.get("bundle")?.as_str()?.into(),
            paused: json.get("status").is_some_and(|s| s == "paused"),
            created: json.get("status").is_some_and(|s| s == "created"),
        })
    }

    /// Asks anew whether the container is paused, with its lock held: before that another operation may have had it frozen.
    pub fn ask_again(&mut self, ctx: &Context, inv: &Invocation, tools: &dyn Tools) {
        if self.paused {
            self.paused = Self::ask(ctx, inv, tools).is_none_or(|now| now.paused);
        }
    }

    /// Reads the spec; an empty one, with a warning, where there is none.
    pub fn spec(&self, ctx: &Context, inv: &Invocation) -> Spec {
        let spec = Spec::of_bundle(&self.bundle);
        // crun names no bundle of a container in a user namespace ("/"), and keeps a copy of the spec.
        let spec = spec.or_else(|e| match ctx.low.kind {
            RuntimeKind::Crun => Spec::of_bundle(&directory(ctx, inv)).map_err(|_| e),
            RuntimeKind::Runc => Err(e),
        });
        spec.unwrap_or_else(|e| {
            tracing::warn!("only the running container can be looked at: {e}");
            Spec::from_json(Value::Null)
        })
    }

    /// Returns the directory that whoever works at the container locks: its bundle. All containers in user namespaces have
    /// the same for crun, "/".
    pub fn lock_directory(&self, ctx: &Context, inv: &Invocation) -> PathBuf {
        match self.bundle == Path::new("/") {
            true => directory(ctx, inv),
            false => self.bundle.clone(),
        }
    }

    /// Returns the container as the root file system's part needs it.
    pub fn container<'a>(
        &'a self,
        spec: &'a Spec,
        mounts: &Destinations,
    ) -> rootfs::ContainerRoot<'a> {
        rootfs::ContainerRoot {
            init: self.init,
            bundle: &self.bundle,
            spec,
            shm: rootfs::own_shm(mounts, &self.bundle),
        }
    }
}

/// Runs a verb of the low-level runtime on the container, within `limits.tool_s`.
pub fn verb(
    ctx: &Context,
    inv: &Invocation,
    verb: &str,
    tools: &dyn Tools,
) -> Result<Output, ToolError> {
    run(ctx, inv, &[verb], tools)
}

fn run(
    ctx: &Context,
    inv: &Invocation,
    words: &[&str],
    tools: &dyn Tools,
) -> Result<Output, ToolError> {
    let mut args: Vec<&OsStr> = Vec::new();
    if let Some(root) = &inv.globals.root {
        args.extend([OsStr::new("--root"), root.as_os_str()]);
    }
    args.extend(words.iter().map(OsStr::new));
    args.push(OsStr::new(&inv.id));
    tools.output(&ctx.low.path, &args, ctx.config.limits.tool())
}

/// The directory in which the low-level runtime keeps what it knows of the container.
pub fn directory(ctx: &Context, inv: &Invocation) -> PathBuf {
    let root = inv.globals.root.clone();
    root.unwrap_or_else(|| ctx.low.kind.default_root())
        .join(&inv.id)
}

/// Removes what is left of a container when the runtime, or CRIU late in its work, was killed in the middle: its state
/// would block the next try. Never called after a failure of the runtime's own: a container of this name may be running
/// already. Returns false if it cannot be removed.
pub fn remove(ctx: &Context, inv: &Invocation, tools: &dyn Tools) -> bool {
    // runc mounts the root for CRIU in its own directory of the container, and cannot remove that while it is mounted.
    mountinfo::unmount_below(&directory(ctx, inv));
    // More than once, as files may still appear while the last processes end.
    for _ in 0..3 {
        match run(ctx, inv, &["delete", "--force"], tools) {
            Ok(out) if out.code == 0 => return true,
            Ok(out) => tracing::debug!("delete --force: {}", out.stderr),
            Err(e) => tracing::debug!("delete --force: {e}"),
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    false
}
