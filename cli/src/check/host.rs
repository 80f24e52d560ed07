//! Gathers the facts for `cryopod check`.

use std::ffi::OsStr;
use std::path::Path;

use cryopod_cuda::gpus::nvidia;
use cryopod_gpu_plan::gpus::amd_gpus;
use cryopod_gpu_plan::hazards::limits::sets_others_limits;
use cryopod_gpu_plan::plan::Plugins;
use cryopod_host::cgroups;
use cryopod_host::files::Host;
use cryopod_host::nodes::Vendor;
use cryopod_operations::config::{Config, ConfigError, Nvidia};
use cryopod_operations::criu::helpers::{Fault, Probe};
use cryopod_operations::criu::opts::{self, CriuOptions};
use cryopod_operations::criu::plugins;
use cryopod_operations::criu::program;
use cryopod_operations::criu::{find as installed, numbers, version_line};
use cryopod_operations::request::lowlevel::{LowLevel, RuntimeKind};
use cryopod_operations::vram::agent;

use super::{CheckInput, LIMIT, ReportLine, criu, tested};
use crate::setup::{self, Target};

/// The first NVIDIA driver branch that can checkpoint whole processes, and the first that can restore on other GPUs.
const DRIVER_CHECKPOINT: u32 = 570;
const DRIVER_OTHER_GPU: u32 = 580;

/// Returns true if the dynamic linker can load this shared library.
pub fn can_load(name: &str) -> bool {
    let Ok(name) = std::ffi::CString::new(name) else {
        return false;
    };
    // SAFETY: libcriu has no constructors with effects; the handle is closed at once.
    unsafe {
        let handle = libc::dlopen(name.as_ptr(), libc::RTLD_LAZY);
        !handle.is_null() && libc::dlclose(handle) == 0
    }
}

pub fn check(input: &CheckInput<'_>, config: Result<Config, ConfigError>) -> Vec<ReportLine> {
    let mut lines = Vec::new();
    lines.push(if input.root {
        ReportLine::ok("user", "root")
    } else {
        ReportLine::missing(
            "user",
            "not root",
            "CRIU needs root to checkpoint containers; run engines and this check as root",
        )
    });
    if input.root && !sets_others_limits(input.host) {
        lines.push(ReportLine::note(
            "CAP_SYS_RESOURCE",
            "missing: only processes of root can be checkpointed",
            "CRIU reads and sets the limits of each process: give the engine this capability",
        ));
    }
    let config = match config {
        Ok(config) => {
            lines.push(ReportLine::ok("configuration", "valid"));
            config
        }
        Err(e) => {
            lines.push(ReportLine::missing(
                "configuration",
                e.to_string(),
                "correct the file; checkpoints and restores fail until then",
            ));
            Config::default()
        }
    };
    criu::check(input, &mut lines);
    runtimes(input, &config, &mut lines);
    helpers(input, &config, &mut lines);
    engines(input, &mut lines);
    set_up(input, &mut lines);
    lines.push(tested::line(input.tools, LIMIT));
    cgroups(input, &config, &mut lines);
    shmem(input.host, &mut lines);
    let amd_here = !amd_gpus::gpus(input.host).is_empty();
    let plugins = match installed(input.tools, LIMIT) {
        Some(criu) => plugins::checked(&config, input.host, input.tools, &criu, amd_here),
        None => plugins::find(&config, input.host),
    };
    nvidia(input.host, &config.nvidia, &plugins, &mut lines);
    amd(input.host, &plugins, &mut lines);
    lines
}

