//! Finds the CRIU plugins of this host, and checks whether the installed CRIU can load them.
//!
//! A plugin that CRIU cannot load ends the whole operation in the middle, or worse, CRIU skips it silently. So CRIU's
//! amdgpu plugin, which is not ours, is checked before anything is frozen: its descriptor against CRIU's own, and its
//! libraries and symbols with the loader that CRIU is started with.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::criu::elf::{self, CriuElf};
use crate::criu::program;
use cryopod_archive::metadata::Metadata;
use cryopod_gpu_plan::plan::Plugins;
use cryopod_gpu_plan::refusal::Refusal;
use cryopod_host::files::Host;
use cryopod_host::nodes::Vendor;
use cryopod_host::programs::Tools;

use crate::config::Config;
use crate::criu::{self, Criu};

/// The file name of cryopod's own plugin.
pub const NVIDIA_PLUGIN: &str = "cryopod_nvidia.so";
/// The file name of CRIU's plugin for AMD GPUs.
pub const AMD_PLUGIN: &str = "amdgpu_plugin.so";
const OUR_DIRECTORIES: [&str; 3] = [
    "/usr/local/lib/cryopod",
    "/usr/lib/cryopod",
    "/usr/libexec/cryopod",
];
/// Where CRIU's plugins are looked for, by distribution. ROCm's directories are added to them.
const CRIU_DIRECTORIES: [&str; 7] = [
    "/usr/lib/criu",
    "/usr/lib64/criu",
    "/usr/libexec/criu",
    "/usr/local/lib/criu",
    "/usr/local/lib64/criu",
    "/usr/lib/x86_64-linux-gnu/criu",
    "/opt/rocm/lib/criu",
];
/// CRIU's plugin interfaces: the first version that no longer has it, its ABI, its number of hooks.
const INTERFACES: [([u32; 2], u32, u32); 3] = [
    ([4, 2], 0x200, 12),
    ([4, 3], 0x200, 13),
    ([4, 4], 0x300, 17),
];

/// Finds the plugins that the configuration names, else those in the usual directories.
pub fn find(config: &Config, host: &Host) -> Plugins {
    let mut plugins = Plugins::default();
    match &config.nvidia.plugin {
        Some(path) => named(&mut plugins, Vendor::Nvidia, path, "nvidia.plugin", host),
        None => {
            let beside = program::beside().filter(|_| host.root() == Path::new("/"));
            let directories = beside.into_iter();
            let directories = directories.chain(OUR_DIRECTORIES.map(PathBuf::from));
            plugins.nvidia = search(&directories.collect::<Vec<_>>(), NVIDIA_PLUGIN, host);
        }
    }
    match &config.amd.plugin {
        Some(path) => named(&mut plugins, Vendor::Amd, path, "amd.plugin", host),
        None => {
            let directories = amd_directories(host);
            plugins.amd = search(&directories, AMD_PLUGIN, host);
            if plugins.amd.is_none() {
                plugins
                    .faults
                    .insert(Vendor::Amd, amd_absent(&directories, host));
            }
        }
    }
    plugins
}

/// [`find`], and checks CRIU's amdgpu plugin against CRIU, if this operation needs it.
pub fn checked(
    config: &Config,
    host: &Host,
    tools: &dyn Tools,
    criu: &Criu,
    needs_amd: bool,
) -> Plugins {
    let mut plugins = find(config, host);
    if needs_amd
        && let Ok(path) = plugins.usable(Vendor::Amd).cloned()
        && let Err(fault) = loadable(&path, criu, tools, config.limits.tool())
    {
        plugins.faults.insert(Vendor::Amd, fault);
    }
    plugins
}

/// Returns the plugins that a checkpoint's images need: those of the vendors whose driver a process used. The error
/// lists everything that is wrong with them.
pub fn needed(plugins: &Plugins, metadata: &Metadata) -> Result<Vec<PathBuf>, Vec<Refusal>> {
    let mut needed = Vec::new();
    let mut refusals = Vec::new();
    for vendor in [Vendor::Nvidia, Vendor::Amd] {
        if !uses(metadata, vendor) {
            continue;
        }
        match plugins.usable(vendor) {
            Ok(path) => needed.push(path.clone()),
            Err(Refusal { what, remedy, .. }) => refusals.push(Refusal::new(
                format!("the checkpoint holds the state of {vendor} GPUs, and {what}"),
                remedy,
            )),
        }
    }
    match refusals.is_empty() {
        true => Ok(needed),
        false => Err(refusals),
    }
}

/// Returns true if a process of the checkpoint used GPUs of this vendor.
pub fn uses(metadata: &Metadata, vendor: Vendor) -> bool {
    metadata
        .gpu
        .processes
        .iter()
        .any(|p| p.vendors.contains(&vendor))
}

