//! Decodes strangers' archives in children that can do little ([`cryopod_host::sandbox`]).

use std::path::{Path, PathBuf};
use std::time::Duration;

use cryopod_archive::Identities;
use cryopod_archive::format::limits::Limits;
use cryopod_archive::format::names;
use cryopod_archive::source::{InPlace, Source};
use cryopod_archive::unpack::{self, UnpackOptions, Unpacked};
use cryopod_archive::vram::parent::WantedParent;
use cryopod_host::files::bytes_below;
use cryopod_host::sandbox::{self, Sandbox, SandboxError, Worker};
use cryopod_operations::config::{Config, TimeLimits};

use crate::{one_line, terminal::ui};

/// Reads the keys for encrypted archives, which a decoder could not.
pub fn identities() -> anyhow::Result<Identities> {
    Ok(Config::load()?.encrypt.identities())
}

/// Finds the shards that a restore can read in the archive.
pub fn shards_in_place(source: &Source) -> anyhow::Result<Vec<InPlace>> {
    if source.is_encrypted() && !Config::load()?.encrypt.is_the_runtimes() {
        return Ok(Vec::new());
    }
    let found = Decoding::of(source.path())?.run(|| {
        let limits = Limits::default();
        let found = source.reopen(&limits)?.find_shards(&limits)?;
        Ok(serde_json::to_vec(&found)?)
    })?;
    Ok(source.shards_in_place(serde_json::from_slice(&found)?)?)
}

/// The longest chain of checkpoints that is followed.
const MAX_PARENTS: usize = 1024;

/// Unpacks an archive, and shows how far that is.
pub fn unpack(
    quiet: bool,
    source: &Source,
    to: &Path,
    options: &UnpackOptions,
) -> anyhow::Result<Unpacked> {
    let limit = limit(&Config::load()?.limits, source.stored_bytes()?);
    // Before there is a thread that shows the progress.
    let unpacking = unpack::start(source, to, options)?;
    let done = ui::with_progress("unpack", quiet, &options.progress, || {
        unpacking.finish(limit)
    });
    Ok(done?)
}

/// What a decoder may read.
pub struct Decoding {
    pub read: Vec<PathBuf>,
    limits: TimeLimits,
}

impl Decoding {
    /// Of one archive.
    pub fn of(archive: &Path) -> anyhow::Result<Self> {
        Ok(Self {
            read: vec![sandbox::real(archive)],
            limits: Config::load()?.limits,
        })
    }

    /// Adds the checkpoints upon which one builds. Tables say where they are, so a place counts only if there is a table
    /// with the digest that is wanted.
    pub fn add_parents(&mut self, wanted: Option<WantedParent>, search: &[PathBuf]) {
        let mut wanted = wanted;
        for _ in 0..MAX_PARENTS {
            // If one is missing, the work says so.
            let Some(parent) = wanted.and_then(|wanted| wanted.find(search)) else {
                return;
            };
            let parent = sandbox::real(&parent);
            self.read.push(parent.clone());
            let decoding = Self {
                read: vec![parent.clone()],
                limits: self.limits.clone(),
            };
            let said = decoding.run(|| {
                let table = std::fs::read(parent.join(names::VRAM_INDEX))?;
                Ok(serde_json::to_vec(&WantedParent::of(
                    &table,
                    Some(&parent),
                )?)?)
            });
            let said = said
                .ok()
                .and_then(|said| serde_json::from_slice(&said).ok());
            wanted = said.flatten();
        }
    }

    /// Does the work in a child.
    pub fn run(
        &self,
        work: impl FnOnce() -> anyhow::Result<Vec<u8>>,
    ) -> Result<Vec<u8>, SandboxError> {
        self.start(work)?.finish()
    }

    /// Starts the work; see [`Sandbox::start`].
    pub fn start(
        &self,
        work: impl FnOnce() -> anyhow::Result<Vec<u8>>,
    ) -> Result<ConfinedRun, SandboxError> {
        let sandbox = Sandbox {
            read: self.read.clone(),
            write: Vec::new(),
        };
        let sizes = self
            .read
            .iter()
            .map(|path| bytes_below(&sandbox::real(path)));
        let bytes = sizes.fold(0, u64::saturating_add);
        let worker = sandbox.start(|| work().map_err(|e| one_line(&e)))?;
        Ok(ConfinedRun {
            worker,
            limit: limit(&self.limits, bytes),
        })
    }
}

pub struct ConfinedRun {
    worker: Worker,
    limit: Duration,
}

impl ConfinedRun {
    pub fn finish(self) -> Result<Vec<u8>, SandboxError> {
        self.worker.finish(self.limit)
    }
}

/// How long decoding of so many bytes may take: as long as a restore.
fn limit(limits: &TimeLimits, bytes: u64) -> Duration {
    // Zstd packs zeros to a thousandth.
    limits.restore(bytes.saturating_mul(16))
}