fn runtimes(input: &CheckInput<'_>, config: &Config, lines: &mut Vec<ReportLine>) {
    let low = match LowLevel::find(config) {
        Ok(low) => low,
        Err(e) => {
            lines.push(ReportLine::missing(
                "low-level runtime",
                e.to_string(),
                "install crun or runc",
            ));
            return;
        }
    };
    let version = version_line(input.tools, &low.path, LIMIT);
    match version {
        None => lines.push(ReportLine::missing(
            "low-level runtime",
            format!("{} does not run", low.path.display()),
            "reinstall it",
        )),
        Some(v) => lines.push(ReportLine::ok(
            "low-level runtime",
            format!("{v} at {}", low.path.display()),
        )),
    }
    if low.kind == RuntimeKind::Crun {
        let built_in = input
            .tools
            .output(&low.path, &[OsStr::new("--version")], LIMIT)
            .is_ok_and(|o| o.stdout.contains("+CRIU"));
        let ours = program::libcriu(config);
        let ours = ours.as_deref().and_then(Path::to_str);
        let found = ours
            .into_iter()
            .chain(["libcriu.so.2"])
            .find(|l| (input.has_library)(l));
        lines.push(match (built_in, found) {
            (true, Some(library)) => ReportLine::ok("libcriu", format!("crun can load {library}")),
            (true, None) => ReportLine::missing(
                "libcriu",
                "crun needs libcriu.so.2 and it is not installed",
                "install it (Debian: libcriu2; Fedora: criu-libs) or the package cryopod-criu, or use runc",
            ),
            (false, _) => ReportLine::missing(
                "libcriu",
                "this crun was built without CRIU",
                match input.tools.find("runc") {
                    Some(_) => {
                        "use runc: `cryopod setup` of your engine names it, or runtime.low_level = \"runc\" in the configuration"
                    }
                    None => "install runc, or a crun with CRIU",
                },
            ),
        });
    }
    lines.push(match setup::own(input.tools, "cryopod-runtime") {
        Ok(path) => ReportLine::ok("cryopod-runtime", path.display().to_string()),
        Err(_) => ReportLine::missing(
            "cryopod-runtime",
            "neither beside cryopod nor on PATH",
            "install all of cryopod, in /usr/local/bin, say",
        ),
    });
}

fn helpers(input: &CheckInput<'_>, config: &Config, lines: &mut Vec<ReportLine>) {
    let probe = Probe {
        tools: input.tools,
        limit: LIMIT,
    };
    let line = |name, found: Result<String, Fault>| match found {
        Ok(found) => ReportLine::ok(name, found),
        Err(fault) => ReportLine::missing(name, fault.what, fault.remedy),
    };
    lines.push(line("tar", probe.tar()));
    let runc = LowLevel::find(config).is_ok_and(|low| low.kind == RuntimeKind::Runc);
    lines.push(match probe.ip() {
        // runc does not let CRIU save networks.
        Err(fault) if runc => ReportLine::note("ip", fault.what, fault.remedy),
        found => line("ip", found),
    });
    let lock = match CriuOptions::in_files(&opts::earlier_files(), &config.criu.options) {
        Some(lock) => probe.lock(lock, false),
        None => probe.any_lock(false).map(|(_, found)| found),
    };
    lines.push(line("network lock", lock));
}

fn engines(input: &CheckInput<'_>, lines: &mut Vec<ReportLine>) {
    let mut found = Vec::new();
    for (name, program) in [
        ("podman", "podman"),
        ("docker", "dockerd"),
        ("containerd", "containerd"),
        ("nerdctl", "nerdctl"),
        ("CRI-O", "crio"),
    ] {
        let Some(path) = input.tools.find(program) else {
            continue;
        };
        let version = version_line(input.tools, &path, LIMIT).and_then(|l| numbers(&l));
        found.push(match version {
            Some(n) => format!(
                "{name} {}",
                n.iter().map(u32::to_string).collect::<Vec<_>>().join(".")
            ),
            None => name.to_owned(),
        });
    }
    lines.push(if found.is_empty() {
        ReportLine::note("engines", "none found", "install podman, docker or containerd; the low-level runtime can also be used by itself")
    } else {
        ReportLine::ok("engines", found.join(", "))
    });
}

