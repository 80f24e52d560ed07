//! Runs the steps of a dump that concern the driver's custom storage.

use crate::criu::{self, Level};
use crate::session::{Failed, Session, failure};
use crate::vram::{StoredMemory, image_directory, open, test_fails};
use cryopod_cuda::protocol::{Op, StorageTo, TakenOut, WriteTo};
use cryopod_cuda::released::inject;
use std::io;

impl Session {
    /// How so many processes are checkpointed with custom storage; `None`: without it.
    pub fn storage_to(&self, processes: usize) -> Option<StorageTo> {
        let config = self.config.vram.as_ref().filter(|c| c.custom_storage)?;
        let threads = (config.threads_for(processes) / processes.max(1)).max(1);
        // The writer begins with all the memory that there will be.
        let alone = processes == 1 && !self.vram.writes;
        let dir = image_directory().filter(|_| alone);
        let write = dir.map(|dir| WriteTo {
            dir,
            config: config.clone(),
            processes: 1,
        });
        Some(StorageTo { threads, write })
    }

    /// Takes note of what became of a process's GPU memory at its checkpoint.
    pub fn storage_out(&mut self, pid: i32, tid: i32, taken: &TakenOut) -> Result<(), Failed> {
        match taken {
            TakenOut::Without => {}
            TakenOut::LeftOut(reason) => {
                let text = format!("process {pid}: custom storage is not used: {reason}");
                criu::log(Level::Warn, &text);
            }
            TakenOut::Out {
                buffer,
                bytes,
                writes,
            } => {
                self.vram.writes |= writes;
                let failed = |error: io::Error| failure("vram", Some(pid), error.to_string());
                let file = open(buffer).map_err(failed)?;
                self.vram.stored.push(StoredMemory {
                    pid,
                    tid,
                    id: buffer.id,
                    bytes: *bytes,
                    file,
                });
                let mib = bytes >> 20;
                let text = format!("process {pid}: {mib} MiB copied from custom storage");
                criu::log(Level::Info, &text);
            }
        }
        Ok(())
    }

    /// The driver has the memory of a process again.
    pub fn storage_back(&mut self, pid: i32) {
        self.vram.stored.retain(|memory| memory.pid != pid);
    }

    /// After a dump that failed: if the agent is gone, each process gets its memory mapped and keeps it, so that another
    /// agent can restore it.
    pub fn storage_recover(&mut self) {
        if self.vram.stored.is_empty() || self.ask(Op::Hello).is_ok() {
            return;
        }
        let config = self.config.vram.clone().unwrap_or_default();
        for memory in std::mem::take(&mut self.vram.stored) {
            let StoredMemory { pid, tid, file, .. } = memory;
            let map = || {
                test_fails(&config, "keep")?;
                let bytes = file.metadata()?.len();
                let mut injection = inject(pid, tid)?;
                let mapped = injection.map_anywhere(bytes, &file).map(drop);
                mapped.and(injection.end())
            };
            let text = match map() {
                Ok(()) => format!(
                    "process {pid} keeps its GPU memory in host memory, and waits: `cryopod resume` brings it back"
                ),
                Err(error) => format!("process {pid}: its GPU memory is lost: {error}"),
            };
            criu::log(Level::Error, &text);
        }
    }
}
