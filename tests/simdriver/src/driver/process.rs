//! The state of the driver in this process, and `cuInit`.

use std::io::{self, Write as _};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, UnixAddr};

use super::gate::Gate;
use super::locate;
use super::mailbox::Mailbox;
use super::nodes::Nodes;
use super::shared::{Import, ShmFile};
use super::thread;
use super::vmm::Vmm;
use crate::abi::*;
use crate::uuid::GpuUuid;
use crate::wire::{self, Frame, op};

/// A GPU that the process can use. After a restore it may be another one.
pub struct Gpu {
    pub uuid: GpuUuid,
    pub minor: u32,
    pub total: u64,
    /// The model, NUL-padded.
    pub name: [u8; 64],
    pub compute: (u64, u64),
}

/// A piece of device memory that the process holds.
#[derive(Clone, Copy)]
pub struct Block {
    pub address: u64,
    pub bytes: u64,
    pub gpu: usize,
    pub context: bool,
}

/// The mapping that holds device memory while checkpointed.
#[derive(Clone, Copy)]
pub struct Image {
    pub address: usize,
    pub len: usize,
}

/// What API calls work on, inside the gate, and the restore thread with the gate closed.
pub struct Inner {
    /// The connection to the device server; none while checkpointed.
    pub server: Option<UnixStream>,
    pub gpus: Vec<Gpu>,
    pub ordinals: Vec<usize>,
    pub nodes: Nodes,
    pub blocks: Vec<Block>,
    pub next_address: u64,
    pub context_bytes: u64,
    pub image: Option<Image>,
    pub imports: Vec<Import>,
    pub vmm: Vmm,
    /// What shows that others may import this process's memory by CUDA IPC.
    pub exported: Option<ShmFile>,
    /// How a checkpoint fills its memory: from the start to the end, unless CUSIM_FILL says otherwise.
    pub fill: Fill,
    /// Set when a restore ran out of memory: the real driver never recovers from that.
    pub poisoned: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Fill {
    Up,
    Down,
    Twice,
}

impl Fill {
    fn from_environment() -> Self {
        match std::env::var("CUSIM_FILL").as_deref() {
            Ok("down") => Self::Down,
            Ok("twice") => Self::Twice,
            _ => Self::Up,
        }
    }
}

pub struct Process {
    pub gate: Gate,
    inner: Mutex<Inner>,
    pub mailbox: Mailbox,
    pub socket: PathBuf,
    pub driver_major: u64,
    pub cuda_version: i32,
    /// The process that called `cuInit`; a forked child is another one.
    owner: u32,
}

static PROCESS: OnceLock<Process> = OnceLock::new();
static INIT: Mutex<()> = Mutex::new(());
/// The server connection, for the fork handler: -1 for none.
static SERVER_FD: AtomicI32 = AtomicI32::new(-1);

impl Process {
    /// The state. Poisoning is ignored: a panic never crosses this library's boundary alive.
    pub fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Sends a request to the server; its result code becomes the error.
    pub fn ask(&self, op: u64, args: &[u64]) -> Result<Frame, CuResult> {
        let server = self.server.as_ref().ok_or(CUDA_ERROR_UNKNOWN)?;
        checked(wire::ask(server, op, args))
    }

    pub fn set_server(&mut self, server: Option<UnixStream>) {
        SERVER_FD.store(server.as_ref().map_or(-1, AsRawFd::as_raw_fd), SeqCst);
        self.server = server;
    }
}

/// The words of a reply that says success.
pub fn checked(reply: io::Result<Frame>) -> Result<Frame, CuResult> {
    let frame = reply.map_err(|_| CUDA_ERROR_UNKNOWN)?;
    match CuResult::try_from(frame[0]) {
        Ok(0) => Ok(frame),
        Ok(code) => Err(code),
        Err(_) => Err(CUDA_ERROR_UNKNOWN),
    }
}

/// The driver, if `cuInit` was called in this very process.
pub fn process() -> Result<&'static Process, CuResult> {
    match PROCESS.get() {
        Some(p) if p.owner == std::process::id() => Ok(p),
        _ => Err(CUDA_ERROR_NOT_INITIALIZED),
    }
}

/// Runs an API call: it waits while the process is locked.
pub fn api<T>(f: impl FnOnce(&mut Inner) -> Result<T, CuResult>) -> Result<T, CuResult> {
    let p = process()?;
    let _inside = p.gate.enter();
    f(&mut p.inner())
}

/// Connects to the device server. The socket has a name as those of CUDA's library have, from which anyone can tell that it
/// is the driver's own.
pub fn connect(server: &Path) -> io::Result<UnixStream> {
    let unix = socket::socket(
        AddressFamily::Unix,
        SockType::Stream,
        SockFlag::SOCK_CLOEXEC,
        None,
    )?;
    // A restore comes here, too, and must not use the heap.
    let mut name = [0; 64];
    let mut rest = &mut name[..];
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_or(0, |now| now.as_nanos());
    write!(rest, "cuda-simdriver-{}-{now}", std::process::id())?;
    let unused = rest.len();
    let name = UnixAddr::new_abstract(&name[..name.len() - unused])?;
    socket::bind(unix.as_raw_fd(), &name)?;
    socket::connect(unix.as_raw_fd(), &UnixAddr::new(server)?)?;
    Ok(unix.into())
}

