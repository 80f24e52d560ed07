//! What else of a driver is visible on a machine: `/proc/driver/nvidia` and the device nodes.

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::str::FromStr;

use nix::errno::Errno;
use nix::sys::stat::{Mode, SFlag, makedev, mknod};

use super::config::Config;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rdev {
    pub major: u64,
    pub minor: u64,
}

impl FromStr for Rdev {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let parsed = s
            .split_once(':')
            .and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
        let (major, minor) = parsed.ok_or(format!("{s:?} is not MAJOR:MINOR"))?;
        Ok(Self { major, minor })
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Rdevs {
    /// `nvidiactl`: opens and cannot be mapped; outside of the mem major, so that CRIU asks its
    /// plugins about descriptors of it, as with the real one.
    pub ctl: Rdev,
    /// `nvidia-uvm` and `nvidia-uvm-tools`: opens and can be mapped.
    pub uvm: Rdev,
    pub gpu: Rdev,
}

impl Default for Rdevs {
    fn default() -> Self {
        // loop-control, which any kernel with loop devices has, and /dev/zero.
        let zero = Rdev { major: 1, minor: 5 };
        Self {
            ctl: Rdev {
                major: 10,
                minor: 237,
            },
            uvm: zero,
            gpu: zero,
        }
    }
}

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
pub fn write_dev(root: &Path, c: &Config, r: Rdevs) -> io::Result<()> {
    fs::create_dir_all(root)?;
    for (name, rdev) in node_names(c, r) {
        let path = root.join(name);
        match fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let mode = Mode::from_bits_truncate(0o666);
        match mknod(&path, SFlag::S_IFCHR, mode, makedev(rdev.major, rdev.minor)) {
            Ok(()) => fs::set_permissions(&path, fs::Permissions::from_mode(0o666))?,
            // Good enough for tests without root.
            Err(Errno::EPERM) => symlink("/dev/zero", &path)?,
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

fn node_names(c: &Config, r: Rdevs) -> Vec<(String, Rdev)> {
    let mut nodes = vec![
        ("nvidiactl".to_owned(), r.ctl),
        ("nvidia-uvm".to_owned(), r.uvm),
        ("nvidia-uvm-tools".to_owned(), r.uvm),
    ];
    nodes.extend(c.gpus.iter().map(|g| (format!("nvidia{}", g.minor), r.gpu)));
    nodes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tree_reads_like_proc() {
        let dir = tempfile::tempdir().unwrap();
        let c = Config::parse("[[gpu]]\nmig = true\n[[gpu]]\nminor = 3\n", 0).unwrap();
        write_proc(dir.path(), &c).unwrap();
        let nvidia = dir.path().join("driver/nvidia");
        let version = fs::read_to_string(nvidia.join("version")).unwrap();
        assert!(
            version.contains("for x86_64  580.159.04  Release Build"),
            "{version}"
        );
        let info = fs::read_to_string(nvidia.join("gpus/0000:28:00.0/information")).unwrap();
        assert!(
            info.contains("GPU UUID: \t GPU-c0da0000-5130-4d00-8000-000000000001\n"),
            "{info}"
        );
        assert!(info.contains("Device Minor: \t 3\n"));
        assert!(nvidia.join("capabilities/gpu0/mig/gi1/access").exists());
        assert!(!nvidia.join("capabilities/gpu3").exists());
    }
}
