//! Buffers that go back to their pool when they are dropped.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

/// Buffers for reuse.
#[derive(Clone, Default)]
pub(crate) struct Spare(Arc<Mutex<Vec<Vec<u8>>>>);

/// A buffer of a [`Spare`], with what has to live as long: the right to hold it.
pub(crate) struct Lease<T> {
    data: Vec<u8>,
    spare: Spare,
    pub(crate) right: T,
}

impl Spare {
    const KEPT: usize = 64;

    /// Returns a buffer, empty or with what it held before.
    pub(crate) fn lease<T>(&self, right: T) -> Lease<T> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Lease {
            data: all.pop().unwrap_or_default(),
            spare: self.clone(),
            right,
        }
    }
}

impl<T> Drop for Lease<T> {
    fn drop(&mut self) {
        let mut all = self.spare.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() < Spare::KEPT {
            all.push(std::mem::take(&mut self.data));
        }
    }
}

impl<T> Deref for Lease<T> {
    type Target = Vec<u8>;
    fn deref(&self) -> &Vec<u8> {
        &self.data
    }
}

impl<T> DerefMut for Lease<T> {
    fn deref_mut(&mut self) -> &mut Vec<u8> {
        &mut self.data
    }
}

impl<T> AsRef<[u8]> for Lease<T> {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}
