//! Names, layout and schema of the files that make up a checkpoint.
//!
//! This crate is the leaf of the workspace: it knows how a checkpoint lies on disk and nothing about
//! how one is made. [`names`] holds every file name in one place, [`seal`] the schema of
//! `cryopod.json`, the record that travels inside CRIU's image folder.

pub mod names;
pub mod seal;
