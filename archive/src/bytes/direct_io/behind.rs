//! Writes past the page cache while the caller fills the next piece of memory.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::thread::{self, JoinHandle};

use crossbeam_channel::{Receiver, Sender, unbounded};

use super::Aligned;

/// Pieces in flight at once. With fewer the disk idles between two.
const AT_ONCE: usize = 2;

pub(super) struct Behind {
    /// `None` at the end.
    orders: Option<Sender<Order>>,
    done: Receiver<(Order, io::Result<()>)>,
    threads: Vec<JoinHandle<()>>,
    /// Pieces in flight.
    out: usize,
}

struct Order {
    memory: Aligned,
    at: u64,
}

/// Pieces that nothing could write past the page cache, because the file system does not support it here.
pub(super) struct Refused(Vec<Order>);

impl Refused {
    /// Writes the pieces through the page cache.
    pub(super) fn write(&self, file: &File) -> io::Result<()> {
        let mut orders = self.0.iter();
        orders.try_for_each(|o| file.write_all_at(&o.memory, o.at))
    }
}

impl Behind {
    /// Writes to a file that is open with `O_DIRECT`.
    pub(super) fn new(file: &File) -> io::Result<Self> {
        let (orders, to_write) = unbounded::<Order>(); // bounded by the memory
        let (back, done) = unbounded();
        let mut behind = Self {
            orders: Some(orders),
            done,
            threads: Vec::new(),
            out: 0,
        };
        for _ in 0..AT_ONCE {
            let (file, to_write, back) = (file.try_clone()?, to_write.clone(), back.clone());
            let thread = thread::Builder::new().name("write".into()).spawn(move || {
                for order in to_write {
                    let written = file.write_all_at(&order.memory, order.at);
                    let _ = back.send((order, written));
                }
            })?;
            behind.threads.push(thread);
        }
        Ok(behind)
    }

    /// Takes a full buffer to write, and returns another of the same length to fill. Fails if an earlier piece failed.
    /// Gives all refused pieces back.
    pub(super) fn write(
        &mut self,
        memory: Aligned,
        at: u64,
    ) -> io::Result<Result<Aligned, Refused>> {
        let len = memory.len();
        if let Some(orders) = &self.orders {
            orders.send(Order { memory, at }).map_err(|_| gone())?;
            self.out += 1;
        }
        if self.out <= AT_ONCE {
            return Ok(Ok(Aligned::new(len)));
        }
        match self.one()? {
            Ok(order) => Ok(Ok(order.memory)),
            Err(order) => {
                let mut refused = self.rest()?;
                refused.0.push(order);
                Ok(Err(refused))
            }
        }
    }

    /// Waits for one piece. An inner `Err` holds a piece that was refused.
    fn one(&mut self) -> io::Result<Result<Order, Order>> {
        let (order, written) = self.done.recv().map_err(|_| gone())?;
        self.out -= 1;
        match written {
            Ok(()) => Ok(Ok(order)),
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => Ok(Err(order)),
            Err(e) => Err(e),
        }
    }

    /// Waits for all pieces. Fails if one of them failed.
    pub(super) fn rest(&mut self) -> io::Result<Refused> {
        let mut refused = Vec::new();
        while self.out > 0 {
            refused.extend(self.one()?.err());
        }
        Ok(Refused(refused))
    }
}

impl Drop for Behind {
    /// Waits until no thread writes any more.
    fn drop(&mut self) {
        self.orders = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn gone() -> io::Error {
    io::Error::other("a worker thread ended unexpectedly")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full_of(byte: u8) -> Aligned {
        let mut memory = Aligned::new(8192);
        memory.fill(byte);
        memory
    }

    #[test]
    fn pieces_go_to_their_places_and_memory_comes_back() {
        let file = tempfile::tempfile().unwrap();
        let mut behind = Behind::new(&file).unwrap();
        let mut memory = full_of(0);
        for n in 0..20u8 {
            memory.fill(n);
            let Ok(other) = behind.write(memory, u64::from(n) * 8192).unwrap() else {
                panic!("refused");
            };
            assert_eq!(other.len(), 8192);
            memory = other;
        }
        assert!(behind.rest().unwrap().0.is_empty());
        for n in 0..20u8 {
            let mut piece = [0xff; 8192];
            file.read_exact_at(&mut piece, u64::from(n) * 8192).unwrap();
            assert!(piece.iter().all(|b| *b == n), "{n}");
        }
    }

    /// The kernel refuses an offset beyond the largest file size just as it refuses direct I/O.
    #[test]
    fn what_is_refused_is_given_back_whole() {
        let file = tempfile::tempfile().unwrap();
        let mut behind = Behind::new(&file).unwrap();
        let mut given = Vec::new();
        for n in 0..6u64 {
            let at = if n % 2 == 0 { u64::MAX - n } else { n * 8192 };
            match behind.write(full_of(n as u8), at).unwrap() {
                Ok(_) => {}
                Err(refused) => given.extend(refused.0.iter().map(|o| o.at)),
            }
        }
        given.extend(behind.rest().unwrap().0.iter().map(|o| o.at));
        given.sort_unstable();
        assert_eq!(given, [u64::MAX - 4, u64::MAX - 2, u64::MAX]);
    }

    #[test]
    fn an_error_is_told_at_the_latest_at_the_end() {
        let file = File::open("/proc/self/exe").unwrap(); // not open for writing
        let mut behind = Behind::new(&file).unwrap();
        let _ = behind.write(full_of(1), 0).unwrap();
        assert!(behind.rest().is_err());
    }
}
