//! Reads, writes and verifies checkpoint archives: names, layout, schema.
//!
//! This crate is the leaf of the workspace: it knows how a checkpoint lies on disk and nothing about how one is made.
//! [`format::names`] holds every file name. [`metadata`] holds the schema of `cryopod.json`, the record inside CRIU's image
//! directory. [`source`] reads checkpoints of every kind; [`mod@pack`] writes them; [`mod@unpack`] extracts and
//! [`mod@verify`] checks them. Memory use is bounded whatever the archive's size.

mod bytes;
pub mod container;
pub mod criu;
pub mod error;
pub mod flatten;
pub mod format;
pub mod metadata;
pub mod pack;
pub mod progress;
pub mod source;
pub mod store;
pub mod temporary;
pub mod unpack;
pub mod verify;
pub mod vram;

pub use bytes::encryption::{Identities, Recipients};
pub use bytes::stream::decompressed;
pub use error::{Bad, Error};
pub use format::compression::Compression;
