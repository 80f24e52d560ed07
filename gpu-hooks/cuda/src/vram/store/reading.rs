//! Buffers into which regions are read: how far, and the processes that wait for them.

use super::work::Work;
use super::{VramFiles, directory, failed, refused, there_is};
use crate::inject::{Descriptor, take_descriptor};
use crate::messages::protocol::{DriverError, ErrorKind};
use crate::vram::userfault::{self, Userfault};
use crate::vram::worker::Job;
use crate::vram::{SharedBuffer, VramConfig, WantedRegion};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// A buffer that is being read into.
#[derive(Default)]
pub(super) struct Reading {
    /// Bytes from the start that have been read.
    pub(super) bytes: u64,
    /// Its mapping in the process. Kept after a failure: the process must not run on.
    mapping: Option<Userfault>,
}

impl Reading {
    fn open(&mut self) -> io::Result<()> {
        let mapping = self.mapping.as_mut();
        mapping.map_or(Ok(()), |mapping| mapping.open_to(self.bytes))
    }
}

impl VramFiles {
    pub(super) fn load(
        self: &Arc<Self>,
        dir: &Path,
        regions: &[WantedRegion],
        config: &VramConfig,
    ) -> Result<Vec<SharedBuffer>, DriverError> {
        let all = regions.iter().map(|region| region.bytes);
        let all = all.fold(0u64, u64::saturating_add);
        let allowed = self.inner().ceiling.allows_all(all);
        allowed.map_err(|what| refused(ErrorKind::Vram, what))?;
        there_is(all)?;
        let (directory, dir) = directory(dir)?;
        let mut shared = Vec::new();
        let mut memory = Vec::new();
        for region in regions {
            let (_, buffer) = self.allocate(region.bytes, None)?;
            memory.push(self.memory(buffer.id, &region.name)?);
            shared.push(buffer);
        }
        let options = config.read_options(regions.len());
        let device = userfault::device()
            .inspect_err(|error| tracing::info!("{}: {error}", userfault::DEVICE))
            .ok();
        for buffer in &mut shared {
            buffer.userfault = device.as_ref().map(own_descriptor);
        }
        let mut inner = self.inner();
        inner.read = shared.iter().map(|b| (b.id, Reading::default())).collect();
        inner.userfault = device;
        drop(inner);
        let job = Job::Load {
            dir,
            memory,
            digest: config.digest.clone(),
            check: options.check,
            threads: options.threads,
            search: config.search.clone(),
            identities: self.inner().identities.clone(),
        };
        self.start(job, directory, None)?;
        Ok(shared)
    }

    /// Closes a buffer's mapping in a restored process, but for what has been read.
    pub(super) fn hold_back(
        &self,
        id: u64,
        address: u64,
        fd: Descriptor,
    ) -> Result<(), DriverError> {
        let buffer = self.buffer(id)?;
        let failed = || failed("userfaultfd");
        let fd = take_descriptor(fd).map_err(failed())?;
        let mut inner = self.inner();
        let reading = inner.read.entry(id).or_default();
        let mapping = Userfault::close_all(fd, address, buffer.bytes).map_err(failed())?;
        reading.mapping = Some(mapping);
        let opened = reading.open();
        if opened.is_err() {
            reading.mapping = None;
        }
        opened.map_err(failed())
    }

    /// Notes how much of a buffer has been read.
    pub(super) fn has_read(&self, id: u64, bytes: u64) {
        let mut inner = self.inner();
        let Some(reading) = inner.read.get_mut(&id) else {
            return;
        };
        reading.bytes = bytes;
        self.changed.notify_all();
        if let Err(error) = reading.open() {
            // The driver unmaps it as soon as it is done.
            tracing::debug!("userfaultfd: {error}");
        }
    }

    /// Waits until so many bytes from the start of a buffer have been read, if it is one that is read into.
    pub fn has_been_read(&self, id: u64, bytes: u64, limit: Duration) -> Result<(), DriverError> {
        let late = "the GPU memory was not read in time";
        self.answered(limit, late, |inner| {
            if inner.read.get(&id).is_none_or(|r| r.bytes >= bytes) {
                return Some(Ok(()));
            }
            match &inner.work {
                Work::None | Work::Ended { result: Ok(_), .. } => Some(Ok(())),
                Work::Ended {
                    result: Err(error), ..
                } => Some(Err(refused(ErrorKind::Vram, error.clone()))),
                Work::Running { .. } => None,
            }
        })
    }
}

fn own_descriptor(file: &File) -> Descriptor {
    Descriptor {
        pid: std::process::id() as i32,
        fd: file.as_raw_fd(),
    }
}
