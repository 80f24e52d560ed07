//! Processes that work together: ranks as NCCL's, as far as these show from outside, or an exporter and importers by CUDA
//! IPC. Sums are added up over all ranks; what carries them is chosen by NCCL's variables, as NCCL chooses.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::abi::{CuDevicePtr, Handle};
use crate::cuda::Cuda;

/// Words of a rank on the board: handle, sum, generation; then those of an exchange.
const WORDS: usize = 32;
const SUM: usize = 8;
const GENERATION: usize = 9;
const NAME: usize = 10;
const TURN: usize = 16;
/// Value and wish to stop, in turn for even and odd turns.
const VALUE: usize = 17;
const STOP: usize = 19;
const POLL: Duration = Duration::from_micros(300);

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// `P2P/CUMEM`
    Cumem,
    /// `P2P/IPC`
    Ipc,
    /// `SHM/CUMEM`: cuMem host memory
    CumemHost,
    /// `SHM`: a file in `/dev/shm`
    Shm,
    /// `NET/Socket`
    Socket,
    /// CUDA IPC without NCCL: rank 0 exports, the others import
    Plain,
}

impl Way {
    /// NCCL's choice.
    pub fn of_nccl() -> Self {
        let is = |name: &str, value: &str| std::env::var(name).is_ok_and(|v| v == value);
        match () {
            () if !is("NCCL_P2P_DISABLE", "1") && is("NCCL_CUMEM_ENABLE", "0") => Self::Ipc,
            () if !is("NCCL_P2P_DISABLE", "1") => Self::Cumem,
            () if is("NCCL_SHM_DISABLE", "1") => Self::Socket,
            () if is("NCCL_CUMEM_HOST_ENABLE", "0") => Self::Shm,
            () => Self::CumemHost,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Cumem => "P2P/CUMEM",
            Self::Ipc | Self::Plain => "P2P/IPC",
            Self::CumemHost => "SHM/CUMEM",
            Self::Shm => "SHM/direct",
            Self::Socket => "NET/Socket",
        }
    }

    fn imports(self) -> bool {
        !matches!(self, Self::Shm | Self::Socket)
    }
}

/// What all ranks have in common; made before they are forked.
pub struct Team {
    way: Way,
    ranks: usize,
    board: Shared,
    wires: Vec<(usize, usize, UnixStream, UnixStream)>,
}

impl Team {
    pub fn new(way: Way, ranks: usize) -> Result<Self> {
        let mut wires = Vec::new();
        for a in 0..ranks {
            for b in a + 1..ranks {
                if way == Way::Socket {
                    let (one, other) = UnixStream::pair()?;
                    wires.push((a, b, one, other));
                }
            }
        }
        Ok(Self {
            way,
            ranks,
            board: Shared::map(ranks, None)?,
            wires,
        })
    }
}

pub struct Rank {
    team: Team,
    rank: usize,
    label: String,
    cuda: Cuda,
    own: (CuDevicePtr, usize),
    turn: u64,
    generation: u64,
    joined: Option<Joined>,
    pub expected: u64,
}

/// What there is while a communicator is up.
struct Joined {
    imports: Vec<CuDevicePtr>,
    file: Option<Shared>,
    _socket: Option<UnixDatagram>,
}

impl Rank {
    /// Takes part with the memory `own`, whose checksum is `sum`.
    pub fn new(
        team: Team,
        rank: usize,
        label: &str,
        cuda: Cuda,
        own: (CuDevicePtr, usize),
        sum: u64,
    ) -> Result<Self> {
        team.board.word(rank, SUM).store(sum, SeqCst);
        let mut rank = Self {
            team,
            rank,
            label: label.to_owned(),
            cuda,
            own,
            turn: 0,
            generation: 0,
            joined: None,
            expected: 0,
        };
        rank.join()?;
        let sums = (0..rank.team.ranks).map(|r| rank.team.board.word(r, SUM).load(SeqCst));
        rank.expected = match rank.team.way {
            Way::Plain => rank.team.board.word(0, SUM).load(SeqCst),
            _ => sums.fold(0, u64::wrapping_add),
        };
        Ok(rank)
    }

