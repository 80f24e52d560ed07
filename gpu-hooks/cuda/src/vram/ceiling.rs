//! Bounds the host memory that processes may have allocated for their GPU memory.
//!
//! The memory is charged outside of the container. In a process where something else than the driver maps memory as the
//! driver does, that could ask for all that the host has. So a process gets its GPU memory as the driver reports it,
//! and a little more.

use super::Wanted;
use crate::messages::protocol::AgentGpu;
use crate::messages::report::GpuUser;
use std::collections::BTreeMap;

/// Extra over the driver's number: a quarter, for what the process allocates until it is locked, and so many bytes.
const SLACK: u64 = 1 << 30;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ceiling {
    processes: BTreeMap<i32, u64>,
    /// Of all processes: the memory of all GPUs. `None`: not known.
    all: Option<u64>,
}

fn with_slack(bytes: u64) -> u64 {
    bytes.saturating_add(bytes / 4).saturating_add(SLACK)
}

impl Ceiling {
    pub fn new(gpus: &[AgentGpu], users: &[GpuUser]) -> Self {
        let mut processes = BTreeMap::<i32, u64>::new();
        for user in users {
            let bytes = processes.entry(user.pid).or_default();
            *bytes = bytes.saturating_add(user.bytes);
        }
        let all = gpus
            .iter()
            .fold(0u64, |sum, gpu| sum.saturating_add(gpu.total_memory));
        Self {
            processes,
            all: (all > 0).then_some(all),
        }
    }

    /// Checks that a process that was given `had` bytes, out of `all` given bytes, may have more. An error names the
    /// bound.
    pub fn allows(&self, had: u64, all: u64, more: &Wanted) -> Result<(), String> {
        let mib = |bytes: u64| bytes >> 20;
        let (pid, bytes) = (more.pid, had.saturating_add(more.bytes));
        if let Some(used) = self.processes.get(&pid)
            && bytes > with_slack(*used)
        {
            return Err(format!(
                "process {pid} asks for {} MiB of host memory for its GPU memory, of which it has {} MiB",
                mib(bytes),
                mib(*used)
            ));
        }
        self.allows_all(all.saturating_add(more.bytes))
    }

    /// Checks that all together may have so much. An error names the bound.
    pub fn allows_all(&self, bytes: u64) -> Result<(), String> {
        match self.all {
            Some(all) if bytes > with_slack(all) => Err(format!(
                "{} MiB of host memory are asked for GPU memory, of which this host's GPUs have {} MiB",
                bytes >> 20,
                all >> 20
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpus::gpu::GpuUuid;

    const GIB: u64 = 1 << 30;

    fn ceiling() -> Ceiling {
        let gpu = AgentGpu {
            uuid: GpuUuid([1; 16]),
            name: String::new(),
            total_memory: 80 * GIB,
            compute_capability: None,
            free_memory: None,
            mig: None,
        };
        let user = |pid, bytes| GpuUser {
            pid,
            gpu: GpuUuid([1; 16]),
            bytes,
        };
        Ceiling::new(&[gpu], &[user(7, 3 * GIB), user(7, GIB)])
    }

    #[test]
    fn a_process_gets_what_it_has_on_gpus() {
        let ask = |pid, had, bytes| ceiling().allows(had, had, &Wanted { pid, bytes });
        assert_eq!(ask(7, 0, 4 * GIB), Ok(()));
        assert_eq!(ask(7, 4 * GIB, 2 * GIB), Ok(()));
        // One after the other.
        let error = ask(7, 4 * GIB, 2 * GIB + 1).unwrap_err();
        assert!(error.contains("it has 4096 MiB"), "{error}");
        assert!(ask(7, u64::MAX, u64::MAX).is_err());
        // The driver reports nothing for this one: the GPUs' memory is its bound.
        assert_eq!(ask(8, 0, 101 * GIB), Ok(()));
        assert!(ask(8, 0, 102 * GIB).is_err());
        assert!(ask(8, 60 * GIB, 60 * GIB).is_err());
        let unknown = Ceiling::default();
        let bytes = 1 << 50;
        assert_eq!(unknown.allows(0, 0, &Wanted { pid: 7, bytes }), Ok(()));
    }
}
