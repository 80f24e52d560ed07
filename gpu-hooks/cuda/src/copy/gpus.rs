//! The GPUs as CUDA numbers them in this program, and what copies their memory.

use super::Copier;
use crate::gpus::gpu::GpuUuid;
use crate::messages::protocol::{AgentGpu, DriverError, ErrorKind};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

#[derive(Default)]
pub struct Gpus {
    driver: OnceLock<Driver>,
    copier: Mutex<Option<Result<Arc<Copier>, String>>>,
}

struct Driver {
    library: PathBuf,
    /// In CUDA's order.
    gpus: Vec<AgentGpu>,
}

impl Gpus {
    /// Sets the driver's library, and the GPUs in CUDA's order. Without it nothing is copied.
    pub fn use_driver(&self, library: PathBuf, gpus: &[AgentGpu]) {
        let gpus = gpus.to_vec();
        let _ = self.driver.set(Driver { library, gpus });
    }

    fn loaded(&self) -> std::sync::MutexGuard<'_, Option<Result<Arc<Copier>, String>>> {
        self.copier.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn copier(&self) -> Result<Arc<Copier>, DriverError> {
        let mut loaded = self.loaded();
        let copier = loaded.get_or_insert_with(|| {
            let driver = self.driver.get().ok_or("the driver is not known")?;
            Copier::load(&driver.library).map_err(|error| error.cause)
        });
        copier.clone().map_err(|message| DriverError {
            kind: ErrorKind::NotSupported,
            code: None,
            message,
        })
    }

    /// Frees what this program itself has on the GPUs, which takes the driver a moment, once nothing is copied any more. The
    /// next copy makes it anew.
    pub fn let_go(&self) {
        let copier = self.loaded().take();
        drop(copier);
    }

    /// Makes these GPUs ready, and the first, which an import needs. `in_bulk`: with buffers for more than a few blocks.
    pub fn prepare(&self, used: &[GpuUuid], in_bulk: bool) -> Result<(), DriverError> {
        let Some(driver) = self.driver.get() else {
            return Ok(());
        };
        let copier = &*self.copier()?;
        std::thread::scope(|scope| {
            let devices = (0i32..).zip(&driver.gpus);
            let devices = devices.filter(|(device, gpu)| *device == 0 || used.contains(&gpu.uuid));
            let all: Vec<_> = devices
                .map(|(device, _)| scope.spawn(move || copier.prepare(device, in_bulk)))
                .collect();
            all.into_iter()
                .try_for_each(|one| one.join().unwrap_or(Ok(())))
        })
    }
}
