//! How bytes are read and written: files that the kernel writes early, streams, tars, compression, digests.

pub(crate) mod blobs;
pub(crate) mod decode;
pub(crate) mod encryption;
pub(crate) mod frames;
pub(crate) mod hash;
pub(crate) mod lease;
mod seal;
pub(crate) mod staging;
pub(crate) mod stream;
pub(crate) mod tarread;
pub(crate) mod write_back;
