//! Reads, writes and verifies checkpoint archives: names, layout, schema.
//!
//! This crate is the leaf of the workspace: it knows how a checkpoint lies on disk and nothing about how one is made.
//! [`names`] holds every file name. [`metadata`] holds the schema of `cryopod.json`, the record inside CRIU's image
//! directory. [`source`] reads checkpoints of every kind; [`mod@pack`] writes them; [`mod@unpack`] extracts and
//! [`mod@verify`] checks them. Memory use is bounded whatever the archive's size.

mod blobs;
pub mod carried;
pub mod criu;
mod decode;
pub mod digest;
mod direct_io;
pub mod engine;
pub mod entry;
pub mod error;
pub mod file_sizes;
pub mod flatten;
mod frames;
mod hash;
mod lease;
pub mod limits;
pub mod metadata;
pub mod names;
pub mod oci;
pub mod pack;
pub mod progress;
pub mod source;
mod staging;
pub mod store;
mod stream;
pub mod surroundings;
mod tarread;
pub mod text;
pub mod unpack;
pub mod verify;
pub mod vram;

pub use error::{Bad, Error};
pub use stream::{Compression, decompressed};
