//! Names, entries, digests and limits of archives.

pub mod compression;
pub mod digest;
pub mod entry;
pub mod limits;
pub mod names;
pub mod oci;
pub mod text;
