//! Handles a container's surroundings, everything but GPUs: hazards, mounts that no spec names, CRIU's options,
//! security labels.
//!
//! A checkpoint examines them, refuses what CRIU cannot dump, and records what a restore must provide. A restore
//! provides it before CRIU runs.

use std::ffi::OsString;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

use cryopod_archive::container::surroundings::{CriuFacts, LsmFacts, MountFacts, MountKind};
use cryopod_archive::format::limits::OpenFilesRaised;
use cryopod_archive::metadata::Metadata;
use cryopod_cuda::gpus::nvidia;
use cryopod_gpu_plan::gpus::own_nodes;
use cryopod_gpu_plan::hazards::{self, CriuLimits};
use cryopod_gpu_plan::mounts::{self, Provided, Provider};
use cryopod_gpu_plan::plan::PlanError;
use cryopod_gpu_plan::refusal::Refusal;
use cryopod_host::cgroups;
use cryopod_host::destinations::Destinations;
use cryopod_host::files::{Host, open_in_root};
use cryopod_host::mountinfo::declarable;
use cryopod_host::processes::Scan;
use cryopod_host::spec::Spec;
use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::{UnlinkatFlags, unlinkat};

use crate::criu::conf::{self, ConfReader, Extra};
use crate::criu::helpers;
use crate::criu::opts::{self, CriuOptions};
use crate::criu::{self, Criu};
use crate::error::Error;
use crate::preflight::gpus::GpuPlacement;
use crate::preflight::mount_sources::{self, Sources};
use crate::request::Request;
use crate::request::lowlevel::RuntimeKind;
use crate::run::operation::Operation;
use crate::security::lsm;

/// What a checkpoint records and configures in CRIU.
#[derive(Debug, Clone, Default)]
pub struct Surroundings {
    pub extra: Extra,
    pub mounts: MountFacts,
    pub criu: CriuFacts,
    pub lsm: LsmFacts,
}

fn options(request: &Request<'_>) -> Result<CriuOptions, Error> {
    let ceiling = request.config().ceiling(&request.host, &request.spec);
    let texts = texts(request);
    Ok(CriuOptions::of(
        &request.config().criu.options,
        &ceiling,
        &texts,
    )?)
}

/// Refuses what a restore does not follow of CRIU's configuration: options and the file that annotations name.
pub fn ensure_followed(request: &Request<'_>) -> Result<(), Error> {
    options(request)?;
    let kind = request.low();
    let reader = ConfReader {
        kind,
        names_file: kind == RuntimeKind::Runc,
        restore: false,
    };
    let ceiling = request.config().ceiling(&request.host, &request.spec);
    conf::runtime_conf(reader, &ceiling)?;
    Ok(())
}

/// The CRIU configurations beside cryopod's own.
fn texts(request: &Request<'_>) -> Vec<String> {
    let ceiling = request.config().ceiling(&request.host, &request.spec);
    let files = opts::earlier_files();
    let mut texts: Vec<String> = files
        .iter()
        .filter_map(|path| crate::criu::file::read(path).ok())
        .collect();
    texts.extend(conf::runtime_text(request.low(), &ceiling));
    texts
}

