//! Checkpoints CUDA processes through the driver.
//!
//! Three programs take part in one operation; this crate holds what they share:
//!
//! * **the runtime wrapper** plans, writes [`messages::config::PluginConfig`] next to the plugin, starts the agent before
//!   anything is frozen, and reads both reports afterwards;
//! * **the CRIU plugin** (`gpu-hooks/plugin`, a cdylib) runs inside CRIU: it makes every ptrace call, decides the order
//!   of the steps and writes [`messages::image::NvidiaImage`] into the image directory. It never loads libcuda;
//! * **the driver agent** (`cryopod-cuda-agent`) loads libcuda once and makes every driver call, each on a thread of
//!   its own so that the calls of several processes overlap. It remembers what it did: when the plugin goes away
//!   without [`messages::protocol::Op::Commit`], it puts every process back into the state it was found in.
//!
//! Plugin and agent talk newline-delimited JSON over a Unix socket ([`messages::protocol`]).
//!
//! All input here may come from another host or from a damaged file: parsers are bounded, validate, and return errors.

use std::path::Path;

pub mod agent;
pub mod copy;
pub mod driver;
pub mod exchange;
pub mod gpus;
pub mod inject;
pub mod messages;
pub mod nvml;
pub mod preflight;
pub mod preload;
pub mod procfs;
pub mod released;
pub mod sharing;
pub mod suspend;
pub mod vram;

/// The version of wrapper, plugin and agent, which know no other's messages.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Writes a JSON file in one step: a reader sees the old contents or the new, never a part.
pub fn write_json(path: &Path, value: &impl serde::Serialize) -> std::io::Result<()> {
    let mut text = serde_json::to_vec_pretty(value)?;
    text.push(b'\n');
    let mut name = path.as_os_str().to_owned();
    name.push(".tmp");
    let temporary = Path::new(&name);
    std::fs::write(temporary, text)?;
    std::fs::rename(temporary, path)
}
