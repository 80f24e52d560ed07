//! Models circular doubly linked lists in one array, with the properties that decide what CRIU's amdgpu plugin does. An
//! element that is put into a second list still hangs in the first. One that was removed leads nowhere. A walk takes
//! the next element before it looks at this one.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Broken {
    Endless,
    Nowhere,
    /// A list does not fit the buffer that the plugin prints it into.
    TooLong,
}

const NOWHERE: usize = usize::MAX;

/// Elements and heads by number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ListRing {
    prev: Vec<usize>,
    next: Vec<usize>,
}

impl ListRing {
    pub(super) fn new(elements: usize) -> Self {
        Self {
            prev: vec![NOWHERE; elements],
            next: vec![NOWHERE; elements],
        }
    }

    /// Makes an empty list; returns its head's number.
    pub(super) fn head(&mut self) -> usize {
        let head = self.next.len();
        self.prev.push(head);
        self.next.push(head);
        head
    }

    pub(super) fn len(&self) -> usize {
        self.next.len()
    }

    /// Removes the heads made since there were `len` elements and heads.
    pub(super) fn truncate(&mut self, len: usize) {
        self.prev.truncate(len);
        self.next.truncate(len);
    }

    pub(super) fn next(&self, at: usize) -> Result<usize, Broken> {
        self.next
            .get(at)
            .copied()
            .filter(|n| *n < self.len())
            .ok_or(Broken::Nowhere)
    }

    pub(super) fn is_empty(&self, head: usize) -> bool {
        self.next[head] == head
    }

    fn link(&mut self, element: usize, prev: usize, next: usize) -> Result<(), Broken> {
        *self.prev.get_mut(next).ok_or(Broken::Nowhere)? = element;
        self.next[element] = next;
        self.prev[element] = prev;
        *self.next.get_mut(prev).ok_or(Broken::Nowhere)? = element;
        Ok(())
    }

    pub(super) fn push_front(&mut self, element: usize, head: usize) -> Result<(), Broken> {
        self.link(element, head, self.next[head])
    }

    pub(super) fn push_back(&mut self, element: usize, head: usize) -> Result<(), Broken> {
        self.link(element, self.prev[head], head)
    }

    pub(super) fn remove(&mut self, element: usize) -> Result<(), Broken> {
        let (prev, next) = (self.prev[element], self.next[element]);
        *self.prev.get_mut(next).ok_or(Broken::Nowhere)? = prev;
        *self.next.get_mut(prev).ok_or(Broken::Nowhere)? = next;
        self.prev[element] = NOWHERE;
        self.next[element] = NOWHERE;
        Ok(())
    }

    /// Walks a list without changing it until `found`.
    pub(super) fn find(
        &self,
        head: usize,
        mut found: impl FnMut(usize) -> bool,
    ) -> Result<Option<usize>, Broken> {
        let mut at = self.next(head)?;
        // After more steps than the array has elements, it has been everywhere it can reach.
        for _ in 0..=self.len() {
            if at == head {
                return Ok(None);
            }
            if found(at) {
                return Ok(Some(at));
            }
            at = self.next(at)?;
        }
        Err(Broken::Endless)
    }
}