/// Examines the container with the init process `init` and the processes in `scan`. Its refusals are to be reported
/// with those of the GPUs.
pub fn checkpoint(
    request: &Request<'_>,
    init: i32,
    scan: &Scan,
    criu: &Criu,
) -> Result<(Surroundings, Vec<Refusal>), Error> {
    let (host, spec, flags) = (&request.host, &request.spec, &request.inv.flags);
    let mounts = &request.mounts;
    let mut options = options(request)?;
    let limits = CriuLimits {
        own_network: request.low() == RuntimeKind::Runc && spec.has_own_namespace("network"),
        ghost_limit: options.ghost_limit(),
        searched: options.texts("irmap-scan-path"),
        version: criu
            .version
            .as_deref()
            .and_then(criu::numbers)
            .unwrap_or_default(),
    };
    let mut refusals = hazards::refusals(scan, host, spec, &limits);
    let connections = hazards::connections(scan, host, init);
    refusals.extend(options.settle_tcp(flags, &connections));
    let helpers = helpers::checkpoint(
        helpers::Probe {
            tools: &request.tools,
            limit: request.tool_limit(),
        },
        &helpers::HelperSubject {
            host,
            kind: request.low(),
            spec,
            init,
            scan,
            connections: &connections,
            lock: options.network_lock(flags, &texts(request)),
        },
    );
    refusals.extend(helpers.refusals);
    options.use_lock(helpers.lock);
    let kernel = criu::numbers(&criu::host_facts(host, None).kernel);
    refusals.extend(hazards::undumpable_sockets(
        scan,
        host,
        init,
        &limits.version,
        &kernel.unwrap_or_default(),
    ));
    let (mut found, unfit) = match spec.json().is_object() {
        true => mounts::unnamed(host, spec, mounts, init),
        // Without a spec every mount would be unnamed.
        false => Default::default(),
    };
    refusals.extend(unfit);
    if spec.json().is_object() && !options.on("enable-fs") {
        refusals.extend(hazards::file_systems(host, spec, init, &found.foreign));
    }
    hazards::mark_used(scan, &mut found.foreign);
    let foreign = found.foreign.iter().map(|m| {
        tracing::info!(
            "{} is a mount of {} that no spec names",
            m.path,
            m.host_path
        );
        external(&m.path, &m.path)
    });
    let nodes = own_nodes::found(host, spec, init).into_iter();
    // crun 1.21 does not resolve destinations itself.
    let lines = foreign
        .chain(known(nodes.map(|path| (path.clone(), path))))
        .chain(known(
            mounts.linked().map(|d| (d.path.clone(), d.path.clone())),
        ));
    let surroundings = Surroundings {
        criu: CriuFacts {
            options: options.for_the_restore(flags),
            helpers: helpers.recorded,
            dumped: None,
        },
        lsm: labels(spec),
        extra: Extra {
            lines: lines.collect(),
            options,
            ..Extra::default()
        },
        mounts: found,
    };
    Ok((surroundings, refusals))
}

/// CRIU's option for an external mount: at a checkpoint its name, at a restore its source.
pub fn external(path: &str, key: &str) -> String {
    format!("external mnt[{path}]:{key}")
}

/// Lines for mounts that the runtime names to CRIU otherwise or not at all.
fn known(mounts: impl Iterator<Item = (PathBuf, PathBuf)>) -> Vec<String> {
    let text = mounts.map(|(at, key)| (at.display().to_string(), key.display().to_string()));
    text.filter(|(at, key)| declarable(at).is_ok() && declarable(key).is_ok())
        .map(|(at, key)| external(&at, &key))
        .collect()
}

/// crun from 1.24 on masks directories with an empty one in its state directory. At a checkpoint it names that to CRIU
/// by the default state directory, at a restore by that of `--root`: CRIU then finds "No mapping for (null)
/// mountpoint".
fn empty_directories(request: &Request<'_>) -> Vec<(PathBuf, PathBuf)> {
    const NAME: &str = ".empty-directory";
    let root = request.state_root();
    let Some(root) = root.filter(|_| request.low() == RuntimeKind::Crun) else {
        return Vec::new();
    };
    let mut defaults = vec![RuntimeKind::Crun.default_root(), "/run/crun".into()];
    defaults.dedup();
    let pairs = defaults
        .into_iter()
        .map(|default| (default.join(NAME), root.join(NAME)));
    pairs.collect()
}

/// Returns the security labels that the spec names.
pub fn labels(spec: &Spec) -> LsmFacts {
    let text = |pointer: &str| {
        let value = spec.json().pointer(pointer)?.as_str()?;
        (!value.is_empty()).then(|| value.to_owned())
    };
    LsmFacts {
        apparmor: text("/process/apparmorProfile"),
        selinux: text("/process/selinuxLabel"),
        mount_label: text("/linux/mountLabel"),
    }
}

/// What a restore has to provide around the container.
#[derive(Debug, Clone, Default)]
pub struct Provision {
    pub extra: Extra,
    /// Flags for labels that have changed.
    labels: Vec<String>,
    provided: Vec<(String, MountKind)>,
    own: Vec<String>,
    /// The sources of the spec's bind mounts, as CRIU is to mount them.
    pub sources: Sources,
    /// Mount points of the host's own files.
    pub read_only: Vec<String>,
    /// External mounts that are named to CRIU, beside those that the low-level runtime names.
    pub named: Vec<String>,
}

