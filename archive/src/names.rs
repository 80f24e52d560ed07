//! File names inside a checkpoint, in one place.

/// The seal: cryopod's record of a checkpoint, in CRIU's image folder beside `inventory.img`.
pub const SEAL: &str = "cryopod.json";
/// The seal while it is being written. Never read back; a restore that meets only this file treats
/// the folder as unsealed.
pub const SEAL_PARTIAL: &str = ".cryopod.json.partial";
/// CRIU's own inventory: its presence makes a folder a checkpoint.
pub const CRIU_INVENTORY: &str = "inventory.img";
/// CRIU's log of a dump, in the work folder.
pub const DUMP_LOG: &str = "dump.log";
/// CRIU's log of a restore, in the work folder.
pub const RESTORE_LOG: &str = "restore.log";
