//! CRIU plugin that checkpoints and restores CUDA processes through the driver.
