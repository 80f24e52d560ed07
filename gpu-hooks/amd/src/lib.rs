//! What a checkpoint of AMD GPUs needs around CRIU's amdgpu plugin: chooses the GPUs that it may see at a restore, and
//! finds what it left out or chose otherwise.
//!
//! - [`image`]: reads the plugin's images.
//! - [`topology`]: reads CPUs, GPUs and links, of an image or of this host.
//! - [`checks`]: compares what the plugin compares; its switches.
//! - [`choose`]: chooses the GPUs that the plugin sees.
//! - [`pages`]: moves the GPU memory that the plugin saves into VRAM files, and back.
//! - [`open_nodes`]: refuses processes whose open nodes the plugin could not restore.
//! - [`saved`]: finds what the plugin has left out without an error, of a checkpoint and of a restore.
//! - [`unpause`]: lets queues run again that a failed checkpoint has left paused.
//!
//! A topology node with `gpu_id` 0 is a CPU. The kernel refuses `gpu_id` and `properties` to a reader whose device
//! cgroup does not allow the render node; such nodes are left out (facts of CRIU's amdgpu plugin).

pub mod checks;
pub mod choose;
pub mod image;
pub mod open_nodes;
pub mod pages;
mod reasons;
pub mod saved;
pub mod topology;
pub mod unpause;

#[cfg(test)]
mod tests;
