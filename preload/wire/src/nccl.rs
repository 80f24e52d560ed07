//! What the library tells about a process's NCCL communicators, and what the agent asks of them.
//!
//! Numbers are little-endian. Every list begins with its length; a text begins with its length in bytes. What the
//! library says is untrusted: [`Report::decode`] checks all of it.

/// A communicator's unique id, as NCCL defines it.
pub const UNIQUE_ID: usize = 128;
/// Most communicators of one process: their unique ids fit into a message.
pub const MAX_COMMS: usize = 960;
/// Most counters of one process: they fit into a message.
pub const MAX_CLOCKS: usize = 4000;
const MAX_TEXTS: usize = 64;
const MAX_TEXT: usize = 256;

/// How far a communicator has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// It is being made.
    Pending,
    Up,
    /// Taken down, to be made again.
    Down,
    /// The program has destroyed it, or will only do that.
    Gone,
}

/// One rank of a communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Comm {
    /// The same in all of its ranks.
    pub id: u64,
    pub ranks: u32,
    pub rank: u32,
    pub state: State,
}

/// What a counter counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    Collective,
    SendTo(u32),
    ReceiveFrom(u32),
}

impl Kind {
    fn number(self) -> u64 {
        match self {
            Self::Collective => 0,
            Self::SendTo(peer) => 1 << 32 | u64::from(peer),
            Self::ReceiveFrom(peer) => 2 << 32 | u64::from(peer),
        }
    }

    fn from_number(number: u64) -> Option<Self> {
        let peer = u32::try_from(number & 0xffff_ffff).ok()?;
        match number >> 32 {
            0 if peer == 0 => Some(Self::Collective),
            1 => Some(Self::SendTo(peer)),
            2 => Some(Self::ReceiveFrom(peer)),
            _ => None,
        }
    }
}

/// How many calls of a kind one rank of a communicator has made, or is to make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Clock {
    pub comm: u64,
    pub rank: u32,
    pub kind: Kind,
    pub count: u64,
}

/// The communicators of a process at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    pub comms: Vec<Comm>,
    pub clocks: Vec<Clock>,
    /// Threads that are within a call or a group.
    pub inside: u32,
    /// Calls that wait for the gate, by name.
    pub waiting: Vec<String>,
    /// Why the communicators cannot be made again.
    pub obstacles: Vec<String>,
}

impl Report {
    /// The communicators that the program still uses.
    pub fn live(&self) -> impl Iterator<Item = &Comm> {
        self.comms.iter().filter(|comm| comm.state != State::Gone)
    }

    /// Returns the report as bytes, for [`crate::send_data`].
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut put = |number: u64| bytes.extend_from_slice(&number.to_le_bytes());
        put(self.inside.into());
        let comms = &self.comms[..self.comms.len().min(MAX_COMMS)];
        put(comms.len() as u64);
        for comm in comms {
            put(comm.id);
            put(u64::from(comm.ranks) << 32 | u64::from(comm.rank));
            put(comm.state as u64);
        }
        bytes.extend(encode_clocks(&self.clocks));
        for texts in [&self.waiting, &self.obstacles] {
            let texts = &texts[..texts.len().min(MAX_TEXTS)];
            bytes.extend_from_slice(&(texts.len() as u64).to_le_bytes());
            for text in texts {
                let text = text.as_bytes();
                let text = &text[..text.len().min(MAX_TEXT)];
                bytes.extend_from_slice(&(text.len() as u64).to_le_bytes());
                bytes.extend_from_slice(text);
            }
        }
        bytes
    }

    /// `None` if the bytes are no report.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        let inside = u32::try_from(reader.number()?).ok()?;
        let mut comms = Vec::new();
        for _ in 0..reader.count(MAX_COMMS)? {
            let (id, ranks, state) = (reader.number()?, reader.number()?, reader.number()?);
            comms.push(Comm {
                id,
                ranks: u32::try_from(ranks >> 32).ok()?,
                rank: u32::try_from(ranks & 0xffff_ffff).ok()?,
                state: match state {
                    0 => State::Pending,
                    1 => State::Up,
                    2 => State::Down,
                    3 => State::Gone,
                    _ => return None,
                },
            });
        }
        let clocks = reader.clocks()?;
        let (waiting, obstacles) = (reader.texts()?, reader.texts()?);
        reader.0.is_empty().then_some(Self {
            comms,
            clocks,
            inside,
            waiting,
            obstacles,
        })
    }
}

