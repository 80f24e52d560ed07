//! Removes the memory for VRAM files from the processes, between the driver's checkpoint and CRIU's dump of the memory.

use super::Dump;
use crate::session::{Failed, failure_with, record_of};
use cryopod_cuda::image::{Step, VRAM_VERSION};
use cryopod_cuda::vram::VramBuffer;
use std::time::Instant;

impl Dump {
    pub(super) fn vram_out(&mut self) -> Result<(), Failed> {
        let Some(config) = self.session.config.vram.clone() else {
            return Ok(());
        };
        let start = Instant::now();
        let mut given: Vec<(i32, u64, VramBuffer)> = Vec::new();
        for captured in &self.session.vram.captured {
            let pids = self
                .session
                .image
                .processes
                .iter()
                .find(|r| r.host_pid == captured.pid);
            let pids: Vec<String> = pids
                .iter()
                .flat_map(|r| &r.ns_pids)
                .map(ToString::to_string)
                .collect();
            let number = given
                .iter()
                .filter(|(pid, ..)| *pid == captured.pid)
                .count();
            let buffer = VramBuffer {
                address: captured.address,
                bytes: captured.bytes,
                region: format!("{}-{number}", pids.join(".")),
            };
            given.push((captured.pid, captured.micros, buffer));
        }
        let names: Vec<String> = given
            .iter()
            .map(|(.., buffer)| buffer.region.clone())
            .collect();
        let used = self.session.vram_out(&config, &names)?;
        if config.required {
            if let Some(reason) = &self.session.vram.left_out {
                let remedy = "set `nvidia.vram` to \"auto\" to checkpoint without it";
                let what = format!("the VRAM files cannot be used: {reason}");
                return Err(failure_with("vram", None, what, remedy));
            }
        }
        if !used {
            return Ok(());
        }
        let out = u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.session.image.version = VRAM_VERSION;
        for (pid, micros, buffer) in given {
            let bytes = buffer.bytes;
            if let Some(record) = record_of(&mut self.session.image.processes, pid) {
                record.vram.push(buffer);
                record.vram_bytes = record.vram_bytes.max(Some(bytes));
            }
            self.time(pid, Step::Vram, micros + out);
        }
        let asked = self
            .session
            .config
            .action_script_file
            .as_ref()
            .is_some_and(|file| file.exists());
        if !asked {
            // At the end of the dump an error could not be reported any more.
            self.session.vram_done = self.session.vram_wait()?;
        }
        Ok(())
    }
}