fn search(directories: &[PathBuf], name: &str, host: &Host) -> Option<PathBuf> {
    directories
        .iter()
        .map(|d| host.path(d.join(name)))
        .find(|p| p.is_file())
}

fn named(plugins: &mut Plugins, vendor: Vendor, path: &Path, key: &str, host: &Host) {
    let path = host.path(path);
    if !path.is_file() {
        let fault = Refusal::new(
            format!(
                "the CRIU plugin {} ({key} in {}) is not there",
                path.display(),
                crate::config::PATH
            ),
            "correct the path, or remove the key to have the usual directories searched",
        );
        plugins.faults.insert(vendor, fault);
    }
    match vendor {
        Vendor::Nvidia => plugins.nvidia = Some(path),
        Vendor::Amd => plugins.amd = Some(path),
    }
}

fn amd_directories(host: &Host) -> Vec<PathBuf> {
    let mut directories: Vec<PathBuf> = CRIU_DIRECTORIES.iter().map(PathBuf::from).collect();
    let versions = host.names("/opt");
    directories.extend(
        versions
            .iter()
            .filter(|n| n.starts_with("rocm-"))
            .map(|n| Path::new("/opt").join(n).join("lib/criu")),
    );
    directories
}

fn amd_absent(directories: &[PathBuf], host: &Host) -> Refusal {
    let directories: Vec<String> = directories
        .iter()
        .map(|f| f.display().to_string())
        .collect();
    Refusal::new(
        format!(
            "CRIU's plugin for AMD GPUs, {AMD_PLUGIN}, is in none of {}",
            directories.join(", ")
        ),
        format!(
            "{}, or name the file as `amd.plugin` in {}",
            package(host),
            crate::config::PATH
        ),
    )
}

fn package(host: &Host) -> String {
    let text = host.text("/etc/os-release").unwrap_or_default();
    let field = |key: &str| {
        text.lines()
            .find_map(|l| l.strip_prefix(key)?.strip_prefix('='))
            .unwrap_or_default()
            .trim_matches('"')
            .to_owned()
    };
    let ids = format!("{} {}", field("ID"), field("ID_LIKE"));
    let is = |names: &[&str]| ids.split_whitespace().any(|id| names.contains(&id));
    let build = "build it from CRIU's sources (`make amdgpu_plugin`, with libdrm's headers) of the CRIU that is installed";
    if is(&["fedora", "rhel", "centos"]) {
        "install the package criu-amdgpu-plugin".into()
    } else if is(&["suse", "opensuse"]) {
        "install the package criu-plugin-amdgpu".into()
    } else if is(&["debian", "ubuntu"]) {
        format!("Debian and Ubuntu have no package of it: {build}")
    } else {
        format!(
            "install it (Fedora: criu-amdgpu-plugin; openSUSE: criu-plugin-amdgpu; Debian and Ubuntu have no package), or {build}"
        )
    }
}

fn loadable(path: &Path, criu: &Criu, tools: &dyn Tools, limit: Duration) -> Result<(), Refusal> {
    let fault = |what: String, remedy: &str| {
        Refusal::new(format!("the CRIU plugin {} {what}", path.display()), remedy)
    };
    let rebuilt =
        "install the plugin that belongs to the installed CRIU, or build it from the same sources";
    let known = elf::criu(&criu.path).unwrap_or_else(|e| {
        tracing::debug!("{}: {e}", criu.path.display());
        CriuElf::default()
    });
    let descriptor = elf::descriptor(path).map_err(|e| fault(e.to_string(), rebuilt))?;
    let version = criu.version.as_deref().unwrap_or("of an unknown version");
    let numbers = criu.version.as_deref().and_then(criu::numbers);
    let interface = numbers.as_deref().and_then(interface);
    if let Some((abi, _)) = interface
        && descriptor.version > abi
    {
        return Err(fault(
            format!(
                "is built for plugin ABI {:#x}, and CRIU {version} takes up to {abi:#x}",
                descriptor.version
            ),
            rebuilt,
        ));
    }
    if let Some(hooks) = known.hooks.or(interface.map(|(_, hooks)| hooks))
        && descriptor.max_hooks > hooks
    {
        return Err(fault(
            format!(
                "is built for {} hooks, and CRIU {version} knows {hooks}: it was built for a newer CRIU",
                descriptor.max_hooks
            ),
            rebuilt,
        ));
    }
    match missing(path, &known, tools, limit) {
        Some(missing) => Err(fault(
            format!("cannot be loaded: {missing}"),
            "install what it needs (libdrm and libdrm_amdgpu: Debian libdrm-amdgpu1, Fedora libdrm), or the plugin that belongs to the installed CRIU",
        )),
        None => Ok(()),
    }
}

/// Returns a CRIU's plugin ABI and its number of hooks; `None` if it is newer than all known here.
fn interface(version: &[u32]) -> Option<(u32, u32)> {
    let mut known = INTERFACES.iter();
    let of = known.find(|(before, ..)| version.iter().take(2).lt(before.iter()));
    of.map(|&(_, abi, hooks)| (abi, hooks))
}