/// Returns counters as the bytes that [`crate::Request::NcclHold`] carries.
pub fn encode_clocks(clocks: &[Clock]) -> Vec<u8> {
    let clocks = &clocks[..clocks.len().min(MAX_CLOCKS)];
    let mut bytes = Vec::from((clocks.len() as u64).to_le_bytes());
    for clock in clocks {
        for number in [
            clock.comm,
            clock.rank.into(),
            clock.kind.number(),
            clock.count,
        ] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
    }
    bytes
}

/// Reads counters; `None` if the bytes are none.
pub fn decode_clocks(bytes: &[u8]) -> Option<Vec<Clock>> {
    let mut reader = Reader(bytes);
    let clocks = reader.clocks()?;
    reader.0.is_empty().then_some(clocks)
}

/// A communicator to be made again, with its new unique id.
pub type Fresh = (u64, [u8; UNIQUE_ID]);

/// Returns ids as the bytes that [`crate::Request::NcclUp`] carries.
pub fn encode_fresh(fresh: &[Fresh]) -> Vec<u8> {
    let one = |(comm, id): &Fresh| [&comm.to_le_bytes()[..], id].concat();
    fresh.iter().flat_map(one).collect()
}

/// Reads ids; `None` if the bytes are none.
pub fn decode_fresh(bytes: &[u8]) -> Option<Vec<Fresh>> {
    let chunks = bytes.chunks_exact(8 + UNIQUE_ID);
    let whole = chunks.remainder().is_empty();
    let one = |chunk: &[u8]| {
        let (comm, id) = chunk.split_first_chunk::<8>()?;
        Some((u64::from_le_bytes(*comm), id.try_into().ok()?))
    };
    chunks.map(one).collect::<Option<_>>().filter(|_| whole)
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn number(&mut self) -> Option<u64> {
        let (number, rest) = self.0.split_first_chunk::<8>()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*number))
    }

    fn count(&mut self, most: usize) -> Option<usize> {
        usize::try_from(self.number()?).ok().filter(|n| *n <= most)
    }

    fn clocks(&mut self) -> Option<Vec<Clock>> {
        let mut clocks = Vec::new();
        for _ in 0..self.count(MAX_CLOCKS)? {
            clocks.push(Clock {
                comm: self.number()?,
                rank: u32::try_from(self.number()?).ok()?,
                kind: Kind::from_number(self.number()?)?,
                count: self.number()?,
            });
        }
        Some(clocks)
    }

    fn texts(&mut self) -> Option<Vec<String>> {
        let mut texts = Vec::new();
        for _ in 0..self.count(MAX_TEXTS)? {
            let length = self.count(MAX_TEXT)?;
            let (text, rest) = self.0.split_at_checked(length)?;
            self.0 = rest;
            // It is printed.
            let text = String::from_utf8_lossy(text);
            let plain = |c: char| if c.is_control() { '?' } else { c };
            texts.push(text.chars().map(plain).collect());
        }
        Some(texts)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn report() -> Report {
        let comm = |rank, state| Comm {
            id: 7,
            ranks: 2,
            rank,
            state,
        };
        let clock = |kind| Clock {
            comm: 7,
            rank: 1,
            kind,
            count: u64::MAX,
        };
        Report {
            comms: vec![
                comm(0, State::Pending),
                comm(1, State::Up),
                comm(0, State::Down),
                comm(1, State::Gone),
            ],
            clocks: vec![
                clock(Kind::Collective),
                clock(Kind::SendTo(u32::MAX)),
                clock(Kind::ReceiveFrom(0)),
            ],
            inside: 3,
            waiting: vec!["ncclSend".into()],
            obstacles: vec![String::new(), "a\u{1b}b".into()],
        }
    }

    #[test]
    fn a_report_is_read_back() {
        let mut sent = report();
        let bytes = sent.encode();
        sent.obstacles[1] = "a?b".into();
        assert_eq!(Report::decode(&bytes), Some(sent.clone()));
        assert_eq!(
            decode_clocks(&encode_clocks(&sent.clocks)),
            Some(sent.clocks)
        );
        let fresh = [(1, [2; UNIQUE_ID]), (3, [4; UNIQUE_ID])];
        assert_eq!(decode_fresh(&encode_fresh(&fresh)).unwrap(), fresh);
    }

    #[test]
    fn nonsense_is_no_report() {
        let bytes = report().encode();
        for length in 0..bytes.len() {
            assert_eq!(Report::decode(&bytes[..length]), None);
        }
        assert_eq!(Report::decode(&[&bytes[..], &[0]].concat()), None);
        for at in 0..bytes.len() {
            let mut bytes = bytes.clone();
            bytes[at] = 255;
            // It may still be one.
            let _ = Report::decode(&bytes);
        }
        assert_eq!(decode_fresh(&[0; 7]), None);
    }
}
