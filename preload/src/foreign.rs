//! Records memory of other processes and multicast objects, as far as this process has them.

use std::collections::{BTreeMap, BTreeSet};

/// Handles of the driver's, and the addresses at which they are mapped.
#[derive(Debug)]
struct KnownHandles {
    handles: BTreeSet<u64>,
    /// Handles by address; 0: it has none.
    mapped: BTreeMap<u64, u64>,
}

impl KnownHandles {
    const fn new() -> Self {
        Self {
            handles: BTreeSet::new(),
            mapped: BTreeMap::new(),
        }
    }

    fn count(&self) -> usize {
        self.handles.len() + self.mapped.len()
    }

    fn map(&mut self, address: u64, handle: u64) {
        if self.handles.contains(&handle) {
            self.mapped.insert(address, handle);
        }
    }

    fn unmap(&mut self, address: u64, bytes: u64) {
        let end = address.saturating_add(bytes);
        self.mapped.retain(|at, _| !(address..end).contains(at));
    }
}

/// What a process has of others. A multicast object lives as long as it is mapped or a handle of it is not released.
#[derive(Debug)]
pub struct Foreign {
    imports: KnownHandles,
    multicast: KnownHandles,
}

impl Foreign {
    pub const fn new() -> Self {
        Self {
            imports: KnownHandles::new(),
            multicast: KnownHandles::new(),
        }
    }

    /// How much of other processes is there.
    pub fn count(&self) -> u32 {
        u32::try_from(self.imports.count()).unwrap_or(u32::MAX)
    }

    /// Whether there is a multicast object.
    pub fn has_multicast(&self) -> bool {
        self.multicast.count() > 0
    }

    /// Notes a handle of another process's memory, or multicast object.
    pub fn import(&mut self, handle: u64) {
        self.imports.handles.insert(handle);
    }

    /// Notes that a handle is a multicast object's. One of another process may be mapped by then.
    pub fn note_multicast(&mut self, handle: u64) {
        self.multicast.handles.insert(handle);
        let mapped = self.imports.mapped.iter().filter(|(_, of)| **of == handle);
        self.multicast.mapped.extend(mapped);
    }

    /// Notes memory of another process that has an address and no handle.
    pub fn open(&mut self, address: u64) {
        self.imports.mapped.insert(address, 0);
    }

    /// Notes a mapping of a handle at an address.
    pub fn map(&mut self, address: u64, handle: u64) {
        self.imports.map(address, handle);
        self.multicast.map(address, handle);
    }

    /// Forgets the mappings in a range of addresses.
    pub fn unmap(&mut self, address: u64, bytes: u64) {
        self.imports.unmap(address, bytes);
        self.multicast.unmap(address, bytes);
    }

    /// Forgets a handle.
    pub fn release(&mut self, handle: u64) {
        self.imports.handles.remove(&handle);
        self.multicast.handles.remove(&handle);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_released_and_unmapped_is_gone() {
        let mut foreign = Foreign::new();
        foreign.map(4096, 7);
        assert!(foreign.count() == 0 && !foreign.has_multicast(), "its own");
        foreign.import(7);
        foreign.map(4096, 7);
        assert!(foreign.count() == 2 && !foreign.has_multicast());
        // It turns out to be one only when it is used.
        foreign.note_multicast(7);
        foreign.map(8192, 7);
        foreign.release(7);
        assert!(
            foreign.count() == 2 && foreign.has_multicast(),
            "it is mapped"
        );
        foreign.unmap(8192, 4096);
        assert!(
            foreign.count() == 1 && foreign.has_multicast(),
            "it was mapped before it was used"
        );
        foreign.unmap(4096, 4096);
        assert!(foreign.count() == 0 && !foreign.has_multicast());
        foreign.open(16384);
        foreign.unmap(0, u64::MAX);
        assert_eq!(foreign.count(), 0);
    }
}
