//! What else of a driver is visible on a machine: `/proc/driver/nvidia` and the device nodes.

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use nix::errno::Errno;
use nix::sys::stat::{Mode, SFlag, makedev, mknod};

use super::config::Config;

/// Device numbers. `nvidiactl` is loop-control, which any kernel with loop devices has: it opens, cannot be mapped, and is
/// outside of the mem major, so that CRIU asks its plugins about descriptors of it, as with the real one. The other nodes
/// are /dev/zero: they open and can be mapped.
const CTL: (u64, u64) = (10, 237);
const ZERO: (u64, u64) = (1, 5);

/// Writes `<root>/driver/nvidia` and `<root>/devices` as they are under `/proc` of a real machine.
pub fn write_proc(root: &Path, c: &Config) -> io::Result<()> {
    let nvidia = root.join("driver/nvidia");
    let gpus = nvidia.join("gpus");
    if gpus.exists() {
        fs::remove_dir_all(&gpus)?;
    }
    fs::create_dir_all(&gpus)?;
    fs::write(
        nvidia.join("version"),
        format!(
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  \
             (cusim)  Thu Jan  1 00:00:00 UTC 2026\nGCC version:  gcc version 13.3.0 (simulated)\n",
            c.driver
        ),
    )?;
    fs::write(
        nvidia.join("params"),
        "ResmanDebugLevel: 4294967295\nModifyDeviceFiles: 1\nDeviceFileMode: 438\n",
    )?;
    fs::write(nvidia.join("registry"), "Binary: \"\"\n")?;
    for g in &c.gpus {
        let dir = gpus.join(&g.pci);
        fs::create_dir_all(&dir)?;
        fs::write(
            dir.join("information"),
            format!(
                "Model: \t\t {}\nIRQ:   \t\t {}\nGPU UUID: \t {}\nVideo BIOS: \t 96.00.99.00.01\n\
                 Bus Type: \t PCIe\nDMA Size: \t 52 bits\nDMA Mask: \t 0xfffffffffffff\n\
                 Bus Location: \t {}\nDevice Minor: \t {}\nGPU Firmware: \t {}\nGPU Excluded:\t No\n",
                g.name,
                100 + g.minor,
                g.uuid,
                g.pci,
                g.minor,
                c.driver
            ),
        )?;
        fs::write(dir.join("registry"), "Binary: \"\"\n")?;
        fs::write(
            dir.join("power"),
            "Runtime D3 status:          Not supported\nVideo Memory:               Active\n",
        )?;
    }
    let caps = nvidia.join("capabilities");
    if caps.exists() {
        fs::remove_dir_all(&caps)?;
    }
    let cap = |at: &Path, minor: u32| {
        if let Some(dir) = at.parent() {
            fs::create_dir_all(dir)?;
        }
        fs::write(
            at,
            format!("DeviceFileMinor: {minor}\nDeviceFileMode: 256\nDeviceFileModify: 1\n"),
        )
    };
    cap(&caps.join("mig/config"), 1)?;
    cap(&caps.join("mig/monitor"), 2)?;
    for g in c.gpus.iter().filter(|g| g.mig) {
        let instance = caps.join(format!("gpu{}/mig/gi1", g.minor));
        cap(&instance.join("access"), 12 + 135 * g.minor)?;
        cap(&instance.join("ci0/access"), 13 + 135 * g.minor)?;
    }
    fs::write(
        root.join("devices"),
        "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n238 nvidia-uvm\n241 nvidia-caps\n\nBlock devices:\n",
    )
}

/// Makes the device nodes in this directory; nodes of these names that exist are replaced.
pub fn write_dev(root: &Path, c: &Config) -> io::Result<()> {
    fs::create_dir_all(root)?;
    let gpus = c.gpus.iter().map(|g| format!("nvidia{}", g.minor));
    let others = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"].map(str::to_owned);
    for name in others.into_iter().chain(gpus) {
        let (major, minor) = if name == "nvidiactl" { CTL } else { ZERO };
        let path = root.join(&name);
        match fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let mode = Mode::from_bits_truncate(0o666);
        match mknod(&path, SFlag::S_IFCHR, mode, makedev(major, minor)) {
            Ok(()) => fs::set_permissions(&path, fs::Permissions::from_mode(0o666))?,
            // Good enough for tests without root.
            Err(Errno::EPERM) => symlink("/dev/zero", &path)?,
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}