/// Returns libraries and symbols that the loader does not find for the plugin and CRIU does not have either. Asks the
/// loader as `ldd -r` does, which runs nothing of the plugin. CRIU's libraries are preloaded: the plugin takes
/// libprotobuf-c's symbols from there.
fn missing(path: &Path, known: &CriuElf, tools: &dyn Tools, limit: Duration) -> Option<String> {
    let (loader, env) = (known.loader.as_ref()?, tools.find("env")?);
    let mut args: Vec<OsString> = [
        "LD_TRACE_LOADED_OBJECTS=1",
        "LD_WARN=yes",
        "LD_BIND_NOW=yes",
    ]
    .map(OsString::from)
    .to_vec();
    args.push(format!("LD_PRELOAD={}", known.libraries.join(":")).into());
    args.extend([loader.into(), path.into()]);
    let args: Vec<&OsStr> = args.iter().map(OsString::as_os_str).collect();
    let out = match tools.output(&env, &args, limit) {
        Ok(out) => out,
        Err(e) => {
            tracing::warn!("{}: what it needs is not known: {e}", path.display());
            return None;
        }
    };
    let mut lacking: Vec<String> = Vec::new();
    for line in out.stdout.lines().chain(out.stderr.lines()).map(str::trim) {
        let symbol = line
            .strip_prefix("undefined symbol: ")
            .and_then(|rest| rest.split([' ', '\t', ',']).next());
        if let Some(library) = line.strip_suffix(" => not found") {
            lacking.push(format!("the library {library} is not on this host"));
        } else if let Some(symbol) = symbol {
            if !known.symbols.contains(symbol) {
                lacking.push(format!("it wants {symbol}, which this CRIU has not"));
            }
        } else if line.contains("error while loading") || line.contains("version `") {
            lacking.push(line.to_owned());
        }
    }
    lacking.sort();
    lacking.dedup();
    (!lacking.is_empty()).then(|| lacking.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryopod_test_files::TestFiles;
    use std::fs;

    fn host(os: &str) -> (tempfile::TempDir, Host) {
        let dir = tempfile::tempdir().unwrap();
        dir.put("etc/os-release", os);
        let host = Host::at(dir.path());
        (dir, host)
    }

    #[test]
    fn interfaces_of_criu() {
        for (version, want) in [
            (&[4, 1, 1][..], Some((0x200, 12))),
            (&[4, 2, 1], Some((0x200, 13))),
            (&[4, 3], Some((0x300, 17))),
            (&[4, 3, 1], Some((0x300, 17))),
            (&[4, 4], None),
            (&[5, 0], None),
        ] {
            assert_eq!(interface(version), want, "{version:?}");
        }
    }

    #[test]
    fn found_where_distributions_and_rocm_put_it() {
        for directory in [
            "usr/lib/criu",
            "usr/lib64/criu",
            "usr/libexec/criu",
            "opt/rocm-6.4.1/lib/criu",
        ] {
            let (dir, host) = host("");
            let file = dir.path().join(directory).join(AMD_PLUGIN);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(&file, "").unwrap();
            let found = find(&Config::default(), &host);
            assert_eq!(found.amd.as_deref(), Some(file.as_path()));
            assert_eq!(found.usable(Vendor::Amd).unwrap(), &file);
        }
    }

    #[test]
    fn absent_names_the_package() {
        for (os, want) in [
            (
                "ID=fedora\n",
                "install the package criu-amdgpu-plugin, or name",
            ),
            (
                "ID=\"opensuse-tumbleweed\"\nID_LIKE=\"opensuse suse\"\n",
                "install the package criu-plugin-amdgpu",
            ),
            ("ID=debian\n", "Debian and Ubuntu have no package of it"),
            (
                "ID=nixos\n",
                "Fedora: criu-amdgpu-plugin; openSUSE: criu-plugin-amdgpu",
            ),
        ] {
            let (_dir, host) = host(os);
            let found = find(&Config::default(), &host);
            let fault = found.usable(Vendor::Amd).unwrap_err().to_string();
            for want in [
                want,
                "amdgpu_plugin.so, is in none of /usr/lib/criu",
                "`amd.plugin`",
            ] {
                assert!(fault.contains(want), "{want}: {fault}");
            }
        }
    }

    #[test]
    fn a_configured_path_that_is_not_there_is_named() {
        let (_dir, host) = host("");
        let mut config = Config::default();
        config.amd.plugin = Some("/opt/my/plugin.so".into());
        let fault = find(&config, &host)
            .usable(Vendor::Amd)
            .unwrap_err()
            .to_string();
        assert!(
            fault.contains("/opt/my/plugin.so (amd.plugin in /etc/cryopod/config.toml)"),
            "{fault}"
        );
    }
}