pub fn init() -> Result<(), CuResult> {
    let _one = INIT.lock().unwrap_or_else(PoisonError::into_inner);
    if PROCESS.get().is_some() {
        return process().map(|_| ());
    }
    let places = locate::places();
    if !Nodes::has_ctl(&places.dev) {
        return Err(CUDA_ERROR_NO_DEVICE);
    }
    let server = connect(&places.socket).map_err(|_| CUDA_ERROR_NO_DEVICE)?;
    let hello = checked(wire::ask(
        &server,
        op::HELLO,
        &[0, u64::from(std::process::id())],
    ))?;
    let mut gpus = Vec::new();
    for i in 0..hello[1] {
        let gpu = gpu_info(&server, i)?;
        if Nodes::has_gpu(&places.dev, gpu.minor) {
            gpus.push(gpu);
        }
    }
    if gpus.is_empty() {
        return Err(CUDA_ERROR_NO_DEVICE);
    }
    let minors: Vec<u32> = gpus.iter().map(|g| g.minor).collect();
    let nodes =
        Nodes::open(Path::new(&places.dev), &minors).map_err(|_| CUDA_ERROR_OPERATING_SYSTEM)?;
    let mailbox = Mailbox::create().map_err(|_| CUDA_ERROR_OPERATING_SYSTEM)?;
    let mut inner = Inner {
        server: None,
        ordinals: visible(&gpus, std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref()),
        gpus,
        nodes,
        blocks: Vec::new(),
        next_address: 0x1000_0000_0000,
        context_bytes: hello[4],
        image: None,
        imports: Vec::new(),
        vmm: Vmm::default(),
        exported: None,
        fill: Fill::from_environment(),
        poisoned: false,
    };
    inner.set_server(Some(server));
    // SAFETY: the handler only makes a system call and touches an atomic.
    unsafe { libc::pthread_atfork(None, None, Some(after_fork)) };
    let set = PROCESS.set(Process {
        gate: Gate::new(),
        inner: Mutex::new(inner),
        mailbox,
        socket: places.socket,
        driver_major: hello[2],
        cuda_version: i32::try_from(hello[3]).unwrap_or(0),
        owner: std::process::id(),
    });
    if set.is_err() {
        return Err(CUDA_ERROR_UNKNOWN);
    }
    thread::start(process()?).map_err(|_| CUDA_ERROR_OPERATING_SYSTEM)
}

/// In a forked child: the connection to the server is the simulation's own, no part of what a
/// child of a CUDA process inherits. The descriptors of the nodes are, and stay.
extern "C" fn after_fork() {
    let fd = SERVER_FD.swap(-1, SeqCst);
    if fd >= 0 {
        // SAFETY: the descriptor is the child's copy; nothing in the child uses it, since every
        // entry of this library is refused there.
        unsafe { libc::close(fd) };
    }
}

/// Asks for one GPU of the server. Uses no heap.
pub fn gpu_info(server: &UnixStream, index: u64) -> Result<Gpu, CuResult> {
    let f = checked(wire::ask(server, op::GPU_INFO, &[index]))?;
    let mut name = [0u8; 64];
    for (chunk, w) in name.chunks_exact_mut(8).zip(&f[5..13]) {
        chunk.copy_from_slice(&w.to_le_bytes());
    }
    Ok(Gpu {
        uuid: GpuUuid::from_words([f[2], f[3]]),
        minor: u32::try_from(f[1]).map_err(|_| CUDA_ERROR_UNKNOWN)?,
        total: f[4],
        name,
        compute: (f[13] >> 8, f[13] & 0xff),
    })
}

/// GPUs by ordinal. As with the real driver the list ends at the first entry that names no GPU.
fn visible(gpus: &[Gpu], list: Option<&str>) -> Vec<usize> {
    let Some(list) = list else {
        return (0..gpus.len()).collect();
    };
    let mut out = Vec::new();
    for entry in list.split(',').map(str::trim) {
        let found = match entry.parse::<usize>() {
            Ok(i) => (i < gpus.len()).then_some(i),
            Err(_) if entry.starts_with("GPU-") => gpus
                .iter()
                .position(|g| g.uuid.to_string().starts_with(entry)),
            Err(_) => None,
        };
        match found {
            Some(i) if !out.contains(&i) => out.push(i),
            _ => break,
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_devices() {
        let gpus: Vec<Gpu> = (0..3)
            .map(|i| Gpu {
                uuid: GpuUuid::numbered(i),
                minor: 0,
                total: 0,
                name: [0; 64],
                compute: (9, 0),
            })
            .collect();
        assert_eq!(visible(&gpus, None), [0, 1, 2]);
        assert_eq!(visible(&gpus, Some("2,1")), [2, 1]);
        assert_eq!(visible(&gpus, Some("0,2,-1,1")), [0, 2]);
        assert_eq!(visible(&gpus, Some("")), [] as [usize; 0]);
        assert_eq!(
            visible(&gpus, Some("GPU-c0da0000-5130-4d00-8000-000000000001")),
            [1]
        );
    }
}
