//! Records the GPU memory that can be moved: pieces of physical memory, and where each is mapped.
//!
//! The application never sees a driver's handle of such a piece, as the handle changes when the piece is released and
//! allocated again. It has an id of ours.

use std::collections::BTreeMap;

/// Tells our ids from the driver's handles, which are small numbers or addresses.
const ID: u64 = 0xc4d0_0000_0000_0000;
const ID_MASK: u64 = 0xffff_0000_0000_0000;

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Properties {
    pub kind: u32,
    pub handle_types: u32,
    pub location: Location,
    pub win32: usize,
    pub compression: u8,
    pub rdma: u8,
    pub usage: u16,
    pub reserved: [u8; 4],
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Location {
    pub kind: u32,
    pub id: i32,
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    pub location: Location,
    pub flags: u32,
}

const _: () = {
    assert!(size_of::<Properties>() == 32);
    assert!(size_of::<Access>() == 12);
};

/// Where the contents of a piece are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Contents {
    Here,
    /// In the file, and the GPU memory is released.
    Away,
    /// In the file, and the GPU memory is allocated again.
    Empty,
}

#[derive(Debug, Clone)]
pub struct Piece {
    /// The driver's handle; 0 while the contents are away.
    pub handle: u64,
    pub bytes: u64,
    pub properties: Properties,
    pub contents: Contents,
    /// Place in the file, while the contents are not here.
    pub offset: u64,
    /// It has had one since it was made.
    has_place: bool,
    /// The application has given it to somebody else: the driver has to deal with it.
    pub shared: bool,
    /// How often the application would have to release it.
    references: u32,
}

#[derive(Debug, Clone)]
pub struct Mapping {
    pub piece: u64,
    pub bytes: u64,
    /// Offset in the piece.
    pub offset: u64,
    /// What the application allowed, in its order: ranges and accesses.
    pub access: Vec<(u64, u64, Access)>,
    /// The driver has it.
    pub mapped: bool,
}

#[derive(Debug, Default)]
pub struct Map {
    pieces: BTreeMap<u64, Piece>,
    /// By address.
    mappings: BTreeMap<u64, Mapping>,
    last: u64,
}

/// Returns true for our own ids.
pub fn is_id(handle: u64) -> bool {
    handle & ID_MASK == ID
}

impl Map {
    /// Returns a map without memory.
    pub const fn new() -> Self {
        Self {
            pieces: BTreeMap::new(),
            mappings: BTreeMap::new(),
            last: 0,
        }
    }

    /// Adds a piece, referred to once, and returns its id.
    pub fn add(&mut self, handle: u64, bytes: u64, properties: Properties) -> u64 {
        self.last += 1;
        let id = ID | self.last;
        let piece = Piece {
            handle,
            bytes,
            properties,
            contents: Contents::Here,
            offset: 0,
            has_place: false,
            shared: false,
            references: 1,
        };
        self.pieces.insert(id, piece);
        id
    }

    /// Returns the piece with this id.
    pub fn piece(&mut self, id: u64) -> Option<&mut Piece> {
        self.pieces.get_mut(&id)
    }

    /// The driver's handle for what the application calls a handle.
    pub fn handle(&self, handle: u64) -> u64 {
        self.pieces.get(&handle).map_or(handle, |p| p.handle)
    }

    /// The id of the piece that is mapped at this address.
    pub fn mapped_at(&self, address: u64) -> Option<u64> {
        let (start, mapping) = self.mappings.range(..=address).next_back()?;
        (address - start < mapping.bytes).then_some(mapping.piece)
    }

    /// One more reference to the piece that is mapped at this address: its id.
    pub fn retain(&mut self, address: u64) -> Option<u64> {
        let id = self.mapped_at(address)?;
        self.pieces.get_mut(&id)?.references += 1;
        Some(id)
    }

    /// Notes that the application has given the memory in a range to somebody else.
    pub fn share(&mut self, address: u64, bytes: u64) {
        let end = address.saturating_add(bytes);
        let within = self.mappings.range(address..end);
        let within = within.map(|(_, mapping)| mapping.piece);
        for id in within.chain(self.mapped_at(address)) {
            if let Some(piece) = self.pieces.get_mut(&id) {
                piece.shared = true;
            }
        }
    }

