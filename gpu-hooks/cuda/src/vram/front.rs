//! Tells how far a memory has been read or filled by several threads, which finish its pieces in any order.

use std::collections::BTreeMap;

/// A new front is worth saying after so many bytes.
const STEP: usize = 16 << 20;

/// How much of a memory has been read or filled without a gap from its start.
pub struct Front {
    all: usize,
    bytes: usize,
    said: usize,
    /// Pieces above the first gap: lengths by offset.
    above: BTreeMap<usize, usize>,
}

impl Front {
    pub fn new(all: usize) -> Self {
        Self {
            all,
            bytes: 0,
            said: 0,
            above: BTreeMap::new(),
        }
    }

    /// Notes a piece. Returns where the first gap is now, if that is worth saying.
    pub fn advance(&mut self, at: usize, len: usize) -> Option<u64> {
        self.above.insert(at, len);
        while let Some(len) = self.above.remove(&self.bytes) {
            self.bytes += len;
        }
        if self.bytes < self.said + STEP && (self.bytes < self.all || self.said == self.all) {
            return None;
        }
        self.said = self.bytes;
        Some(self.bytes as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_front_is_where_the_first_gap_is() {
        let mut front = Front::new(3 * STEP + 1);
        assert_eq!(front.advance(STEP, STEP), None);
        assert_eq!(front.advance(0, STEP / 2), None);
        assert_eq!(front.advance(STEP / 2, STEP / 2), Some(2 * STEP as u64));
        assert_eq!(front.advance(2 * STEP, STEP - 1), None);
        assert_eq!(front.advance(3 * STEP, 1), None);
        assert_eq!(front.advance(3 * STEP - 1, 1), Some(3 * STEP as u64 + 1));
        assert_eq!(front.above.len(), 0);
    }
}
