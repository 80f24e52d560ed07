//! The copies through a ring: the GPU fills or empties buffers, and threads do the other half.

use super::ring::{BUFFER, BUFFERS, Ring, UNDER_WAY};
use super::{Address, Copier, Device, Ready, Way, checked, wrong};
use crate::messages::protocol::DriverError;
use crate::vram::front::Front;
use std::sync::{Mutex, PoisonError, mpsc};

/// The host memory, of which each thread touches other parts.
pub(super) struct Host {
    address: *mut u8,
}

impl Host {
    pub(super) fn new(memory: &mut [u8]) -> Self {
        Self {
            address: memory.as_mut_ptr(),
        }
    }
}

// SAFETY: blocks do not overlap where the pieces do not; where a process says that its pieces do, bytes of its own are
// mixed up.
unsafe impl Sync for Host {}

/// Blocks that are copied sooner without a ring than one is made.
const FEW: usize = 32;

impl Copier {
    pub(super) fn copy_device(
        &self,
        ordinal: i32,
        blocks: &[Block],
        host: &Host,
        front: &Mutex<Front>,
        way: Way<'_>,
        threads: usize,
    ) -> Result<(), DriverError> {
        let device = self.device(ordinal)?;
        self.make_current(device)?;
        let mut blocks = blocks.to_vec();
        blocks.sort_unstable_by_key(|block| block.offset);
        if let Way::Out(filled) = way
            && blocks.len() <= FEW
        {
            for block in &blocks {
                // SAFETY: the block lies within the host memory, and is mapped on the GPU.
                checked("a copy", unsafe {
                    let to = host.address.add(block.offset).cast();
                    (self.functions.download)(to, block.address, block.bytes)
                })?;
                let mut front = front.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(bytes) = front.advance(block.offset, block.bytes) {
                    filled(bytes);
                }
            }
            return Ok(());
        }
        let ring = self.ring(ordinal)?;
        match way {
            Way::Out(filled) | Way::OutSeen(filled, _) => {
                let done = |block: &Block| {
                    if let Way::OutSeen(_, seen) = way {
                        // SAFETY: this thread has just written it, and nobody changes it now.
                        let bytes = unsafe {
                            std::slice::from_raw_parts(host.address.add(block.offset), block.bytes)
                        };
                        seen(block.offset, bytes);
                    }
                    let mut front = front.lock().unwrap_or_else(PoisonError::into_inner);
                    if let Some(bytes) = front.advance(block.offset, block.bytes) {
                        filled(bytes);
                    }
                };
                self.copy_out(device, &ring, &blocks, host, threads, &done)?;
            }
            Way::In(ready) => self.copy_in(&ring, &blocks, host, threads, ready)?,
        }
        // After an error the GPU may still use it.
        self.give_back(ordinal, ring);
        Ok(())
    }