    /// One reference less. Returns the handle to release, if nothing refers to the piece any more.
    pub fn release(&mut self, id: u64) -> Option<u64> {
        let piece = self.pieces.get_mut(&id)?;
        piece.references = piece.references.saturating_sub(1);
        self.drop_unused(id)
    }

    /// Returns true if the program holds a reference to this piece.
    pub fn is_referred_to(&self, id: u64) -> bool {
        self.pieces.get(&id).is_some_and(|p| p.references > 0)
    }

    /// Notes that a part of a piece is mapped at an address.
    pub fn map(&mut self, address: u64, bytes: u64, offset: u64, id: u64) {
        let mapping = Mapping {
            piece: id,
            bytes,
            offset,
            access: Vec::new(),
            mapped: true,
        };
        self.mappings.insert(address, mapping);
    }

    /// Forgets the mappings in a range. Returns the handles to release.
    pub fn unmap(&mut self, address: u64, bytes: u64) -> Vec<u64> {
        let end = address.saturating_add(bytes);
        let within: Vec<u64> = self.mappings.range(address..end).map(|m| *m.0).collect();
        let gone = within
            .iter()
            .filter_map(|at| self.mappings.remove(at))
            .map(|mapping| mapping.piece);
        let mut pieces: Vec<u64> = gone.collect();
        pieces.sort_unstable();
        pieces.dedup();
        pieces
            .into_iter()
            .filter_map(|id| self.drop_unused(id))
            .collect()
    }

    fn drop_unused(&mut self, id: u64) -> Option<u64> {
        let used =
            self.is_referred_to(id) || self.mappings.values().any(|mapping| mapping.piece == id);
        match used {
            true => None,
            false => self.pieces.remove(&id).map(|piece| piece.handle),
        }
    }

    /// Notes what the application allows for a range, which may cover several mappings or a part of one.
    pub fn allow(&mut self, address: u64, bytes: u64, access: &[Access]) {
        let end = address.saturating_add(bytes);
        let first = self.mappings.range(..=address).next_back().map(|m| *m.0);
        for (at, mapping) in self.mappings.range_mut(first.unwrap_or(address)..end) {
            let from = address.max(*at);
            let to = end.min(at.saturating_add(mapping.bytes));
            if from >= to {
                continue;
            }
            for access in access {
                // What it replaces need not be done again.
                mapping.access.retain(|(start, len, old)| {
                    old.location != access.location || *start < from || start + len > to
                });
                mapping.access.push((from, to - from, *access));
            }
        }
    }

    /// Gives each piece that can be moved its place in the file; with `keep` those that have one keep it, and the others
    /// come behind. Returns the file's size.
    pub fn lay_out(&mut self, keep: bool) -> u64 {
        let placed = self.pieces.values().filter(|p| keep && p.has_place);
        let ends = placed.map(|p| p.offset.saturating_add(p.bytes));
        let mut at = ends.max().unwrap_or_default();
        let pieces = self.pieces.values_mut().filter(|p| !p.shared);
        for piece in pieces.filter(|p| !keep || !p.has_place) {
            (piece.offset, piece.has_place) = (at, true);
            at = at.saturating_add(piece.bytes);
        }
        at
    }

    /// The pieces that can be moved.
    pub fn movable(&mut self) -> impl Iterator<Item = (u64, &mut Piece)> {
        let all = self.pieces.iter_mut().filter(|(_, piece)| !piece.shared);
        all.map(|(id, piece)| (*id, piece))
    }

