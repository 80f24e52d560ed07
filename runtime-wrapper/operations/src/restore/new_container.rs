//! Gives a container that was created from a checkpoint what is its own, before it runs an instruction.
//!
//! This happens at CRIU's stage [`STAGE`]: all of the container is there, devices too, and CRIU still holds the
//! processes. First the wrapper freezes the cgroup if the container has to wait for its start. The hook cannot do that:
//! where the container shares the PID namespace of a pod, the hook is in it, and sees no processes outside. Then the hook
//! replaces the host name, which comes from the images with their UTS namespace, by that of the new container.

pub mod environ;
pub mod hooks;
pub mod mounts;
pub mod network;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;

use cryopod_host::files::Host;
use cryopod_host::processes::ensure_other_namespace;
use cryopod_host::spec::Spec;
use nix::sched::{CloneFlags, setns};
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::restore::new_container::hooks::NewHooks;
use crate::rootfs::frozen::Frozen;
use crate::run::operation::{self, Operation};

/// CRIU's last stage of a restore: then it lets the processes go.
pub const STAGE: &str = "pre-resume";
const FILE: &str = "new-container.json";

/// What a container that is created from a checkpoint has of its own.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewContainer {
    /// The container waits for its start.
    wait: bool,
    /// The names of its own UTS namespace.
    hostname: Option<String>,
    domainname: Option<String>,
    /// For the wrapper, which runs them.
    #[serde(skip)]
    hooks: NewHooks,
}

impl NewContainer {
    /// Reads it from the spec. `wait`: the container waits for its start.
    pub fn of(spec: &Spec, wait: bool, hooks: NewHooks) -> Self {
        let own = spec.has_own_namespace("uts");
        let name = |key| {
            spec.json()
                .get(key)
                .and_then(|n| n.as_str())
                .filter(|_| own)
        };
        Self {
            wait,
            hostname: name("hostname").map(str::to_owned),
            domainname: name("domainname").map(str::to_owned),
            hooks,
        }
    }

    /// Returns its OCI hooks.
    pub fn hooks(&self) -> &NewHooks {
        &self.hooks
    }

    /// Returns true if the container waits for its start.
    pub fn waits(&self) -> bool {
        self.wait
    }

    /// Asks the hook of this operation.
    pub fn ask(&self, op: &Operation) -> Result<(), Error> {
        op.note(FILE, self)
    }

    /// What the operation in this directory asks for, if anything.
    pub fn asked(directory: &Path) -> Option<Self> {
        operation::noted(directory, FILE)
    }

    /// Has the kernel make new random numbers.
    ///
    /// `getrandom` of the vDSO (Linux 6.11) keeps its state in the process, and so in the images. It starts anew if the
    /// kernel's generator was seeded meanwhile. Else all copies would go on with the same numbers.
    pub fn reseed() {
        /// `_IO('R', 7)` of linux/random.h
        const RNDRESEEDCRNG: libc::c_ulong = 0x5207;
        let done = File::open("/dev/urandom").and_then(|device| {
            // SAFETY: the request has no argument.
            match unsafe { libc::ioctl(device.as_raw_fd(), RNDRESEEDCRNG as _) } {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        });
        if let Err(e) = done {
            tracing::warn!("/dev/urandom: the kernel's random numbers cannot be made anew: {e}");
        }
    }

    /// Freezes the container with this init process if it has to wait.
    pub fn stop(&self, host: &Host, spec: &Spec, init: i32) -> Result<(), String> {
        match self.wait {
            true => Frozen::at_restore(host, spec, init),
            false => Ok(()),
        }
    }

    /// Gives the container with this init process its own names.
    pub fn set_names(&self, init: i32) -> std::io::Result<()> {
        if self.hostname.is_none() && self.domainname.is_none() {
            return Ok(());
        }
        ensure_other_namespace(init, "uts")?;
        setns(
            File::open(format!("/proc/{init}/ns/uts"))?,
            CloneFlags::CLONE_NEWUTS,
        )?;
        if let Some(name) = &self.hostname {
            nix::unistd::sethostname(name)?;
        }
        if let Some(name) = &self.domainname {
            rustix::system::setdomainname(name.as_bytes())?;
        }
        Ok(())
    }
}
