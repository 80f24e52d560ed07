//! Reads what the engine recorded about the container, for reports: `config.dump`, `spec.dump`, `status.dump`, and
//! containerd's own record of a container.

use std::collections::BTreeMap;

use prost::Message;
use serde::Serialize;
use serde_json::Value;

use crate::format::names;

/// Longest text that is taken from a file of an archive, in characters.
const MAX_TEXT: usize = 4096;
const MAX_WORDS: usize = 256;

#[derive(Debug, thiserror::Error)]
#[error("{file}: not valid ({reason}); the archive is damaged or was written by another tool")]
pub struct RecordError {
    pub file: String,
    pub reason: String,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Facts {
    /// `podman`, `docker`, `cri-o`, `containerd` (through the CRI), `containerd-ctr`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The pod, `NAMESPACE/NAME`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// The container's image, by name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// The container's image, by digest or id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_id: Option<String>,
    /// The OCI runtime that made the checkpoint, as the engine named it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runtime: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub created: Option<String>,
    /// When the checkpoint was made, RFC 3339, where the engine says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpointed: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
}

/// The files that [`read`] uses; each is optional.
pub const FILES: [&str; 3] = [names::CONFIG_DUMP, names::SPEC_DUMP, names::STATUS_DUMP];

/// Reads the records: name and content of each existing file of [`FILES`]. Fails with [`RecordError`] if one is not
/// JSON. A field that is missing or has another type is left out.
pub fn read(files: &BTreeMap<String, Vec<u8>>) -> Result<Facts, RecordError> {
    let mut facts = Facts::default();
    if let Some(config) = json(files, names::CONFIG_DUMP)? {
        facts.id = text(&config, "/id");
        facts.name = text(&config, "/name");
        facts.image = text(&config, "/rootfsImageName").or_else(|| text(&config, "/rootfsImage"));
        // podman's field, then that of CRI-O and containerd.
        facts.image_id =
            text(&config, "/rootfsImageID").or_else(|| text(&config, "/rootfsImageRef"));
        facts.runtime = text(&config, "/runtime");
        facts.created = time(&config, "/createdTime");
        facts.checkpointed = time(&config, "/checkpointedTime");
        if config.get("lockID").is_some() || config.get("staticDir").is_some() {
            facts.engine = Some("podman");
        }
    }
    if let Some(spec) = json(files, names::SPEC_DUMP)? {
        of_spec(&spec, &mut facts);
    }
    if let Some(status) = json(files, names::STATUS_DUMP)? {
        facts.engine = facts.engine.or(Some("containerd"));
        facts.image = facts.image.or_else(|| text(&status, "/image/image"));
    }
    Ok(facts)
}

fn of_spec(spec: &Value, facts: &mut Facts) {
    let annotation = |key: &str| {
        let value = spec.get("annotations")?.get(key)?.as_str()?;
        (!value.is_empty()).then(|| shortened(value))
    };
    facts.engine = match annotation("io.container.manager").as_deref() {
        Some("libpod") => Some("podman"),
        Some("cri-o") => Some("cri-o"),
        Some("docker") => Some("docker"),
        _ if annotation("io.kubernetes.cri.container-type").is_some() => Some("containerd"),
        _ => facts.engine,
    };
    let first = |keys: [&str; 2]| keys.into_iter().find_map(annotation);
    let pod = first([
        "io.kubernetes.cri.sandbox-name",
        "io.kubernetes.cri-o.KubeName",
    ]);
    let namespace = first([
        "io.kubernetes.cri.sandbox-namespace",
        "io.kubernetes.cri-o.Namespace",
    ]);
    facts.pod = pod.map(|pod| match namespace {
        Some(namespace) => format!("{namespace}/{pod}"),
        None => pod,
    });
    let words = spec.pointer("/process/args").and_then(Value::as_array);
    facts.command = words
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .take(MAX_WORDS)
        .map(shortened)
        .collect();
}

/// Reads containerd's record of a container with its spec: the part
/// `application/vnd.containerd.container.checkpoint.config.v1+proto` of `ctr c checkpoint`. `annotations` are those of
/// the checkpoint's index; `file` only appears in errors.
pub fn read_containerd(
    file: &str,
    record: &[u8],
    annotations: &BTreeMap<String, String>,
) -> Result<Facts, RecordError> {
    let wrong = |reason: String| RecordError {
        file: file.into(),
        reason,
    };
    let any = Any::decode(record).map_err(|e| wrong(e.to_string()))?;
    let spec: Value =
        serde_json::from_slice(&any.value).map_err(|e| wrong(format!("its spec: {e}")))?;
    let annotation = |key: &str| annotations.get(key).map(|text| shortened(text));
    // The record does not name the container, but its cgroup is `/NAMESPACE/ID`.
    let cgroup = text(&spec, "/linux/cgroupsPath");
    let id = cgroup.and_then(|path| path.rsplit(['/', ':']).next().map(str::to_owned));
    let mut facts = Facts {
        engine: Some("containerd-ctr"),
        id: id.filter(|id| !id.is_empty()),
        image: annotation("org.opencontainers.image.ref.name"),
        runtime: annotation("io.containerd.checkpoint.runtime"),
        ..Facts::default()
    };
    of_spec(&spec, &mut facts);
    facts.engine = Some("containerd-ctr");
    Ok(facts)
}

/// Builds the files that other engines and tools read, from containerd's record of a container: `spec.dump`, and
/// `config.dump` in the schema of CRI-O, containerd's CRI and checkpointctl.
pub fn files_of_containerd(
    file: &str,
    record: &[u8],
    annotations: &BTreeMap<String, String>,
) -> Result<BTreeMap<String, Vec<u8>>, RecordError> {
    let facts = read_containerd(file, record, annotations)?;
    let wrong = |reason: String| RecordError {
        file: file.into(),
        reason,
    };
    let config = serde_json::json!({
        "id": facts.id,
        "name": facts.id,
        "rootfsImage": facts.image,
        "rootfsImageName": facts.image,
        "runtime": facts.runtime,
    });
    let config = serde_json::to_vec(&config).map_err(|e| wrong(e.to_string()))?;
    let any = Any::decode(record).map_err(|e| wrong(e.to_string()))?;
    Ok(BTreeMap::from([
        (names::CONFIG_DUMP.to_owned(), config),
        (names::SPEC_DUMP.to_owned(), any.value),
    ]))
}

/// `google.protobuf.Any`.
#[derive(Clone, PartialEq, Message)]
struct Any {
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

fn json(files: &BTreeMap<String, Vec<u8>>, name: &str) -> Result<Option<Value>, RecordError> {
    let Some(content) = files.get(name) else {
        return Ok(None);
    };
    serde_json::from_slice(content)
        .map(Some)
        .map_err(|e| RecordError {
            file: name.into(),
            reason: e.to_string(),
        })
}

fn text(value: &Value, pointer: &str) -> Option<String> {
    let text = value.pointer(pointer)?.as_str()?;
    (!text.is_empty()).then(|| shortened(text))
}

/// Reads a time. Go's zero time counts as none.
fn time(value: &Value, pointer: &str) -> Option<String> {
    text(value, pointer).filter(|t| !t.starts_with("0001-01-01"))
}

fn shortened(text: &str) -> String {
    text.chars().take(MAX_TEXT).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(list: &[(&str, &str)]) -> BTreeMap<String, Vec<u8>> {
        let pair = |(name, text): &(&str, &str)| ((*name).to_owned(), text.as_bytes().to_vec());
        list.iter().map(pair).collect()
    }

    #[test]
    fn podman() {
        let facts = read(&files(&[
            (
                names::CONFIG_DUMP,
                r#"{"id":"7d25","name":"job","lockID":0,"staticDir":"/x","rootfsImageID":"6865",
                "rootfsImageName":"localhost/busybox:latest","runtime":"cryopod-runtime",
                "createdTime":"2026-11-21T06:58:23.08Z","checkpointedTime":"0001-01-01T00:00:00Z"}"#,
            ),
            (
                names::SPEC_DUMP,
                r#"{"annotations":{"io.container.manager":"libpod"},"process":{"args":["sleep","1"]}}"#,
            ),
        ]))
        .unwrap();
        let some = |s: &str| Some(s.to_owned());
        assert_eq!(facts.engine, Some("podman"));
        assert_eq!(facts.name, some("job"));
        assert_eq!(facts.image, some("localhost/busybox:latest"));
        assert_eq!(facts.image_id, some("6865"));
        assert_eq!(facts.runtime, some("cryopod-runtime"));
        assert_eq!(facts.created, some("2026-11-21T06:58:23.08Z"));
        assert_eq!(facts.checkpointed, None);
        assert_eq!(facts.command, ["sleep", "1"]);
    }

