//! Hides from CRIU, at a checkpoint, the AMD GPUs that the container does not see.
//!
//! CRIU's amdgpu plugin reads the KFD's topology as CRIU sees it, that is, the host's. Up to CRIU 4.2 it gives up on every GPU
//! that the process does not have (`topology_to_devinfo`: -EINVAL), so a container with some of the host's GPUs could not
//! be checkpointed. The low-level runtime, and with it CRIU, gets a mount namespace in which the directories of the
//! other GPUs are empty: the plugin passes over those. Only `/sys` is private there, and no other mount differs.

use std::ffi::{CStr, CString};
use std::io;
use std::os::unix::ffi::OsStrExt;

use cryopod_amd::topology::Topology;
use cryopod_gpu_plan::gpus::amd_gpus::TOPOLOGY;
use cryopod_host::files::Host;
use cryopod_host::nodes::DRM_MAJOR;
use cryopod_host::spec::Spec;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

use crate::error::Error;
use crate::run::operation::Operation;

const EMPTY: &str = "empty";

/// The directories to hide, ready for use between fork and exec.
#[derive(Debug, Clone)]
pub struct HiddenGpus {
    nodes: Vec<CString>,
    empty: CString,
}

impl HiddenGpus {
    /// Those that the container's device rules deny; `None`: there are none.
    pub fn of(host: &Host, spec: &Spec, op: &Operation) -> Result<Option<Self>, Error> {
        let topology = Topology::read(host);
        let denied = topology
            .gpus()
            .filter(|gpu| !spec.allows(DRM_MAJOR, gpu.render_minor().into()));
        let nodes: Vec<CString> = denied
            .filter_map(|gpu| CString::new(format!("{TOPOLOGY}/{}", gpu.id)).ok())
            .collect();
        if nodes.is_empty() {
            return Ok(None);
        }
        let empty = op.file(EMPTY);
        std::fs::create_dir_all(&empty).map_err(Error::at(&empty, "cannot be made"))?;
        let empty = CString::new(empty.as_os_str().as_bytes())
            .map_err(|_| Error::Failed(format!("{}: has a 0 in its name", empty.display())))?;
        Ok(Some(Self { nodes, empty }))
    }

    /// Gives the calling process a mount namespace of its own without them. Makes async-signal-safe calls only.
    ///
    /// # Errors
    /// The first call that failed; the process must not go on.
    pub fn hide(&self) -> io::Result<()> {
        let none = None::<&CStr>;
        unshare(CloneFlags::CLONE_NEWNS)?;
        mount(none, c"/sys", none, MsFlags::MS_PRIVATE, none)?;
        for node in &self.nodes {
            let (empty, node) = (Some(&*self.empty), &**node);
            mount(empty, node, none, MsFlags::MS_BIND, none)?;
        }
        Ok(())
    }
}
