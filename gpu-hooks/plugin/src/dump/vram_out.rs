//! Removes the memory for VRAM files from the processes, between the driver's checkpoint and CRIU's dump of the memory.

use super::Dump;
use crate::session::{Failed, failure_with, record_of};
use cryopod_cuda::messages::image::{PRELOAD_VERSION, Step, VRAM_VERSION};
use cryopod_cuda::vram::VramBuffer;
use std::time::Instant;

impl Dump {
    pub(super) fn vram_out(&mut self) -> Result<(), Failed> {
        let Some(config) = self.session.config.vram.clone() else {
            return Ok(());
        };
        let start = Instant::now();
        let mut given: Vec<(i32, u64, VramBuffer)> = Vec::new();
        let vram = &self.session.vram;
        let preloaded = vram.preloaded.iter();
        let preloaded = preloaded.map(|m| (m.pid, 0, VramBuffer::of_preload(m.bytes)));
        let captured = vram.captured.iter();
        let captured =
            captured.map(|c| (c.pid, c.micros, VramBuffer::of_driver(c.address, c.bytes)));
        for (pid, micros, buffer) in preloaded.chain(captured) {
            let records = &self.session.image.processes;
            let record = records.iter().find(|r| r.host_pid == pid);
            let pids: Vec<String> = record
                .iter()
                .flat_map(|r| &r.ns_pids)
                .map(ToString::to_string)
                .collect();
            let number = given.iter().filter(|(of, ..)| *of == pid).count();
            let region = format!("{}-{number}", pids.join("."));
            given.push((pid, micros, VramBuffer { region, ..buffer }));
        }
        let names: Vec<String> = given
            .iter()
            .map(|(.., buffer)| buffer.region.clone())
            .collect();
        let used = self.session.vram_out(&config, &names)?;
        if config.required
            && let Some(reason) = &self.session.vram.left_out
        {
            let remedy = "set `nvidia.vram` to \"auto\" to checkpoint without it";
            let what = format!("the VRAM files cannot be used: {reason}");
            return Err(failure_with("vram", None, what, remedy));
        }
        if !used {
            return Ok(());
        }
        let out = cryopod_host::micros(start.elapsed());
        let preloaded = given.iter().any(|(.., buffer)| buffer.preload);
        self.session.image.version = if preloaded {
            PRELOAD_VERSION
        } else {
            VRAM_VERSION
        };
        for (pid, micros, buffer) in given {
            let (bytes, preload) = (buffer.bytes, buffer.preload);
            if let Some(record) = record_of(&mut self.session.image.processes, pid) {
                record.vram.push(buffer);
                record.vram_bytes = record.vram_bytes.max(Some(bytes));
            }
            if preload {
                continue;
            }
            self.time(pid, Step::Vram, micros + out);
        }
        let asked = self
            .session
            .config
            .action_script_file
            .as_ref()
            .is_some_and(|file| file.exists());
        if !asked && !self.session.config.copy_later {
            // At the end of the dump an error could not be reported any more.
            self.session.vram_done = self.session.vram_wait()?;
        }
        Ok(())
    }
}