    /// The sum over all ranks; the files `/tmp/down` and `/tmp/up` have the communicator taken down and made again before.
    pub fn step(&mut self) -> Result<u64> {
        let wish = self.generation == 1 && Path::new("/tmp/down").exists();
        let (p, bytes) = self.own;
        let own = self.cuda.sum(p, bytes).context("sum")?;
        let joined = self.joined.as_ref().context("the communicator is down")?;
        let mut total = own;
        for import in &joined.imports {
            let sum = self.cuda.sum(*import, bytes).context("sum of an import")?;
            total = total.wrapping_add(sum);
        }
        if self.team.way == Way::Plain {
            return Ok(if self.rank == 0 {
                own
            } else {
                total.wrapping_sub(own)
            });
        }
        let (carried, stop) = self.exchange(own, wish)?;
        if !self.team.way.imports() {
            total = carried;
        }
        if stop {
            self.leave()?;
            while !Path::new("/tmp/up").exists() {
                thread::sleep(Duration::from_millis(20));
            }
            self.join()?;
            self.say("up");
        }
        Ok(total)
    }

    fn say(&self, what: &str) {
        // One write for a line, as several processes write.
        let line = format!("# {what}{}\n", self.label);
        let _ = io::stdout().write_all(line.as_bytes());
        let _ = io::stdout().flush();
    }

    fn join(&mut self) -> Result<()> {
        let (way, board) = (self.team.way, &self.team.board);
        self.generation += 1;
        let mut joined = Joined {
            imports: Vec::new(),
            file: None,
            _socket: None,
        };
        if way != Way::Plain {
            let hash = u64::from(std::process::id()) << 32 | u64::from(unique());
            let name = format!("tmp/nccl-socket-{}-{hash:x}", self.rank);
            let address = SocketAddr::from_abstract_name(name)?;
            joined._socket = Some(UnixDatagram::bind_addr(&address)?);
        }
        if way.imports() {
            let handle = match way {
                Way::Plain if self.rank > 0 => Handle::default(),
                Way::Plain => self.cuda.ipc_handle(self.own.0).context("IPC handle")?,
                _ => self.cuda.share(self.own.0).context("handle")?,
            };
            for (n, word) in handle.0.iter().enumerate() {
                board.word(self.rank, n).store(*word, SeqCst);
            }
        }
        let alone = self.team.ranks == 1;
        if way == Way::Shm && self.rank == 0 && !alone {
            let id = unique();
            joined.file = Some(Shared::map(self.team.ranks, Some((&shm_file(id), true)))?);
            board.word(0, NAME).store(id.into(), SeqCst);
        }
        self.all_at(GENERATION, self.generation);
        if way == Way::Shm && !alone {
            let id = board.word(0, NAME).load(SeqCst);
            let path = shm_file(u32::try_from(id)?);
            if self.rank > 0 {
                joined.file = Some(Shared::map(self.team.ranks, Some((&path, false)))?);
            }
            self.all_at(NAME + 1, self.generation);
            if self.rank == 0 {
                fs::remove_file(&path)?;
            }
        }
        for other in (0..self.team.ranks).filter(|r| *r != self.rank && way.imports()) {
            let mut handle = Handle::default();
            for (n, word) in handle.0.iter_mut().enumerate() {
                *word = board.word(other, n).load(SeqCst);
            }
            let import = match way {
                Way::Plain if other > 0 => continue,
                Way::Plain => self.cuda.ipc_open(handle),
                _ => self.cuda.import(handle, way == Way::Ipc),
            };
            joined.imports.push(import.context("import")?);
        }
        self.turn = 0;
        for word in TURN..=STOP + 1 {
            joined.slots(board).word(self.rank, word).store(0, SeqCst);
        }
        self.joined = Some(joined);
        self.all_at(NAME + 2, self.generation);
        if !alone && (way != Way::Plain || self.rank > 0) {
            self.say(&format!("rank {} via {}", self.rank, way.name()));
        }
        Ok(())
    }

    fn leave(&mut self) -> Result<()> {
        for import in self.joined.take().into_iter().flat_map(|j| j.imports) {
            self.cuda.ipc_close(import).context("close")?;
        }
        self.say("down");
        Ok(())
    }

    /// Waits until all ranks have come to this point.
    fn all_at(&self, word: usize, value: u64) {
        let board = &self.team.board;
        board.word(self.rank, word).store(value, SeqCst);
        while (0..self.team.ranks).any(|r| board.word(r, word).load(SeqCst) < value) {
            thread::sleep(POLL);
        }
    }

