//! Checkpoint archives: names, layout, schema; reading, writing, checking.
//!
//! This crate is the leaf of the workspace: it knows how a checkpoint lies on disk and nothing about how one is
//! made. [`names`] holds every file name in one place, [`seal`] the schema of `cryopod.json`, the record that
//! travels inside CRIU's image folder. [`source`] reads checkpoints of every kind, [`mod@pack`] writes them,
//! [`mod@unpack`] and [`mod@verify`] do what their names say. Memory is bounded whatever an archive's size.

pub mod around;
mod blobs;
pub mod criu;
mod decode;
pub mod digest;
pub mod engine;
pub mod entry;
pub mod error;
pub mod flatten;
mod frames;
pub mod handover;
mod hash;
pub mod lane;
pub mod limits;
pub mod names;
pub mod oci;
pub mod pack;
pub mod progress;
pub mod seal;
pub mod source;
mod staging;
pub mod store;
mod stream;
mod tarread;
pub mod text;
mod through;
pub mod unpack;
pub mod verify;
mod walk;

pub use error::{Bad, Error};
pub use stream::Compression;
