//! What cryopod does in a cluster: the installer's pods, and `kubectl cryopod`.

pub mod installer;
pub mod plugin;