    /// The sum of all ranks' values, and whether any wishes to stop.
    fn exchange(&mut self, value: u64, stop: bool) -> Result<(u64, bool)> {
        if self.team.way == Way::Socket {
            return self.talk(value, stop);
        }
        let joined = self.joined.as_ref().context("the communicator is down")?;
        let slots = joined.slots(&self.team.board);
        let at = usize::from(self.turn % 2 == 1);
        self.turn += 1;
        slots.word(self.rank, VALUE + at).store(value, SeqCst);
        slots.word(self.rank, STOP + at).store(stop.into(), SeqCst);
        slots.word(self.rank, TURN).store(self.turn, SeqCst);
        let ranks = 0..self.team.ranks;
        while ranks
            .clone()
            .any(|r| slots.word(r, TURN).load(SeqCst) < self.turn)
        {
            thread::sleep(POLL);
        }
        let values = ranks
            .clone()
            .map(|r| slots.word(r, VALUE + at).load(SeqCst));
        let stops = ranks
            .clone()
            .any(|r| slots.word(r, STOP + at).load(SeqCst) != 0);
        Ok((values.fold(0, u64::wrapping_add), stops))
    }

    fn talk(&self, value: u64, stop: bool) -> Result<(u64, bool)> {
        let ends = self.team.wires.iter().filter_map(|(a, b, one, other)| {
            if *a == self.rank {
                return Some(one);
            }
            (*b == self.rank).then_some(other)
        });
        let ends: Vec<&UnixStream> = ends.collect();
        let (mut total, mut any) = (value, stop);
        for mut end in ends.iter().copied() {
            let mut message = [0; 9];
            message[..8].copy_from_slice(&value.to_le_bytes());
            message[8] = stop.into();
            end.write_all(&message)?;
        }
        for mut end in ends {
            let mut message = [0; 9];
            end.read_exact(&mut message)?;
            let mut word = [0; 8];
            word.copy_from_slice(&message[..8]);
            total = total.wrapping_add(u64::from_le_bytes(word));
            any |= message[8] != 0;
        }
        Ok((total, any))
    }
}

impl Joined {
    fn slots<'a>(&'a self, board: &'a Shared) -> &'a Shared {
        self.file.as_ref().unwrap_or(board)
    }
}

/// A number that other processes do not have.
fn unique() -> u32 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |t| t.subsec_nanos()) ^ std::process::id()
}

fn shm_file(id: u32) -> PathBuf {
    let root = std::env::var("CUSIM_DEV_ROOT").unwrap_or_else(|_| "/dev".into());
    Path::new(&root).join(format!("shm/nccl-{id:08x}"))
}

/// Words that several processes share.
pub struct Shared {
    pub words: &'static [AtomicU64],
    /// NCCL keeps the descriptor of its file.
    _file: Option<File>,
}

impl Shared {
    /// Anonymous memory for children that are forked later, or a file.
    pub fn map(ranks: usize, file: Option<(&Path, bool)>) -> Result<Self> {
        let count = ranks.max(1) * WORDS;
        let mut flags = libc::MAP_SHARED;
        let file = match file {
            Some((path, make)) => {
                if let (true, Some(directory)) = (make, path.parent()) {
                    fs::create_dir_all(directory)?;
                }
                let mut options = File::options();
                let file = options.read(true).write(true).create(make).open(path)?;
                file.set_len(8 * count as u64)?;
                Some(file)
            }
            None => {
                flags |= libc::MAP_ANONYMOUS;
                None
            }
        };
        // SAFETY: a new mapping.
        let p = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                8 * count,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                file.as_ref().map_or(-1, AsRawFd::as_raw_fd),
                0,
            )
        };
        if p == libc::MAP_FAILED {
            bail!("mmap: {}", io::Error::last_os_error());
        }
        // SAFETY: mapped so long, aligned to a page, unmapped by `drop` alone, and only ever used as atomic words.
        let words = unsafe { std::slice::from_raw_parts(p.cast::<AtomicU64>(), count) };
        Ok(Self { words, _file: file })
    }

    fn word(&self, rank: usize, word: usize) -> &AtomicU64 {
        &self.words[rank * WORDS + word]
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own; `words` is not handed out for longer.
        unsafe { libc::munmap(self.words.as_ptr().cast_mut().cast(), 8 * self.words.len()) };
    }
}
