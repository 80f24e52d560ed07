//! Builds an image's annotations and config, which describe its checkpoint.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::plan::KnownContent;
use crate::format::digest::Digest;
use crate::format::names;
use crate::format::oci::{ImageConfig, RootFs, annotation};
use crate::metadata::Metadata;
use crate::source::Kind;

/// Longest value that is copied into an annotation, in bytes.
const MAX_VALUE: usize = 512;

/// Returns the annotations of a checkpoint's manifest, for podman, CRI-O, containerd and people.
pub(super) fn annotations(known: &KnownContent, kind: Kind) -> BTreeMap<String, String> {
    let json = |name: &str| -> Value {
        known
            .files
            .get(name)
            .and_then(|text| serde_json::from_slice(text).ok())
            .unwrap_or(Value::Null)
    };
    let (config, spec) = (json(names::CONFIG_DUMP), json(names::SPEC_DUMP));
    let metadata: Option<Metadata> = metadata(known);
    let mut out = BTreeMap::new();
    let mut put = |key: &str, value: Option<&str>| {
        if let Some(value) =
            value.filter(|v| !v.is_empty() && v.len() <= MAX_VALUE && !v.contains('\0'))
        {
            out.insert(key.to_owned(), value.to_owned());
        }
    };
    let of = |key: &str| config.get(key).and_then(Value::as_str);
    let spec_annotation = |keys: &[&str]| {
        let annotations = spec.get("annotations")?;
        keys.iter().find_map(|k| annotations.get(*k)?.as_str())
    };

    let id = metadata.as_ref().map(|s| s.container.id.as_str());
    let name = of("name").or(of("id")).or(id).unwrap_or("checkpoint");
    put(annotation::CRIU_NAME, Some(name));
    put(annotation::CRIO_NAME, Some(name));
    // podman restores only with the runtime of this name.
    let runtime = of("runtime");
    put(annotation::PODMAN_RUNTIME, runtime);
    put("io.podman.annotations.checkpoint.name", Some(name));
    put(
        "io.podman.annotations.checkpoint.rawImageName",
        of("rawImageName"),
    );
    put(
        "io.podman.annotations.checkpoint.rootfsImageID",
        of("rootfsImageID"),
    );
    put(
        "io.podman.annotations.checkpoint.rootfsImageName",
        of("rootfsImageName"),
    );

    put("org.criu.checkpoint.engine.name", engine(&config, kind));
    put("org.criu.checkpoint.runtime.name", runtime);
    put("org.criu.checkpoint.rootfsImageName", of("rootfsImageName"));
    put(
        "org.criu.checkpoint.rootfsImageID",
        of("rootfsImageID").or(of("rootfsImageRef")),
    );
    put("org.criu.checkpoint.rawImageName", of("rawImageName"));
    put(
        "org.criu.checkpoint.pod.name",
        spec_annotation(&["io.kubernetes.cri.sandbox-name", "io.kubernetes.pod.name"]),
    );
    put(
        "org.criu.checkpoint.pod.namespace",
        spec_annotation(&[
            "io.kubernetes.cri.sandbox-namespace",
            "io.kubernetes.pod.namespace",
        ]),
    );
    put(
        "org.criu.checkpoint.pod.id",
        spec_annotation(&["io.kubernetes.cri.sandbox-id"]),
    );
    if let Some(metadata) = &metadata {
        put("org.criu.checkpoint.host.arch", Some(&metadata.host.arch));
        put(
            "org.criu.checkpoint.host.kernel",
            Some(&metadata.host.kernel),
        );
        put(
            "org.criu.checkpoint.cgroup.version",
            Some(&metadata.host.cgroup),
        );
        put(
            "org.criu.checkpoint.criu.version",
            metadata.host.criu.as_deref(),
        );
        put(
            "org.criu.checkpoint.runtime.version",
            metadata.container.low_level_version.as_deref(),
        );
        put("dev.cryopod.version", Some(&metadata.cryopod));
        put("dev.cryopod.schema", Some(&metadata.schema));
        put(
            "dev.cryopod.runtime.low-level",
            Some(&metadata.container.low_level),
        );
        gpu(metadata, &mut put);
    }
    put(
        annotation::CREATED,
        created(&config, metadata.as_ref()).as_deref(),
    );
    put(annotation::CONTENT_BYTES, Some(&known.bytes.to_string()));
    put(annotation::FORMAT, Some(annotation::FORMAT_VERSION));
    out
}

