//! Memory of other processes: exported, imported, and what an import does to a restore.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use super::locate;
use super::memory;
use super::process::{Inner, checked};
use crate::abi::*;
use crate::wire::{self, op};

/// Addresses of imports start at multiples of this.
const ALIGN: u64 = 2 << 20;
/// Size of the file that shows exported memory.
const SHM_BYTES: usize = 4096;

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `cuIpcOpenMemHandle`: shows in `/dev/shm`.
    Ipc,
    Cumem,
    /// NCCL's P2P/IPC: fails as CUDA IPC does; whether it shows in `/dev/shm` is not known.
    NcclIpc,
}

pub struct Import {
    address: u64,
    bytes: u64,
    /// The exporter, as the server knows it, and the address there.
    session: u64,
    remote: u64,
    pub refusal: CuResult,
    _file: Option<ShmFile>,
}

impl Import {
    pub fn memory(&self, inner: &Inner) -> Result<File, CuResult> {
        let server = inner.server.as_ref().ok_or(CUDA_ERROR_UNKNOWN)?;
        let asked = wire::ask_fd(server, op::GET_FD, &[self.remote, self.session]);
        let (frame, file) = asked.map_err(|_| CUDA_ERROR_UNKNOWN)?;
        checked(Ok(frame))?;
        file.ok_or(CUDA_ERROR_UNKNOWN)
    }

    pub fn sum(&self, inner: &Inner, offset: u64, len: u64) -> Result<u64, CuResult> {
        let asked = inner.ask(op::SUM, &[self.remote, offset, len, self.session])?;
        Ok(asked[1])
    }
}

/// The import that holds a range, and the range's offset in it.
pub fn find(inner: &Inner, address: CuDevicePtr, len: u64) -> Option<(&Import, u64)> {
    inner.imports.iter().find_map(|import| {
        let offset = address.checked_sub(import.address)?;
        (offset < import.bytes && len <= import.bytes - offset).then_some((import, offset))
    })
}

/// A handle of an allocation; with `shown` as CUDA IPC makes it.
pub fn export(inner: &mut Inner, address: CuDevicePtr, shown: bool) -> Result<Handle, CuResult> {
    let (block, offset) = memory::find(inner, address, 0)?;
    if offset != 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let session = inner.ask(op::MARK, &[2])?[1];
    let pid = std::process::id();
    if shown && inner.exported.is_none() {
        inner.exported = Some(ShmFile::open(pid, true)?);
    }
    Ok(Handle([
        session,
        address,
        block.bytes,
        pid.into(),
        0,
        0,
        0,
        0,
    ]))
}

pub fn import(inner: &mut Inner, handle: &Handle, kind: Kind) -> Result<CuDevicePtr, CuResult> {
    let [session, remote, bytes, pid, ..] = handle.0;
    let pid = u32::try_from(pid).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
    // The real driver does not let a process open its own.
    if bytes == 0 || pid == std::process::id() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let file = match kind {
        Kind::Ipc => Some(ShmFile::open(pid, false)?),
        Kind::Cumem | Kind::NcclIpc => None,
    };
    let address = inner.next_address;
    let import = Import {
        address,
        bytes,
        session,
        remote,
        refusal: match kind {
            Kind::Cumem => CUDA_ERROR_NOT_SUPPORTED,
            Kind::Ipc | Kind::NcclIpc => CUDA_ERROR_INVALID_VALUE,
        },
        _file: file,
    };
    import.memory(inner)?;
    inner.next_address = address + bytes.next_multiple_of(ALIGN);
    inner.imports.push(import);
    Ok(address)
}

pub fn close(inner: &mut Inner, address: CuDevicePtr) -> Result<(), CuResult> {
    let at = inner.imports.iter().position(|i| i.address == address);
    inner.imports.remove(at.ok_or(CUDA_ERROR_INVALID_VALUE)?);
    Ok(())
}

/// `cuda.shm.UID.PID.N` in `/dev/shm`, open and mapped: exporter and importers of CUDA IPC have it.
pub struct ShmFile {
    _file: File,
    address: usize,
}

impl ShmFile {
    fn path(pid: u32) -> PathBuf {
        // SAFETY: a number.
        let uid = unsafe { libc::getuid() };
        let shm = Path::new(&locate::places().dev).join("shm");
        shm.join(format!("cuda.shm.{uid:x}.{pid:x}.1"))
    }

    fn open(pid: u32, make: bool) -> Result<Self, CuResult> {
        let path = Self::path(pid);
        let system = |_| CUDA_ERROR_OPERATING_SYSTEM;
        if let (true, Some(directory)) = (make, path.parent()) {
            fs::create_dir_all(directory).map_err(system)?;
        }
        let mut options = File::options();
        let file = options.read(true).write(true).create(make).open(path);
        let file = file.map_err(system)?;
        file.set_len(SHM_BYTES as u64).map_err(system)?;
        // SAFETY: a new mapping of a file that is as long.
        let p = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                SHM_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if p == libc::MAP_FAILED {
            return Err(CUDA_ERROR_OPERATING_SYSTEM);
        }
        Ok(Self {
            _file: file,
            address: p.expose_provenance(),
        })
    }
}

impl Drop for ShmFile {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and nothing refers into it.
        unsafe {
            libc::munmap(
                std::ptr::with_exposed_provenance_mut(self.address),
                SHM_BYTES,
            )
        };
    }
}