    fn copy_out(
        &self,
        device: Device,
        ring: &Ring,
        blocks: &[Block],
        host: &Host,
        threads: usize,
        done: &(dyn Fn(&Block) + Sync),
    ) -> Result<(), DriverError> {
        let f = &self.functions;
        let (give, free) = all_slots();
        let (fill, filled) = mpsc::sync_channel::<(usize, Block)>(BUFFERS);
        let filled = Mutex::new(filled);
        let empty = || -> Result<(), DriverError> {
            self.make_current(device)?;
            loop {
                let next = filled.lock().unwrap_or_else(PoisonError::into_inner).recv();
                let Ok((slot, block)) = next else {
                    return Ok(());
                };
                ring.wait(slot)?;
                // SAFETY: the buffer is filled, and the block lies within the host memory.
                unsafe {
                    let to = host.address.add(block.offset);
                    to.copy_from_nonoverlapping(ring.buffer(slot), block.bytes);
                }
                done(&block);
                let _ = give.send(slot);
            }
        };
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(empty)).collect();
            let mut begun = Ok(());
            for block in blocks {
                let Ok(slot) = free.recv_timeout(RING_LIMIT) else {
                    begun = Err(wrong("the GPU does not answer"));
                    break;
                };
                // SAFETY: the buffer is free and as large; the stream is the ring's.
                let code = unsafe {
                    (f.to_host)(
                        ring.buffer(slot).cast(),
                        block.address,
                        block.bytes,
                        ring.stream,
                    )
                };
                begun = checked("a copy", code).and_then(|()| ring.record(slot));
                if begun.is_err() || fill.send((slot, *block)).is_err() {
                    break;
                }
            }
            drop(fill);
            joined(workers).and(begun)
        })
    }

    fn copy_in(
        &self,
        ring: &Ring,
        blocks: &[Block],
        host: &Host,
        threads: usize,
        ready: &Ready<'_>,
    ) -> Result<(), DriverError> {
        let (give, free) = all_slots();
        let (fill, filled) = mpsc::sync_channel::<(usize, Block)>(BUFFERS);
        let work = Mutex::new((free, blocks.iter()));
        let load = |fill: mpsc::SyncSender<(usize, Block)>| {
            loop {
                let next = {
                    let mut work = work.lock().unwrap_or_else(PoisonError::into_inner);
                    let Some(block) = work.1.next() else {
                        return Ok(());
                    };
                    // Before a buffer is taken: after an error nobody would give it back.
                    ready((block.offset + block.bytes) as u64)?;
                    work.0.recv().map(|slot| (slot, *block))
                };
                let Ok((slot, block)) = next else {
                    return Ok(());
                };
                // SAFETY: the buffer is free, and the block lies within the host memory.
                unsafe {
                    let from = host.address.add(block.offset);
                    ring.buffer(slot)
                        .copy_from_nonoverlapping(from, block.bytes);
                }
                if fill.send((slot, block)).is_err() {
                    return Ok(());
                }
            }
        };
        let load = &load;
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads.max(1))
                .map(|_| {
                    let fill = fill.clone();
                    scope.spawn(move || load(fill))
                })
                .collect();
            drop(fill);
            let copied = self.enqueue(ring, &filled, &give);
            // Without these the workers end.
            drop((filled, give));
            joined(workers).and(copied)
        })?;
        (0..BUFFERS).try_for_each(|slot| ring.wait(slot))
    }

    /// Copies filled buffers to the GPU in the order in which they come, [`UNDER_WAY`] at a time.
    fn enqueue(
        &self,
        ring: &Ring,
        filled: &mpsc::Receiver<(usize, Block)>,
        give: &mpsc::Sender<usize>,
    ) -> Result<(), DriverError> {
        let f = &self.functions;
        let mut under_way = std::collections::VecDeque::new();
        while let Ok((slot, block)) = filled.recv() {
            // SAFETY: the buffer is filled; the stream is the ring's.
            let code = unsafe {
                let from = ring.buffer(slot).cast_const().cast();
                (f.to_device)(block.address, from, block.bytes, ring.stream)
            };
            checked("a copy", code)?;
            ring.record(slot)?;
            under_way.push_back(slot);
            if under_way.len() > UNDER_WAY
                && let Some(oldest) = under_way.pop_front()
            {
                ring.wait(oldest)?;
                let _ = give.send(oldest);
            }
        }
        Ok(())
    }
}

/// How long the GPU may take for a whole ring.
const RING_LIMIT: std::time::Duration = std::time::Duration::from_secs(60);

/// Hands out the buffers that are free: all of them, and those that are given back.
fn all_slots() -> (mpsc::Sender<usize>, mpsc::Receiver<usize>) {
    let (give, free) = mpsc::channel();
    for slot in 0..BUFFERS {
        let _ = give.send(slot);
    }
    (give, free)
}

type Worker<'scope> = std::thread::ScopedJoinHandle<'scope, Result<(), DriverError>>;

fn joined(workers: Vec<Worker<'_>>) -> Result<(), DriverError> {
    let join = |worker: Worker<'_>| {
        worker
            .join()
            .unwrap_or_else(|_| Err(wrong("a thread died")))
    };
    // All are waited for.
    let all: Vec<_> = workers.into_iter().map(join).collect();
    all.into_iter().collect()
}

/// A part of a piece, as large as a buffer or smaller.
#[derive(Clone, Copy)]
pub(super) struct Block {
    address: Address,
    /// In the host memory.
    offset: usize,
    bytes: usize,
}

impl Block {
    pub(super) fn of(
        address: Address,
        (offset, bytes): (usize, usize),
    ) -> impl Iterator<Item = Self> {
        (0..bytes).step_by(BUFFER).map(move |at| Self {
            address: address + at as u64,
            offset: offset + at,
            bytes: BUFFER.min(bytes - at),
        })
    }
}
