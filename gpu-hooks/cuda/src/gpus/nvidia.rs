//! Reads the host's NVIDIA GPUs from `/proc/driver/nvidia`.
//!
//! It loads no library of the driver, so a program that cannot run CUDA gets the same facts.

use cryopod_archive::metadata::Gpu;
use cryopod_host::nodes::Vendor;
use serde_json::{Map, Value};

use cryopod_host::files::Host;

pub const PROC: &str = "/proc/driver/nvidia";

/// The loaded kernel driver's version, `580.159.04`; `None` if no driver is loaded.
pub fn driver_version(host: &Host) -> Option<String> {
    let text = host.text(format!("{PROC}/version")).ok()?;
    let line = text.lines().find(|l| l.starts_with("NVRM version"))?;
    // "... Kernel Module  580.159.04  Release Build" or "... Open Kernel Module for x86_64  580.159.04 ..."
    line.split_whitespace()
        .find(|w| {
            w.contains('.')
                && w.split('.')
                    .all(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
        })
        .map(str::to_owned)
}

/// Returns a driver version's first number, the branch: 580.
pub fn branch(version: &str) -> Option<u32> {
    version.split('.').next()?.parse().ok()
}

/// The host's GPUs in PCI order. GPUs that the driver excludes are left out.
pub fn gpus(host: &Host) -> Vec<Gpu> {
    let mut found = Vec::new();
    for pci in host.names(format!("{PROC}/gpus")) {
        let Ok(text) = host.text(format!("{PROC}/gpus/{pci}/information")) else {
            continue;
        };
        let field = |name: &str| {
            text.lines().find_map(|l| {
                let (key, value) = l.split_once(':')?;
                (key.trim() == name).then(|| value.trim().to_owned())
            })
        };
        if field("GPU Excluded").as_deref() == Some("Yes") {
            continue;
        }
        let Some(id) = field("GPU UUID").filter(|u| u.starts_with("GPU-") && !u.contains('?'))
        else {
            continue;
        };
        let mut properties = Map::new();
        if let Some(firmware) = field("GPU Firmware") {
            properties.insert("gpu_firmware".into(), Value::String(firmware));
        }
        found.push(Gpu {
            index: u32::try_from(found.len()).unwrap_or(u32::MAX),
            model: field("Model").unwrap_or_default(),
            pci: field("Bus Location").unwrap_or(pci),
            minor: field("Device Minor").and_then(|m| m.parse().ok()),
            properties,
            ..Gpu::new(Vendor::Nvidia, id)
        });
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryopod_test_files::TestFiles;

    const INFORMATION: &str = "Model: \t\t NVIDIA H200\nIRQ:   \t\t 62\nGPU UUID: \t GPU-1b7a1d2e-0000-1111-2222-333344445555\nVideo BIOS: \t 96.00.b7.00.01\nBus Type: \t PCIe\nDMA Size: \t 52 bits\nDMA Mask: \t 0xfffffffffffff\nBus Location: \t 0000:65:00.0\nDevice Minor: \t 3\nGPU Firmware: \t 580.159.04\nGPU Excluded:\t No\n";

    fn host(version: &str, gpus: &[(&str, &str)]) -> (tempfile::TempDir, Host) {
        let dir = tempfile::tempdir().unwrap();
        let proc = dir.path().join("proc/driver/nvidia");
        proc.put("version", version);
        for (pci, text) in gpus {
            let d = proc.join("gpus").join(pci);
            d.put("information", text);
        }
        let host = Host::at(dir.path());
        (dir, host)
    }

    #[test]
    fn versions_of_both_kernel_modules() {
        for text in [
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Wed Jan  1 00:00:00 UTC 2026\nGCC version:  gcc version 12.2.0\n",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (dvs@x)  Wed\n",
        ] {
            assert_eq!(
                driver_version(&host(text, &[]).1).as_deref(),
                Some("580.159.04")
            );
        }
        assert_eq!(driver_version(&Host::at("/nowhere")), None);
        assert_eq!(branch("580.159.04"), Some(580));
        assert_eq!(branch("x"), None);
    }

    #[test]
    fn gpus_are_read_and_excluded_ones_left_out() {
        let excluded = INFORMATION.replace("Excluded:\t No", "Excluded:\t Yes");
        let unready =
            INFORMATION.replace("GPU-1b7a1d2e-0000-1111-2222-333344445555", "GPU-????????");
        let (_dir, host) = host(
            "",
            &[
                ("0000:01:00.0", &excluded),
                ("0000:02:00.0", &unready),
                ("0000:65:00.0", INFORMATION),
            ],
        );
        let gpus = gpus(&host);
        assert_eq!(gpus.len(), 1);
        assert_eq!(gpus[0].id, "GPU-1b7a1d2e-0000-1111-2222-333344445555");
        assert_eq!(
            (gpus[0].model.as_str(), gpus[0].pci.as_str(), gpus[0].minor),
            ("NVIDIA H200", "0000:65:00.0", Some(3))
        );
    }
}
