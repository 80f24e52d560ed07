//! Pieces that stay on the GPU while their process has none of its memory.

use super::{DriverError, ErrorKind};
use crate::copy::{Copier, Imported, Piece};
use cryopod_preload_wire::Request;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long to wait for room beside what is held, and how often to look.
const FOR_ROOM: Duration = Duration::from_millis(500);
const TICK: Duration = Duration::from_millis(10);

/// Copies pieces to where their contents belong in host memory.
pub(super) type PutAway<'a> = dyn Fn(&[Imported]) -> Result<(), DriverError> + Sync + 'a;

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// GPU memory that is promised to processes, by GPU.
#[derive(Default)]
pub(super) struct Room(Arc<Mutex<BTreeMap<i32, u64>>>);

/// A process's part, until it is dropped.
pub(super) struct Taken {
    room: Arc<Mutex<BTreeMap<i32, u64>>>,
    /// GPUs and bytes.
    part: Vec<(i32, u64)>,
}

impl Room {
    /// Takes as many bytes of each GPU as are wanted, if it has them beside what is taken already: GPU, wanted, free.
    pub(super) fn take(&self, wanted: &[(i32, u64, u64)]) -> Option<Taken> {
        let mut room = locked(&self.0);
        let fits = |(device, bytes, free): &(i32, u64, u64)| {
            let taken = room.get(device).copied().unwrap_or_default();
            taken.checked_add(*bytes).is_some_and(|all| all <= *free)
        };
        if !wanted.iter().all(fits) {
            return None;
        }
        for (device, bytes, _) in wanted {
            *room.entry(*device).or_default() += bytes;
        }
        Some(Taken {
            room: Arc::clone(&self.0),
            part: wanted
                .iter()
                .map(|(device, bytes, _)| (*device, *bytes))
                .collect(),
        })
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        let mut room = locked(&self.room);
        for (device, bytes) in &self.part {
            let left = room.entry(*device).or_default();
            *left = left.saturating_sub(*bytes);
        }
    }
}

/// Pieces that are on the GPU with their contents.
pub(super) struct Held<'a> {
    /// Those that no other memory has been filled from, by place.
    pieces: Mutex<BTreeMap<(u64, u64), Imported>>,
    /// Those that some has.
    used: Mutex<Vec<Imported>>,
    any: bool,
    /// Nothing else has the contents: before a piece is let go of, it is put away.
    put_away: Option<&'a PutAway<'a>>,
}

impl<'a> Held<'a> {
    pub(super) fn new(pieces: Vec<Imported>, put_away: Option<&'a PutAway<'a>>) -> Self {
        let any = !pieces.is_empty();
        let by_place = pieces.into_iter().map(|piece| (piece.place(), piece));
        Self {
            pieces: Mutex::new(by_place.collect()),
            used: Mutex::default(),
            any,
            put_away,
        }
    }

    /// Whether there were some.
    pub(super) fn any(&self) -> bool {
        self.any
    }

    /// Copies what is held to the process's new pieces, and lets go of what host memory has, too. Returns the pieces that
    /// are to be filled from there.
    ///
    /// # Errors
    /// The contents can be copied nowhere.
    pub(super) fn fill(
        &self,
        copier: &Copier,
        pieces: Vec<Imported>,
    ) -> Result<Vec<Imported>, DriverError> {
        let (mut filled, mut from, mut rest) = (Vec::new(), Vec::new(), Vec::new());
        for piece in pieces {
            match locked(&self.pieces).remove(&piece.place()) {
                Some(held) => {
                    from.push(held);
                    filled.push(piece);
                }
                None => rest.push(piece),
            }
        }
        let pairs: Vec<_> = from.iter().zip(&filled).collect();
        if let Err(error) = copier.copy_on_gpus(&pairs) {
            tracing::info!("the memory held on the GPU: {error}");
            if let Some(put_away) = self.put_away
                && let Err(error) = put_away(&from)
            {
                let back = from.into_iter().map(|piece| (piece.place(), piece));
                locked(&self.pieces).extend(back);
                return Err(error);
            }
            rest.append(&mut filled);
        }
        if self.put_away.is_some() {
            locked(&self.used).append(&mut from);
        }
        Ok(rest)
    }

    /// Has the process allocate memory, beside what is held if there is room for both.
    pub(super) fn allocate(
        &self,
        request: Request,
        ask: &dyn Fn(Request) -> Result<Vec<Piece>, DriverError>,
    ) -> Result<Vec<Piece>, DriverError> {
        let start = Instant::now();
        loop {
            match ask(request) {
                Err(error)
                    if error.kind == ErrorKind::OutOfMemory
                        && self.any
                        && start.elapsed() < 2 * FOR_ROOM =>
                {
                    // What is being filled makes room; if that is not enough, the rest comes from host memory.
                    if start.elapsed() > FOR_ROOM {
                        self.put_all_away();
                    }
                    std::thread::sleep(TICK);
                }
                done => return done,
            }
        }
    }

    /// Lets go of all that host memory has, too, once it is put away. What cannot be put away stays.
    pub(super) fn put_all_away(&self) {
        // Whoever fills waits: what is not here any more is read from host memory.
        let mut pieces = locked(&self.pieces);
        let mut all: Vec<Imported> = std::mem::take(&mut *pieces).into_values().collect();
        all.append(&mut locked(&self.used));
        if let Some(put_away) = self.put_away
            && let Err(error) = put_away(&all)
        {
            tracing::error!("the memory held on the GPU: {error}");
            pieces.extend(all.into_iter().map(|piece| (piece.place(), piece)));
        }
    }

    /// Returns the pieces that are still to be put away.
    pub(super) fn left(self) -> Vec<Imported> {
        let mut used = self
            .used
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        let pieces = self
            .pieces
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        used.extend(pieces.into_values());
        used
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::failed;
    use super::*;

    #[test]
    fn what_is_held_makes_room_or_is_let_go_of() {
        let held = Held {
            pieces: Mutex::default(),
            used: Mutex::default(),
            any: true,
            put_away: None,
        };
        let request = Request::Allocate { from: 0, bytes: 1 };
        let asked = Mutex::new(0);
        let full = |times: u32| {
            let asked = &asked;
            *asked.lock().unwrap() = 0;
            move |_| {
                *asked.lock().unwrap() += 1;
                match *asked.lock().unwrap() > times {
                    true => Ok(Vec::new()),
                    false => Err(failed(ErrorKind::OutOfMemory, "full")),
                }
            }
        };
        assert!(held.allocate(request, &full(3)).unwrap().is_empty());
        let error = held.allocate(request, &full(u32::MAX)).unwrap_err();
        assert_eq!(error.kind, ErrorKind::OutOfMemory);
        // Nothing was held: it is told at once.
        let none = Held::new(Vec::new(), None);
        none.allocate(request, &full(u32::MAX)).unwrap_err();
        assert_eq!(*asked.lock().unwrap(), 1);
    }

    #[test]
    fn room_is_taken_once() {
        let room = Room::default();
        let first = room.take(&[(0, 6, 10), (1, 1, 1)]).unwrap();
        assert!(room.take(&[(0, 5, 10)]).is_none());
        assert!(room.take(&[(1, 1, 1)]).is_none());
        let second = room.take(&[(0, 4, 10)]).unwrap();
        drop(first);
        assert!(room.take(&[(0, 6, 10)]).is_some());
        drop(second);
        assert!(room.take(&[(0, u64::MAX, 10)]).is_none());
    }
}