    #[test]
    fn cri() {
        let config = r#"{"id":"a","name":"c","rootfsImageRef":"r@sha256:1","rootfsImageName":"r:1","runtime":"runc",
            "checkpointedTime":"2026-01-01T00:00:00Z"}"#;
        for (spec, engine) in [
            (
                r#"{"annotations":{"io.kubernetes.cri.container-type":"container",
                "io.kubernetes.cri.sandbox-name":"p","io.kubernetes.cri.sandbox-namespace":"n"}}"#,
                "containerd",
            ),
            (
                r#"{"annotations":{"io.container.manager":"cri-o",
                "io.kubernetes.cri-o.KubeName":"p","io.kubernetes.cri-o.Namespace":"n"}}"#,
                "cri-o",
            ),
        ] {
            let facts = read(&files(&[
                (names::CONFIG_DUMP, config),
                (names::SPEC_DUMP, spec),
            ]))
            .unwrap();
            assert_eq!(facts.engine, Some(engine));
            assert_eq!(facts.pod.as_deref(), Some("n/p"));
            assert_eq!(facts.image_id.as_deref(), Some("r@sha256:1"));
            assert_eq!(facts.checkpointed.as_deref(), Some("2026-01-01T00:00:00Z"));
        }
    }

    #[test]
    fn containerd() {
        let record = Any {
            value: br#"{"process":{"args":["sh"]},"linux":{"cgroupsPath":"/default/job"}}"#
                .to_vec(),
        };
        let annotations = BTreeMap::from(
            [
                (
                    "org.opencontainers.image.ref.name",
                    "localhost/busybox:latest",
                ),
                ("io.containerd.checkpoint.runtime", "io.containerd.runc.v2"),
            ]
            .map(|(k, v)| (k.to_owned(), v.to_owned())),
        );
        let facts =
            read_containerd("containerd/config", &record.encode_to_vec(), &annotations).unwrap();
        assert_eq!(facts.engine, Some("containerd-ctr"));
        assert_eq!(facts.id.as_deref(), Some("job"));
        assert_eq!(facts.runtime.as_deref(), Some("io.containerd.runc.v2"));
        assert_eq!(facts.command, ["sh"]);
        let files = files_of_containerd("containerd/config", &record.encode_to_vec(), &annotations)
            .unwrap();
        let facts = read(&files).unwrap();
        assert_eq!(facts.name.as_deref(), Some("job"));
        assert_eq!(facts.image.as_deref(), Some("localhost/busybox:latest"));
        assert_eq!(facts.command, ["sh"]);
    }

    #[test]
    fn damaged() {
        let error = read(&files(&[(names::CONFIG_DUMP, "{")])).unwrap_err();
        assert!(error.to_string().starts_with("config.dump: not valid"));
        assert!(read_containerd("containerd/config", b"\xff\xff", &BTreeMap::new()).is_err());
        // Of another type: left out.
        let facts = read(&files(&[
            (names::CONFIG_DUMP, r#"{"id":7}"#),
            (names::SPEC_DUMP, "[]"),
        ]));
        assert_eq!(facts.unwrap(), Facts::default());
    }
}
