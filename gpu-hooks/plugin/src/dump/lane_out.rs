//! Between the driver's checkpoint and CRIU's look at the memory: the lane's memory leaves the processes.

use super::Dump;
use crate::session::{Failed, failure_with, record_of};
use cryopod_cuda::image::{LANE_VERSION, Step};
use cryopod_cuda::lane::LaneBuffer;
use std::time::Instant;

impl Dump {
    /// What the driver was given by the lane leaves the processes.
    pub(super) fn lane_out(&mut self) -> Result<(), Failed> {
        let Some(config) = self.session.config.lane.clone() else {
            return Ok(());
        };
        let start = Instant::now();
        let mut given: Vec<(i32, u64, LaneBuffer)> = Vec::new();
        for captured in &self.session.lane.captured {
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
            let buffer = LaneBuffer {
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
        let used = self.session.lane_out(&config, &names)?;
        if config.required {
            if let Some(reason) = &self.session.lane.left_out {
                let remedy = "set `nvidia.lane` to \"auto\" to checkpoint without it";
                let what = format!("the lane cannot be used: {reason}");
                return Err(failure_with("lane", None, what, remedy));
            }
        }
        if !used {
            return Ok(());
        }
        let out = u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.session.image.version = LANE_VERSION;
        for (pid, micros, buffer) in given {
            let bytes = buffer.bytes;
            if let Some(record) = record_of(&mut self.session.image.processes, pid) {
                record.lane.push(buffer);
                record.vram_bytes = record.vram_bytes.max(Some(bytes));
            }
            self.time(pid, Step::Lane, micros + out);
        }
        let asked = self
            .session
            .config
            .gate_file
            .as_ref()
            .is_some_and(|file| file.exists());
        if !asked {
            // At the end of the dump an error could not be told any more.
            self.session.lane_done = self.session.lane_wait()?;
        }
        Ok(())
    }
}