/// Finds on this host the mounts of the checkpoint that no spec names, and the sources of those that the spec names.
/// `chosen`: the GPUs, as far as known. Touches nothing.
pub fn provided(
    request: &Request<'_>,
    metadata: &Metadata,
    chosen: Option<&GpuPlacement>,
) -> Result<Vec<Provided>, Vec<Refusal>> {
    let (host, spec) = (&request.host, &request.spec);
    let moved = chosen.iter().flat_map(|c| &c.gpus).filter(|c| c.moved());
    let renamed: Vec<(String, String)> = moved
        .map(|c| (c.old.pci.clone(), c.new.pci.clone()))
        .filter(|(old, new)| !old.is_empty() && !new.is_empty())
        .collect();
    let nodes: Vec<(String, String)> = chosen
        .iter()
        .flat_map(|c| &c.remap.targets)
        .map(|t| (t.path.clone(), t.host_path.clone()))
        .collect();
    let driver = nvidia::driver_version(host);
    let provider = Provider {
        ceiling: request.config().ceiling(host, spec),
        mounts: &request.mounts,
        recorded_driver: metadata.gpu.drivers.get("nvidia").map(String::as_str),
        driver: driver.as_deref(),
        renamed: &renamed,
        nodes: &nodes,
    };
    let gone = mount_sources::missing(request);
    let provided = match provider.provide(&metadata.mounts.foreign) {
        provided if gone.is_empty() => provided,
        provided => Err(provided.err().into_iter().flatten().chain(gone).collect()),
    };
    match (own_nodes::paths(host, spec).is_empty(), chosen) {
        (false, Some(chosen)) if !chosen.remap.changed().is_empty() => {
            let mut refusals = provided.err().unwrap_or_default();
            refusals.push(Refusal::new(
                "device nodes of a container in a user namespace are the host's, bound under their own names: they cannot lead to other GPUs",
                "restore it on the GPUs that it had (without dev.cryopod.gpu.map)",
            ));
            Err(refusals)
        }
        _ => provided,
    }
}

/// Keeps CRIU from making cgroups in version 1 hierarchies where only the unified one is mounted.
///
/// crun names the container's cgroup to CRIU for all hierarchies (`criu_add_cg_root(NULL, path)`), although it makes the
/// one of version 2 only. CRIU would make the others, each with a copy of all cgroups that the hierarchy had at the
/// checkpoint, and nothing would remove them. In `cpuset` it fails: a new cgroup has no CPUs there.
fn cgroup_roots(host: &Host) -> impl Iterator<Item = String> {
    let hierarchies = cgroups::unmanaged_v1(host).into_iter();
    hierarchies.map(|(controller, path)| format!("cgroup-root {controller}:{path}"))
}

/// Has CRIU restore a new container into its own cgroup of version 2, and not into one with the path of the checkpoint's.
///
/// crun names it for all hierarchies, runc for those of version 1 alone.
pub fn own_cgroup(request: &Request<'_>) -> Option<String> {
    let v2 = cgroups::setup(&request.host) != cgroups::Setup::V1;
    let path = request
        .spec
        .cgroup_path()
        .filter(|_| v2 && request.low() == RuntimeKind::Runc)?;
    Some(format!("cgroup-root {path}"))
}

/// Finds the checkpoint's surroundings on this host, and shows them in the operation's directory.
pub fn restore(
    request: &Request<'_>,
    metadata: &Metadata,
    chosen: &GpuPlacement,
    op: &Operation,
) -> Result<Provision, Error> {
    let (host, spec, flags) = (&request.host, &request.spec, &request.inv.flags);
    let mut options = options(request)?;
    options.as_at_the_checkpoint(&metadata.criu.options, flags);
    // Each mount is a descriptor until it is shown.
    let _raised = OpenFilesRaised::new();
    let provided = provided(request, metadata, Some(chosen)).map_err(PlanError::RestoreRefused)?;
    let own_nodes = own_nodes::paths(host, spec).into_iter();
    let own_nodes = own_nodes.filter(|p| host.char_device(p).is_some());
    let sources = Sources::of(request, op)?;
    let linked = request.mounts.0.iter().enumerate();
    let linked = linked.filter(|(_, d)| d.is_linked());
    let linked = linked.filter_map(|(i, d)| Some((d.path.clone(), sources.source(i, d)?.into())));
    let mut foreign = Vec::new();
    for p in &provided {
        tracing::info!("{} is provided from {}", p.path, p.source.display());
        // Sources that the container could exchange from here on are mounted from the open file. All others lie in
        // directories of root, and are named by path: CRIU copies the propagation of several mounts from one of them,
        // and for that the surrounding mount must be wide enough.
        let shown = match p.in_volume {
            true => op.show(p)?,
            false => p.source.clone(),
        };
        foreign.push((PathBuf::from(&p.path), shown));
    }
    let empty = empty_directories(request).into_iter();
    // CRIU uses the last line for a path, and the runtime's come after these.
    let pairs: Vec<(PathBuf, PathBuf)> = own_nodes
        .map(|path| (path.clone(), path))
        .chain(linked.filter(|(_, source): &(_, PathBuf)| source.is_absolute()))
        .chain(empty)
        .chain(foreign)
        .collect();
    let named = pairs.iter().map(|(path, _)| path.display().to_string());
    let named = named.collect();
    let lines = known(pairs.into_iter());
    Ok(Provision {
        extra: Extra {
            options,
            lines: lines.into_iter().chain(cgroup_roots(host)).collect(),
            ..Extra::default()
        },
        named,
        read_only: provided
            .iter()
            .filter(|p| p.read_only)
            .map(|p| p.path.clone())
            .collect(),
        labels: lsm::flags(&metadata.lsm, &labels(spec), |name| flags.has(name)),
        provided: provided.into_iter().map(|p| (p.path, p.kind)).collect(),
        sources,
        own: metadata.mounts.own.clone(),
    })
}

