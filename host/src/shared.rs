//! A value in memory that a forked child shares with its parent.

use std::fmt;
use std::ops::Deref;
use std::ptr::{self, NonNull};

/// Counters and flags that both processes may change at any time.
///
/// # Safety
/// A type whose every bit pattern is valid, zeros are its default, and which has no pointers: atomic numbers only.
pub unsafe trait Counters: Sync {}

/// Zeros at first.
pub struct Shared<T: Counters> {
    value: NonNull<T>,
    mapped: bool,
}

// SAFETY: it only gives shared references to a `Sync` value.
unsafe impl<T: Counters> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Counters> Sync for Shared<T> {}

impl<T: Counters + Default> Default for Shared<T> {
    fn default() -> Self {
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping.
        let mapped =
            unsafe { libc::mmap(ptr::null_mut(), size_of::<T>(), protection, flags, -1, 0) };
        if mapped != libc::MAP_FAILED
            && let Some(value) = NonNull::new(mapped.cast())
        {
            return Self {
                value,
                mapped: true,
            };
        }
        // Without a mapping there are no numbers from the child, and all else works.
        Self {
            value: NonNull::from(Box::leak(Box::<T>::default())),
            mapped: false,
        }
    }
}

impl<T: Counters> Deref for Shared<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: mapped or allocated as long as this exists; zeros are a valid value.
        unsafe { self.value.as_ref() }
    }
}

impl<T: Counters> Drop for Shared<T> {
    fn drop(&mut self) {
        // SAFETY: made by `default`, and no reference outlives this.
        unsafe {
            match self.mapped {
                true => drop(libc::munmap(self.value.as_ptr().cast(), size_of::<T>())),
                false => drop(Box::from_raw(self.value.as_ptr())),
            }
        }
    }
}

impl<T: Counters + fmt::Debug> fmt::Debug for Shared<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}