/// Tells which engines do not know cryopod yet. containerd needs to know it for Kubernetes alone.
fn set_up(input: &CheckInput<'_>, lines: &mut Vec<ReportLine>) {
    for (name, program, target) in [
        ("podman setup", "podman", Target::Podman),
        ("docker setup", "dockerd", Target::Docker),
        ("Kubernetes setup", "kubelet", Target::Kubernetes),
    ] {
        if input.tools.find(program).is_none() {
            continue;
        }
        lines.push(match setup::is_done(target, input.host, input.tools) {
            true => ReportLine::ok(name, "done"),
            false => ReportLine::note(
                name,
                "its configuration does not name cryopod",
                format!("cryopod setup {}", target.name()),
            ),
        });
    }
}

fn cgroups(input: &CheckInput<'_>, config: &Config, lines: &mut Vec<ReportLine>) {
    let setup = cgroups::setup(input.host);
    let crun = LowLevel::find(config).is_ok_and(|l| l.kind == RuntimeKind::Crun);
    lines.push(match (setup, cgroups::beside_v1(input.host)) {
        (_, Some(controllers)) if crun => ReportLine::missing(
            "cgroups",
            format!("hybrid (v1 and v2), v2 has {controllers}"),
            "crun starts no container here (\"cgroups in hybrid mode not supported, drop all controllers from cgroupv2\"); use runc, or a host with v2 alone",
        ),
        (other, _) => ReportLine::ok("cgroups", other.label()),
    });
}

fn shmem(host: &Host, lines: &mut Vec<ReportLine>) {
    const FILE: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let Some(text) = host.line(FILE) else {
        lines.push(ReportLine::note(
            "shmem huge pages",
            "the kernel has none",
            "large GPU memories are saved more slowly",
        ));
        return;
    };
    let chosen = text
        .split(['[', ']'])
        .nth(1)
        .unwrap_or("unknown")
        .to_owned();
    lines.push(match chosen.as_str() {
        "advise" | "always" | "within_size" | "force" => ReportLine::ok("shmem huge pages", chosen),
        _ => ReportLine::note(
            "shmem huge pages",
            chosen,
            format!("echo advise > {FILE}: GPU memory is saved faster with huge pages"),
        ),
    });
}

fn nvidia(host: &Host, config: &Nvidia, plugins: &Plugins, lines: &mut Vec<ReportLine>) {
    let Some(version) = nvidia::driver_version(host) else {
        lines.push(ReportLine::note(
            "NVIDIA driver",
            "not loaded",
            "only needed for containers with NVIDIA GPUs",
        ));
        return;
    };
    let gpus = nvidia::gpus(host);
    let mut models: Vec<&str> = gpus.iter().map(|g| g.model.as_str()).collect();
    models.dedup();
    let found = format!("{version}, {} GPU(s): {}", gpus.len(), models.join(", "));
    lines.push(match nvidia::branch(&version) {
        Some(b) if b >= DRIVER_OTHER_GPU => ReportLine::ok("NVIDIA driver", found),
        Some(b) if b >= DRIVER_CHECKPOINT => ReportLine::note(
            "NVIDIA driver",
            found,
            "a restore on other GPUs needs driver 580 or newer",
        ),
        _ => ReportLine::missing(
            "NVIDIA driver",
            found,
            "CUDA processes can be checkpointed from driver 570 on; update the driver",
        ),
    });
    lines.push(plugin("NVIDIA plugin", plugins, Vendor::Nvidia));
    if let Some(plugin) = &plugins.nvidia {
        lines.push(match agent::find(config, Some(plugin)) {
            Some(path) => ReportLine::ok("NVIDIA agent", path.display().to_string()),
            None => ReportLine::missing(
                "NVIDIA agent",
                "cryopod-cuda-agent was not found",
                "install it beside the plugin, or name it as `nvidia.agent` in the configuration",
            ),
        });
    }
}