impl Provision {
    /// Returns true if the processes get the label of the new spec, whatever the images say.
    pub fn relabels(&self, request: &Request<'_>) -> bool {
        request.flag("lsm-profile") || self.labels.iter().any(|flag| flag == "--lsm-profile")
    }

    /// Adds CRIU's options and changed labels to the command line.
    pub fn arguments(
        &self,
        request: &Request<'_>,
        low_version: Option<&str>,
        args: &[OsString],
    ) -> Vec<OsString> {
        let (kind, given) = (request.low(), &request.inv.flags);
        let flags = self.extra.options.flags(kind, low_version, false, given);
        let labels = self.labels.iter().map(String::as_str);
        let flags: Vec<&str> = flags.into_iter().chain(labels).collect();
        request.with_flags(args, &flags)
    }

    /// Makes the mount points that a new root file system may lack. An error names the mount point.
    pub fn mount_points(
        &self,
        directory: &Path,
        spec: &Spec,
        mounts: &Destinations,
    ) -> Result<MountPoints, Error> {
        let mut points = MountPoints::default();
        let root = spec.json().pointer("/root/path");
        let Some(root) = root.and_then(|p| p.as_str()).map(|r| directory.join(r)) else {
            return Ok(points);
        };
        points_in_volumes(&mut points, directory, mounts)?;
        if self.provided.is_empty() && self.own.is_empty() {
            return Ok(points);
        }
        let what = format!("{}: cannot open the container's root", root.display());
        points.root = Some(File::open(&root).map_err(Error::io(what))?);
        // Within the spec's own mounts CRIU or the volume has them.
        let files = self.provided.iter().map(|(path, kind)| (path, *kind));
        let directories = self.own.iter().map(|p| (p, MountKind::Directory));
        for (path, kind) in directories.chain(files) {
            let path = Path::new(path);
            if mounts.hold(path) {
                continue;
            }
            let what = format!(
                "{}: cannot make the mount point {}",
                root.display(),
                path.display()
            );
            points
                .make(path, kind)
                .map_err(|e| Error::io(what)(e.into()))?;
        }
        Ok(points)
    }
}

/// Makes the mount points of the spec's bind mounts that lie in another of them. A runtime that creates a container makes
/// them, too. At a restore the other one's source may be new and empty: podman's `/run/secrets`, a volume on another
/// host. CRIU then has no place for the mount (`Can't stat mountpoint`). runc makes them if they come in order.
fn points_in_volumes(
    points: &mut MountPoints,
    bundle: &Path,
    mounts: &Destinations,
) -> Result<(), Error> {
    for mount in mounts.0.iter().filter(|m| m.bind) {
        let Some((volume, rest)) = mounts.covering(&mount.path).filter(|(v, _)| v.bind) else {
            continue;
        };
        let (Some(volume), Some(source)) = (&volume.source, &mount.source) else {
            continue;
        };
        let volume = bundle.join(volume);
        let what = || {
            format!(
                "{}: cannot make the mount point {} in it",
                volume.display(),
                rest.display()
            )
        };
        let kind = match bundle.join(source).is_dir() {
            true => MountKind::Directory,
            false => MountKind::File,
        };
        let root = File::open(&volume).map_err(Error::io(what()))?;
        let made = points.make_in(&root, rest, kind);
        made.map_err(|e| Error::io(what())(e.into()))?;
    }
    Ok(())
}

/// The mount points that were made; dropped without [`MountPoints::keep`] they are removed again.
#[derive(Debug, Default)]
pub struct MountPoints {
    root: Option<File>,
    /// In order of creation: the parent directory, the name, whether it is a directory.
    made: Vec<(OwnedFd, OsString, bool)>,
}

impl MountPoints {
    /// Those below this directory.
    pub fn below(root: File) -> Self {
        Self {
            root: Some(root),
            made: Vec::new(),
        }
    }

