//! What cryopod does in a cluster: the installer's pods, `kubectl cryopod`, and NRI.

pub mod installer;
pub mod nri;
pub mod plugin;
