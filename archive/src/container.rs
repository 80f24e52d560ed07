//! What an archive says of the container: the engine's records, its image, its files, its surroundings.

pub mod carried;
pub mod engine;
pub mod file_sizes;
pub mod surroundings;