    /// The mappings of the pieces that can be moved, with their addresses.
    pub fn movable_mappings(&mut self) -> impl Iterator<Item = (u64, &mut Mapping, &Piece)> {
        let pieces = &self.pieces;
        self.mappings.iter_mut().filter_map(|(at, mapping)| {
            let piece = pieces.get(&mapping.piece).filter(|piece| !piece.shared)?;
            Some((*at, mapping, piece))
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    const UNIT: u64 = 2 << 20;

    fn properties() -> Properties {
        Properties {
            kind: 1,
            handle_types: 1,
            location: Location { kind: 1, id: 0 },
            win32: 0,
            compression: 0,
            rdma: 0,
            usage: 0,
            reserved: [0; 4],
        }
    }

    fn access(device: i32, flags: u32) -> Access {
        let location = Location {
            kind: 1,
            id: device,
        };
        Access { location, flags }
    }

    #[derive(Debug, Clone)]
    enum Step {
        Create(u64),
        Map(usize, u64, u64),
        Unmap(u64, u64),
        Release(usize),
        Retain(u64),
        Allow(u64, u64, i32, u32),
        Move,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            (1u64..4).prop_map(Step::Create),
            (any::<usize>(), 0u64..16, 0u64..3).prop_map(|(p, at, off)| Step::Map(p, at, off)),
            (0u64..16, 1u64..6).prop_map(|(at, n)| Step::Unmap(at, n)),
            any::<usize>().prop_map(Step::Release),
            (0u64..16).prop_map(Step::Retain),
            (0u64..16, 1u64..6, 0i32..2, 0u32..4)
                .prop_map(|(at, n, device, flags)| Step::Allow(at, n, device, flags)),
            Just(Step::Move),
        ];
        proptest::collection::vec(step, 0..60)
    }

    /// What a driver would know: pieces by handle with their references, units of address space, and each unit's access.
    #[derive(Default)]
    struct Model {
        pieces: BTreeMap<u64, (u64, u32)>,
        units: BTreeMap<u64, (u64, u64)>,
        access: BTreeMap<(u64, i32), u32>,
    }

    impl Model {
        fn alive(&self, handle: u64) -> bool {
            self.pieces[&handle].1 > 0 || self.units.values().any(|(h, _)| *h == handle)
        }
    }

    proptest! {
        /// Any order of calls leaves the map with what a driver has, also when everything was moved in between.
        #[test]
        fn the_map_knows_what_the_driver_has(steps in steps()) {
            let (mut map, mut model) = (Map::new(), Model::default());
            let mut ids: Vec<(u64, u64)> = Vec::new();
            let (mut next, mut spans) = (1u64, BTreeMap::<u64, u64>::new());
            for step in steps {
                match step {
                    Step::Create(units) => {
                        ids.push((map.add(next, units * UNIT, properties()), next));
                        model.pieces.insert(next, (units, 1));
                        next += 1;
                    }
                    Step::Map(which, at, offset) => {
                        let Some((id, handle)) = ids.get(which % ids.len().max(1)).copied() else { continue };
                        let units = model.pieces[&handle].0;
                        let free = (at..at + units - offset.min(units)).all(|u| !model.units.contains_key(&u));
                        if offset >= units || !free || !map.is_referred_to(id) {
                            continue;
                        }
                        map.map(at * UNIT, (units - offset) * UNIT, offset * UNIT, id);
                        spans.insert(at, units - offset);
                        let new = (0..units - offset).map(|u| (at + u, (handle, offset + u)));
                        model.units.extend(new);
                    }
                    Step::Unmap(at, units) => {
                        // The driver refuses to cut a mapping.
                        let whole = |(start, len): (&u64, &u64)| (*start >= at && start + len <= at + units) || start + len <= at || *start >= at + units;
                        if !spans.iter().all(whole) {
                            continue;
                        }
                        spans.retain(|start, _| !(at..at + units).contains(start));
                        let before: Vec<u64> = model.pieces.keys().copied().filter(|h| model.alive(*h)).collect();
                        model.units.retain(|u, _| !(at..at + units).contains(u));
                        model.access.retain(|(u, _), _| !(at..at + units).contains(u));
                        let mut gone: Vec<u64> = before.into_iter().filter(|h| !model.alive(*h)).collect();
                        let mut released = map.unmap(at * UNIT, units * UNIT);
                        gone.sort_unstable();
                        released.sort_unstable();
                        prop_assert_eq!(released, gone);
                    }
                    Step::Release(which) => {
                        let Some((id, handle)) = ids.get(which % ids.len().max(1)).copied() else { continue };
                        if !map.is_referred_to(id) {
                            continue;
                        }
                        model.pieces.get_mut(&handle).unwrap().1 -= 1;
                        let released = map.release(id);
                        prop_assert_eq!(released, (!model.alive(handle)).then_some(handle));
                    }
                    Step::Retain(at) => {
                        let expected = model.units.get(&at).map(|(handle, _)| *handle);
                        let id = map.retain(at * UNIT + 5);
                        prop_assert_eq!(id.map(|id| map.handle(id)), expected);
                        if let Some(handle) = expected {
                            model.pieces.get_mut(&handle).unwrap().1 += 1;
                        }
                    }
                    Step::Allow(at, units, device, flags) => {
                        map.allow(at * UNIT, units * UNIT, &[access(device, flags)]);
                        for unit in (at..at + units).filter(|u| model.units.contains_key(u)) {
                            model.access.insert((unit, device), flags);
                        }
                    }
                    Step::Move => {
                        // New handles, as after a checkpoint.
                        let size = map.lay_out(false);
                        let mut at = 0;
                        let mut renamed = BTreeMap::new();
                        for (_, piece) in map.movable() {
                            prop_assert_eq!(piece.offset, at);
                            at += piece.bytes;
                            renamed.insert(piece.handle, next);
                            piece.handle = next;
                            next += 1;
                        }
                        prop_assert_eq!(size, at);
                        let new = |handle: u64| renamed.get(&handle).copied().unwrap_or(handle);
                        ids.iter_mut().for_each(|(_, handle)| *handle = new(*handle));
                        model.units.values_mut().for_each(|(handle, _)| *handle = new(*handle));
                        let pieces = std::mem::take(&mut model.pieces);
                        model.pieces = pieces.into_iter().map(|(handle, p)| (new(handle), p)).collect();
                    }
                }
            }
            let (mut units, mut allowed) = (BTreeMap::new(), BTreeMap::new());
            for (at, mapping, piece) in map.movable_mappings() {
                for unit in 0..mapping.bytes / UNIT {
                    units.insert(at / UNIT + unit, (piece.handle, mapping.offset / UNIT + unit));
                }
                for (start, len, access) in &mapping.access {
                    for unit in start / UNIT..(start + len) / UNIT {
                        allowed.insert((unit, access.location.id), access.flags);
                    }
                }
            }
            prop_assert_eq!(units, model.units);
            prop_assert_eq!(allowed, model.access);
        }
    }

    #[test]
    fn what_is_shared_stays_where_it_is() {
        let mut map = Map::new();
        let (a, b) = (
            map.add(7, UNIT, properties()),
            map.add(8, UNIT, properties()),
        );
        map.piece(a).unwrap().shared = true;
        map.map(0, UNIT, 0, a);
        map.map(UNIT, UNIT, 0, b);
        assert_eq!(map.lay_out(false), UNIT);
        let moved: Vec<u64> = map.movable().map(|(id, _)| id).collect();
        assert_eq!(moved, [b]);
        assert_eq!(map.movable_mappings().count(), 1);
        // By address: a part of one mapping, and of the next.
        let [c, d, e] = [9, 10, 11].map(|handle| map.add(handle, UNIT, properties()));
        for (at, id) in [(2, c), (3, d), (4, e)] {
            map.map(at * UNIT, UNIT, 0, id);
        }
        map.share(3 * UNIT - 1, 2);
        let moved: Vec<u64> = map.movable().map(|(id, _)| id).collect();
        assert_eq!(moved, [b, e]);
        assert_eq!(map.mapped_at(5 * UNIT), None);
        assert!(is_id(a) && !is_id(7));
        assert_eq!(map.handle(42), 42);
    }

    #[test]
    fn pieces_keep_their_places() {
        let mut map = Map::new();
        let [a, b] = [5, 7].map(|units| map.add(units, units * UNIT, properties()));
        assert_eq!(map.lay_out(false), 12 * UNIT);
        map.release(a);
        let c = map.add(9, 2 * UNIT, properties());
        assert_eq!(map.lay_out(true), 14 * UNIT);
        let places: Vec<_> = map.movable().map(|(id, p)| (id, p.offset / UNIT)).collect();
        assert_eq!(places, [(b, 5), (c, 12)]);
        assert_eq!(map.lay_out(false), 9 * UNIT);
    }
}