/// Returns what anybody may know of an encrypted checkpoint.
pub(super) fn of_encrypted(known: &KnownContent) -> BTreeMap<String, String> {
    [
        (annotation::CONTENT_BYTES, known.bytes.to_string()),
        (annotation::FORMAT, annotation::FORMAT_VERSION.to_owned()),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .into()
}

fn gpu(metadata: &Metadata, put: &mut impl FnMut(&str, Option<&str>)) {
    let join = |mut list: Vec<String>| {
        list.dedup();
        list.join(",")
    };
    let gpu = &metadata.gpu;
    let vendors = join(
        gpu.vendors
            .iter()
            .map(|v| v.to_string().to_lowercase())
            .collect(),
    );
    put("dev.cryopod.gpu.vendor", Some(&vendors));
    put(
        "dev.cryopod.gpu.models",
        Some(&join(gpu.gpus.iter().map(|g| g.model.clone()).collect())),
    );
    if !gpu.gpus.is_empty() {
        put("dev.cryopod.gpu.count", Some(&gpu.gpus.len().to_string()));
    }
    let memory: u64 = gpu.gpus.iter().filter_map(|g| g.memory_bytes).sum();
    put(
        "dev.cryopod.gpu.memory.bytes",
        (memory > 0).then(|| memory.to_string()).as_deref(),
    );
    put(
        "dev.cryopod.gpu.processes",
        (!gpu.processes.is_empty())
            .then(|| gpu.processes.len().to_string())
            .as_deref(),
    );
    for (vendor, version) in &gpu.drivers {
        put(&format!("dev.cryopod.driver.{vendor}"), Some(version));
    }
    if gpu.vram.is_some() {
        // A word that the annotation of containers takes: engines copy an image's.
        put("dev.cryopod.vram", Some("on"));
    }
}

fn metadata(known: &KnownContent) -> Option<Metadata> {
    let name = format!("{}/{}", names::CHECKPOINT_DIR, names::METADATA);
    let text = known.files.get(&name)?;
    Metadata::parse(text, name.as_ref()).ok()
}

fn engine(config: &Value, kind: Kind) -> Option<&'static str> {
    match kind {
        Kind::CrioTar(_) => Some("cri-o"),
        Kind::CriContainerdTar(_) | Kind::Containerd { .. } => Some("containerd"),
        Kind::CriuDirectory | Kind::CriuTar(_) => None,
        _ if config.get("lockID").is_some() || config.get("staticDir").is_some() => Some("podman"),
        _ => None,
    }
}

/// Returns the time of the checkpoint, never that of packing: the same input must give the same digests.
fn created(config: &Value, metadata: Option<&Metadata>) -> Option<String> {
    let times = [config.get("checkpointedTime"), config.get("createdTime")];
    let valid = |t: &&str| t.len() >= 20 && t.as_bytes()[4] == b'-' && !t.starts_with("0001");
    let from_metadata = metadata.map(|s| s.created.as_str());
    let all = from_metadata
        .into_iter()
        .chain(times.into_iter().flatten().filter_map(Value::as_str));
    all.filter(|t| t.is_ascii()).find(valid).map(str::to_owned)
}

/// Builds the image's config. The image is never run as it is.
pub(super) fn config(
    known: &KnownContent,
    annotations: &BTreeMap<String, String>,
    diff_ids: Vec<Digest>,
) -> ImageConfig {
    let arch = metadata(known).map(|s| s.host.arch);
    ImageConfig {
        created: annotations.get(annotation::CREATED).cloned(),
        architecture: go_arch(arch.as_deref().unwrap_or(std::env::consts::ARCH)).into(),
        os: "linux".into(),
        config: Map::new(),
        rootfs: RootFs {
            kind: "layers".into(),
            diff_ids,
        },
    }
}

/// Returns Go's name of a machine.
fn go_arch(machine: &str) -> &str {
    match machine {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "powerpc64le" => "ppc64le",
        other => other,
    }
}
