//! The steps of a checkpoint and a restore with the driver's custom storage.
//!
//! The driver has no call that takes an operation back. A process whose operation cannot be completed is lost, and the
//! error says so.

use super::super::custom_storage::{Source, Stores};
use super::super::driver::Driver;
use super::super::gpu::GpuPair;
use super::super::procfs;
use super::super::protocol::{DriverError, ErrorKind, ProcessState, StorageTo, TakenOut};
use super::Agent;
use std::time::Duration;

const OUT: &str = "its GPU memory is in the driver's hands and cannot be taken back: the process cannot go on, restart its container";
const IN: &str = "its GPU memory is only in part on the GPU: the process cannot go on";

fn lost(mut error: DriverError, why: &str) -> DriverError {
    error.message = format!("{}; {why}", error.message);
    error
}

impl<D: Driver> Agent<D> {
    /// Checkpoints a process. [`TakenOut::LeftOut`]: it is locked as before.
    pub(super) fn checkpoint_to_storage(
        &self,
        pid: i32,
        to: &StorageTo,
    ) -> Result<TakenOut, DriverError> {
        let Some(driver) = self.driver.custom_storage() else {
            let what = "the driver has no custom storage (CUDA 13.4, driver 615)";
            return Ok(TakenOut::LeftOut(what.into()));
        };
        if let Err(error) = self.stores.prepare(pid, &self.vram_files) {
            return Ok(TakenOut::LeftOut(error.message));
        }
        let handed = match driver.begin_checkpoint(pid) {
            Ok(handed) => handed,
            Err(cause) if self.driver.state(pid) == Ok(ProcessState::Locked) => {
                return Ok(TakenOut::LeftOut(cause.describe("custom storage").message));
            }
            Err(cause) => {
                let error = self.after_failure(pid, &cause, "checkpoint");
                let begun = self.driver.state(pid) == Ok(ProcessState::Checkpointing);
                return Err(if begun { lost(error, OUT) } else { error });
            }
        };
        self.record(pid, |entry| entry.now = ProcessState::Checkpointing);
        let copied = self.stores.copy_out(pid, &handed, to, &self.vram_files);
        let taken = copied.map_err(|error| lost(error, OUT))?;
        if let Err(cause) = driver.complete(handed) {
            // Only the driver knows whether it has let go of the memory.
            if self.driver.state(pid) != Ok(ProcessState::Checkpointed) {
                if taken.writes {
                    self.vram_files.call_off();
                }
                // The driver may have released the memory all the same: this is then the only copy.
                self.stores.note(pid, taken.buffer.id);
                let error = self.after_failure(pid, &cause, "to complete the checkpoint");
                return Err(lost(error, OUT));
            }
            tracing::warn!(pid, "completing the checkpoint: {}", cause.text);
        }
        self.stores.note(pid, taken.buffer.id);
        self.record(pid, |entry| entry.now = ProcessState::Checkpointed);
        Ok(TakenOut::Out {
            buffer: taken.buffer,
            bytes: taken.bytes,
            writes: taken.writes,
        })
    }

    /// Restores a process from what custom storage has taken.
    pub(super) fn restore_from_storage(
        &self,
        pid: i32,
        source: &Source,
        map: &[GpuPair],
        threads: usize,
        limit: Duration,
    ) -> Result<(), DriverError> {
        let driver = self.driver.custom_storage().ok_or_else(|| DriverError {
            kind: ErrorKind::NotSupported,
            code: None,
            message: "its GPU memory is in custom storage, which this driver does not have (CUDA 13.4, driver 615)"
                .into(),
        })?;
        self.stores.prepare_restore(source, map)?;
        let handed = match driver.begin_restore(pid, map) {
            Ok(handed) => handed,
            Err(cause) => return Err(self.after_failure(pid, &cause, "restore")),
        };
        self.record(pid, |entry| entry.now = ProcessState::Restoring);
        let files = &self.vram_files;
        let copied = self
            .stores
            .copy_in(source, &handed, map, threads, limit, files);
        copied.map_err(|error| lost(error, IN))?;
        if let Err(cause) = driver.complete(handed) {
            if self.driver.state(pid) != Ok(ProcessState::Locked) {
                let error = self.after_failure(pid, &cause, "to complete the restore");
                return Err(lost(error, IN));
            }
            tracing::warn!(pid, "completing the restore: {}", cause.text);
        }
        self.record(pid, |entry| entry.now = ProcessState::Locked);
        self.stores.forget(pid);
        // Where somebody traces it, it keeps nothing.
        let traced = procfs::status(pid).is_ok_and(|status| status.tracer != 0);
        if let (false, Ok(tid)) = (traced, self.driver.restore_tid(pid)) {
            Stores::unmap_kept(pid, tid);
        }
        Ok(())
    }
}
