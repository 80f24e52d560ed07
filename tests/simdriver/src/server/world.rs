//! The state of the simulated machine: who holds how much memory on which GPU.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;

use serde_json::{Value, json};

use super::config::{Config, Gpu};
use super::faults::Faults;
use crate::abi::{
    CUDA_ERROR_INVALID_DEVICE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY, CuResult,
};
use crate::uuid::GpuUuid;

pub struct Alloc {
    pub gpu: GpuUuid,
    pub bytes: u64,
    /// Whether it belongs to a context rather than to the program.
    pub context: bool,
    pub memory: Arc<File>,
}

pub struct Session {
    pub pid: i32,
    pub allocs: BTreeMap<u64, Alloc>,
    pub managed: bool,
    pub ipc: bool,
}

impl Session {
    pub fn by_gpu(&self) -> BTreeMap<String, u64> {
        let mut out = BTreeMap::new();
        for a in self.allocs.values() {
            *out.entry(a.gpu.to_string()).or_default() += a.bytes;
        }
        out
    }
}

pub struct World {
    pub config: Config,
    /// Bytes that are taken away from a GPU by hand.
    pub reserved: BTreeMap<GpuUuid, u64>,
    pub sessions: BTreeMap<u64, Session>,
    pub faults: Faults,
    next: u64,
}

impl World {
    pub fn new(config: Config) -> Self {
        Self {
            config,
            reserved: BTreeMap::new(),
            sessions: BTreeMap::new(),
            faults: Faults::default(),
            next: 1,
        }
    }

    pub fn enter(&mut self, pid: i32) -> u64 {
        let id = self.next;
        self.next += 1;
        let session = Session {
            pid,
            allocs: BTreeMap::new(),
            managed: false,
            ipc: false,
        };
        self.sessions.insert(id, session);
        id
    }

    pub fn session(&mut self, id: u64) -> Result<&mut Session, CuResult> {
        self.sessions.get_mut(&id).ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    pub fn gpu(&self, uuid: GpuUuid) -> Option<&Gpu> {
        self.config.gpus.iter().find(|g| g.uuid == uuid)
    }

    /// Bytes that are not taken on this GPU.
    pub fn free_on(&self, gpu: &Gpu) -> u64 {
        let used: u64 = self
            .sessions
            .values()
            .flat_map(|s| s.allocs.values())
            .filter(|a| a.gpu == gpu.uuid)
            .map(|a| a.bytes)
            .sum();
        gpu.bytes
            .saturating_sub(used)
            .saturating_sub(self.reserved.get(&gpu.uuid).copied().unwrap_or(0))
    }

    pub fn alloc(&mut self, session: u64, address: u64, alloc: Alloc) -> Result<(), CuResult> {
        let gpu = self.gpu(alloc.gpu).ok_or(CUDA_ERROR_INVALID_DEVICE)?;
        if alloc.bytes > self.free_on(gpu) {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        let session = self.session(session)?;
        if session.allocs.contains_key(&address) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        session.allocs.insert(address, alloc);
        Ok(())
    }

    pub fn status(&self) -> Value {
        let gpus: Vec<Value> = self
            .config
            .gpus
            .iter()
            .map(|g| {
                let mut pids = BTreeMap::<String, u64>::new();
                for s in self.sessions.values() {
                    for a in s.allocs.values().filter(|a| a.gpu == g.uuid) {
                        *pids.entry(s.pid.to_string()).or_default() += a.bytes;
                    }
                }
                json!({
                    "uuid": g.uuid, "name": g.name, "minor": g.minor, "pci": g.pci, "mig": g.mig, "compute": g.compute,
                    "total": g.bytes, "free": self.free_on(g),
                    "reserved": self.reserved.get(&g.uuid).copied().unwrap_or(0),
                    "pids": pids,
                })
            })
            .collect();
        let clients: Vec<Value> = self
            .sessions
            .values()
            .map(|s| {
                let program: u64 = s
                    .allocs
                    .values()
                    .filter(|a| !a.context)
                    .map(|a| a.bytes)
                    .sum();
                json!({
                    "pid": s.pid, "bytes": program, "allocations": s.allocs.len(),
                    "managed": s.managed, "ipc": s.ipc, "gpus": s.by_gpu(),
                })
            })
            .collect();
        json!({
            "driver": self.config.driver, "gpus": gpus, "clients": clients, "faults": self.faults,
        })
    }
}