    /// Keeps them, after a successful restore.
    pub fn keep(mut self) {
        self.made.clear();
    }

    /// Makes a mount point below the root, which no link can lead out of.
    pub fn make(&mut self, path: &Path, kind: MountKind) -> Result<(), Errno> {
        match self.root.as_ref().map(File::try_clone) {
            Some(root) => self.make_in(&root.map_err(|_| Errno::EMFILE)?, path, kind),
            None => Ok(()),
        }
    }

    /// Makes one below another directory, which no link can lead out of.
    fn make_in(&mut self, root: &File, path: &Path, kind: MountKind) -> Result<(), Errno> {
        let mut parent = PathBuf::from(".");
        let parts = path.components().filter_map(|c| match c {
            Component::Normal(name) => Some(name),
            _ => None,
        });
        let mut parts = parts.peekable();
        while let Some(name) = parts.next() {
            let directory = open_in_root(root, &parent, OFlag::O_PATH | OFlag::O_DIRECTORY)?;
            let is_directory = parts.peek().is_some() || kind == MountKind::Directory;
            let made = if is_directory {
                mkdirat(&directory, name, Mode::from_bits_truncate(0o755))
            } else {
                let flags = OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
                openat(&directory, name, flags, Mode::from_bits_truncate(0o644)).map(drop)
            };
            match made {
                Ok(()) => self.made.push((directory, name.to_owned(), is_directory)),
                Err(Errno::EEXIST) => {}
                Err(e) => return Err(e),
            }
            parent.push(name);
        }
        Ok(())
    }
}

impl Drop for MountPoints {
    fn drop(&mut self) {
        for (directory, name, is_directory) in self.made.iter().rev() {
            let flag = match is_directory {
                true => UnlinkatFlags::RemoveDir,
                false => UnlinkatFlags::NoRemoveDir,
            };
            if let Err(e) = unlinkat(directory, name.as_os_str(), flag) {
                tracing::warn!(
                    "the mount point {}: left behind: {e}",
                    Path::new(name).display()
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryopod_test_files::TestFiles;
    use serde_json::json;

    fn make(provision: &Provision, bundle: &Path, spec: &Spec) -> Result<MountPoints, Error> {
        let mounts = Destinations::of(&cryopod_host::files::Host::system(), spec, bundle);
        provision.mount_points(bundle, spec, &mounts)
    }

    #[test]
    fn mount_points_stay_in_the_root() {
        let dir = tempfile::tempdir().unwrap();
        let rootfs = dir.path().join("b/rootfs");
        let outside = dir.path().join("outside");
        std::fs::create_dir(&outside).unwrap();
        rootfs.link("usr", &outside);
        rootfs.put("there", "kept");
        let provided = |path: &str, kind| (path.to_owned(), kind);
        let provision = Provision {
            provided: vec![
                provided("/lib/firmware/gsp.bin", MountKind::File),
                provided("/there", MountKind::File),
                provided("/proc/driver/x", MountKind::Directory),
            ],
            own: vec!["/etc/nvidia/profiles".into()],
            ..Provision::default()
        };
        let spec = Spec::from_json(json!({
            "root": {"path": "rootfs"},
            "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}]
        }));
        let bundle = dir.path().join("b");
        drop(make(&provision, &bundle, &spec).unwrap());
        assert_eq!(std::fs::read_dir(&rootfs).unwrap().count(), 2);
        make(&provision, &bundle, &spec).unwrap().keep();
        assert!(rootfs.join("lib/firmware/gsp.bin").is_file());
        assert!(rootfs.join("etc/nvidia/profiles").is_dir());
        assert!(!rootfs.join("proc").exists());
        assert_eq!(std::fs::read(rootfs.join("there")).unwrap(), b"kept");
        let out = Provision {
            provided: vec![provided("/usr/lib/x.so", MountKind::File)],
            ..Provision::default()
        };
        let e = make(&out, &bundle, &spec).unwrap_err();
        assert!(e.to_string().contains("/usr/lib/x.so"), "{e}");
        assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 0);
    }

    #[test]
    fn labels_of_a_spec() {
        let spec = Spec::from_json(json!({
            "process": {"apparmorProfile": "containers-default", "selinuxLabel": ""},
            "linux": {"mountLabel": "system_u:object_r:x"}
        }));
        let found = labels(&spec);
        assert_eq!(found.apparmor.as_deref(), Some("containers-default"));
        assert_eq!(found.selinux, None);
        assert_eq!(found.mount_label.as_deref(), Some("system_u:object_r:x"));
    }
}
