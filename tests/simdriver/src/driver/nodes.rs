//! The device nodes: opened at `cuInit`, mapped in many small pieces, replaced by placeholders
//! at a checkpoint, opened and mapped again at a restore.
//!
//! Nothing here allocates after [`Nodes::open`], except that errors may.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Which node a descriptor or mapping is of. A GPU is named by its place in the process's list,
/// which may be another GPU after a restore.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Node {
    Ctl,
    Uvm,
    Gpu(usize),
}

/// An open node; `None` while checkpointed.
struct Open {
    node: Node,
    fd: Option<OwnedFd>,
}

/// A mapping; its address stays the same through a checkpoint.
struct Mapping {
    node: Node,
    address: usize,
    len: usize,
    real: bool,
}

/// What a process has of the device nodes.
pub struct Nodes {
    root: Vec<u8>,
    open: Vec<Open>,
    maps: Vec<Mapping>,
}

const MAPS_PER_GPU: usize = 24;
const MAPS_OF_UVM: usize = 4;

impl Nodes {
    /// Opens and maps what a CUDA process does: the control node several times, nvidia-uvm, and
    /// every GPU twice. `minors` are those of the process's GPUs.
    pub fn open(root: &Path, minors: &[u32]) -> io::Result<Self> {
        let mut n = Self {
            root: root.as_os_str().as_bytes().to_vec(),
            open: vec![],
            maps: vec![],
        };
        let gpus = (0..minors.len()).flat_map(|i| [Node::Gpu(i); 2]);
        for node in [Node::Ctl, Node::Ctl, Node::Uvm, Node::Ctl]
            .into_iter()
            .chain(gpus)
        {
            n.open.push(Open { node, fd: None });
        }
        n.reopen(minors)?;
        for (i, _) in minors.iter().enumerate() {
            for k in 0..MAPS_PER_GPU {
                n.map_new(Node::Gpu(i), 4096 << (k % 5));
            }
        }
        for _ in 0..MAPS_OF_UVM {
            n.map_new(Node::Uvm, 8192);
        }
        Ok(n)
    }

    /// Whether this GPU's node is there and opens.
    pub fn has_gpu(root: &Path, minor: u32) -> bool {
        let mut path = [0u8; 512];
        name(
            root.as_os_str().as_bytes(),
            Node::Gpu(0),
            &[minor],
            &mut path,
        )
        .is_some_and(|p| open_node(p).is_ok())
    }

    /// Whether the control node is there and opens.
    pub fn has_ctl(root: &Path) -> bool {
        let mut path = [0u8; 512];
        name(root.as_os_str().as_bytes(), Node::Ctl, &[], &mut path)
            .is_some_and(|p| open_node(p).is_ok())
    }

    /// Opens every node that is not open. On an error all are closed again.
    pub fn reopen(&mut self, minors: &[u32]) -> io::Result<()> {
        for i in 0..self.open.len() {
            if self.open[i].fd.is_some() {
                continue;
            }
            let mut path = [0u8; 512];
            let opened = name(&self.root, self.open[i].node, minors, &mut path)
                .ok_or_else(|| io::ErrorKind::InvalidInput.into())
                .and_then(open_node);
            match opened {
                Ok(fd) => self.open[i].fd = Some(fd),
                Err(e) => {
                    self.close();
                    return Err(e);
                }
            }
        }
        Ok(())
    }

    /// Closes every node. Mappings stay as they are.
    pub fn close(&mut self) {
        for o in &mut self.open {
            o.fd = None;
        }
    }

    pub fn park(&mut self) {
        for m in &mut self.maps {
            if m.real {
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
                m.real = map_at(m.address, m.len, libc::PROT_NONE, flags, -1).is_none();
            }
        }
    }

    pub fn unpark(&mut self) -> io::Result<()> {
        for i in 0..self.maps.len() {
            let Mapping {
                node,
                address,
                len,
                real,
            } = self.maps[i];
            let Some(fd) = self.fd(node).filter(|_| !real) else {
                continue;
            };
            let flags = libc::MAP_PRIVATE | libc::MAP_FIXED;
            let prot = libc::PROT_READ | libc::PROT_WRITE;
            if map_at(address, len, prot, flags, fd).is_none() {
                return Err(io::Error::last_os_error());
            }
            do_not_fork(node, address, len);
            self.maps[i].real = true;
        }
        Ok(())
    }

    /// Adds a mapping of this node. A node that cannot be mapped is left unmapped.
    pub fn map_new(&mut self, node: Node, len: usize) -> Option<usize> {
        let fd = self.fd(node)?;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let address = map_at(0, len, prot, libc::MAP_PRIVATE | libc::MAP_NORESERVE, fd)?;
        do_not_fork(node, address, len);
        self.maps.push(Mapping {
            node,
            address,
            len,
            real: true,
        });
        Some(address)
    }

    fn fd(&self, node: Node) -> Option<i32> {
        self.open
            .iter()
            .find(|o| o.node == node)?
            .fd
            .as_ref()
            .map(AsRawFd::as_raw_fd)
    }
}

/// The path of a node, written into `path`.
fn name<'a>(root: &[u8], node: Node, minors: &[u32], path: &'a mut [u8; 512]) -> Option<&'a CStr> {
    use io::Write;
    let mut rest = &mut path[..511];
    rest.write_all(root).ok()?;
    match node {
        Node::Ctl => rest.write_all(b"/nvidiactl").ok()?,
        Node::Uvm => rest.write_all(b"/nvidia-uvm").ok()?,
        Node::Gpu(i) => write!(rest, "/nvidia{}", minors.get(i)?).ok()?,
    }
    CStr::from_bytes_until_nul(path).ok()
}

/// Opens a node; anything but a character device is refused (a stale regular file, say).
fn open_node(path: &CStr) -> io::Result<OwnedFd> {
    // SAFETY: the path is a C string; the descriptor that comes back belongs to nobody else; an
    // all-zero stat is a valid value that fstat fills.
    unsafe {
        let fd = libc::open(path.as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        let fd = OwnedFd::from_raw_fd(fd);
        let mut st: libc::stat = std::mem::zeroed();
        if libc::fstat(fd.as_raw_fd(), &mut st) != 0 {
            return Err(io::Error::last_os_error());
        }
        if st.st_mode & libc::S_IFMT != libc::S_IFCHR {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(fd)
    }
}

/// Maps something, at `address` if that is not 0.
fn map_at(address: usize, len: usize, prot: i32, flags: i32, fd: i32) -> Option<usize> {
    // SAFETY: without MAP_FIXED the kernel picks a free range; with it the range is one that this
    // module mapped itself and that no reference points into.
    let p = unsafe {
        libc::mmap(
            std::ptr::without_provenance_mut(address),
            len,
            prot,
            flags,
            fd,
            0,
        )
    };
    (p != libc::MAP_FAILED).then(|| p.addr())
}

/// Keeps mappings of nvidia-uvm out of forked children, as the driver does; those of the other nodes are inherited.
fn do_not_fork(node: Node, address: usize, len: usize) {
    if node != Node::Uvm {
        return;
    }
    // SAFETY: the range is a mapping of this module.
    unsafe {
        libc::madvise(
            std::ptr::without_provenance_mut(address),
            len,
            libc::MADV_DONTFORK,
        )
    };
}