fn amd(host: &Host, plugins: &Plugins, lines: &mut Vec<ReportLine>) {
    let gpus = amd_gpus::gpus(host);
    if gpus.is_empty() {
        let found = match host.char_device("/dev/kfd") {
            Some((major, minor)) => {
                format!("driver loaded, /dev/kfd is {major}:{minor}, no GPU visible")
            }
            None => "not loaded".into(),
        };
        lines.push(ReportLine::note(
            "AMD driver",
            found,
            "only needed for containers with AMD GPUs",
        ));
        return;
    }
    let version = amd_gpus::driver_version(host).unwrap_or_else(|| "unknown version".into());
    lines.push(ReportLine::ok(
        "AMD driver",
        format!("{version}, {} GPU(s)", gpus.len()),
    ));
    lines.push(plugin("AMD plugin", plugins, Vendor::Amd));
}

fn plugin(name: &'static str, plugins: &Plugins, vendor: Vendor) -> ReportLine {
    match plugins.usable(vendor) {
        Ok(path) => ReportLine::ok(name, path.display().to_string()),
        Err(fault) => ReportLine::missing(name, fault.what, fault.remedy),
    }
}

#[cfg(test)]
mod tests {
    use super::super::CheckStatus;
    use super::super::tests::Says;
    use super::*;

    #[test]
    fn versions_newer_than_tested() {
        for (tools, want, says) in [
            (&[][..], CheckStatus::Ok, "criu 4.1 to "),
            (
                &[("criu", "Version: 4.3\n")],
                CheckStatus::Ok,
                "runc 1.1 to ",
            ),
            (
                &[("podman", "podman version 3.4.4\n")],
                CheckStatus::Note,
                "podman 3.4 is older than",
            ),
            (
                &[
                    ("criu", "Version: 99.1.2\n"),
                    ("runc", "runc version 1.1.15+ds1\n"),
                ],
                CheckStatus::Note,
                "criu 99.1 is newer",
            ),
        ] {
            let line = tested::line(&Says(tools), LIMIT);
            assert_eq!(line.status, want, "{tools:?}");
            assert!(line.found.contains(says), "{}", line.found);
        }
    }

    fn status(lines: &[ReportLine], name: &str) -> Option<CheckStatus> {
        lines.iter().find(|l| l.name == name).map(|l| l.status)
    }

    #[test]
    fn an_nvidia_host_needs_plugin_and_agent() {
        let dir = tempfile::tempdir().unwrap();
        let proc = dir.path().join("proc/driver/nvidia");
        std::fs::create_dir_all(&proc).unwrap();
        let host = Host::at(dir.path());
        let check = |version: &str, plugins: &Plugins| {
            std::fs::write(
                proc.join("version"),
                format!("NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Wed\n"),
            )
            .unwrap();
            let mut lines = Vec::new();
            nvidia(&host, &Nvidia::default(), plugins, &mut lines);
            (
                status(&lines, "NVIDIA driver"),
                status(&lines, "NVIDIA plugin"),
                status(&lines, "NVIDIA agent"),
            )
        };
        let plugin = dir.path().join("cryopod_nvidia.so");
        let with = Plugins {
            nvidia: Some(plugin.clone()),
            ..Plugins::default()
        };
        assert_eq!(
            check("580.1.2", &Plugins::default()),
            (Some(CheckStatus::Ok), Some(CheckStatus::Missing), None)
        );
        assert_eq!(
            check("570.1.2", &with),
            (
                Some(CheckStatus::Note),
                Some(CheckStatus::Ok),
                Some(CheckStatus::Missing)
            )
        );
        std::fs::write(plugin.with_file_name("cryopod-cuda-agent"), "").unwrap();
        assert_eq!(
            check("550.1.2", &with),
            (
                Some(CheckStatus::Missing),
                Some(CheckStatus::Ok),
                Some(CheckStatus::Ok)
            )
        );
    }

    #[test]
    fn hugepage_setting() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path().join("sys/kernel/mm/transparent_hugepage");
        std::fs::create_dir_all(&d).unwrap();
        for (text, want) in [
            ("always within_size [advise] never\n", CheckStatus::Ok),
            ("always advise [never]\n", CheckStatus::Note),
        ] {
            std::fs::write(d.join("shmem_enabled"), text).unwrap();
            let mut lines = Vec::new();
            shmem(&Host::at(dir.path()), &mut lines);
            assert_eq!(lines[0].status, want);
        }
    }
}
