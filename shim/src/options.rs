//! Decodes runtime options. The stock shim takes only `containerd.runc.v1.Options`. To a runtime whose name they do not
//! know, containerd's CRI and docker send `runtimeoptions.v1.Options`, a TOML text with the same keys.

use std::path::Path;
use std::{fs, io};

use containerd_shim::api::Options;
use containerd_shim::protos::protobuf::well_known_types::any::Any;
use containerd_shim::protos::protobuf::{CodedInputStream, Message};

/// The stock shim's default low-level runtime.
pub const DEFAULT_LOW_LEVEL: &str = "runc";
/// The stock shim's default root for runc.
pub const DEFAULT_ROOT: &str = "/run/containerd/runc";
const RUNC: &str = "containerd.runc.v1.Options";
const GENERIC: &str = "runtimeoptions.v1.Options";
/// Configurations are small; a larger one is a mistake.
const MAX_CONFIG_BYTES: u64 = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub enum OptionsError {
    #[error("runtime options of type {0:?}; cryopod takes {RUNC} and {GENERIC}")]
    Type(String),
    #[error("runtime options of type {kind}: {reason}")]
    Invalid { kind: &'static str, reason: String },
    #[error("runtime options: ConfigPath {path}: {source}")]
    File { path: String, source: io::Error },
}

/// Returns true if [`decode`] takes a message of this type.
pub fn is_options(any: &Any) -> bool {
    matches!(type_name(any), RUNC | GENERIC)
}

/// Returns the type's name without a leading `type.googleapis.com/`.
fn type_name(any: &Any) -> &str {
    any.type_url.rsplit('/').next().unwrap_or_default()
}

/// Converts options of any kind to the stock shim's.
pub fn decode(any: Option<&Any>) -> Result<Options, OptionsError> {
    let Some(any) = any.filter(|a| !a.type_url.is_empty() || !a.value.is_empty()) else {
        return Ok(Options::new());
    };
    match type_name(any) {
        RUNC => Options::parse_from_bytes(&any.value).map_err(|e| invalid(RUNC, e)),
        GENERIC => generic(&any.value),
        _ => Err(OptionsError::Type(any.type_url.clone())),
    }
}

/// Returns the options in containerd's own form for runc.
pub fn encode(options: &Options) -> Result<Any, OptionsError> {
    let mut any = Any::new();
    any.type_url = RUNC.into();
    any.value = options.write_to_bytes().map_err(|e| invalid(RUNC, e))?;
    Ok(any)
}

fn invalid(kind: &'static str, e: impl std::fmt::Display) -> OptionsError {
    OptionsError::Invalid {
        kind,
        reason: e.to_string(),
    }
}

fn generic(bytes: &[u8]) -> Result<Options, OptionsError> {
    let (mut path, mut body) = (String::new(), Vec::new());
    let mut input = CodedInputStream::from_bytes(bytes);
    let wrong = |e| invalid(GENERIC, e);
    while let Some(tag) = input.read_raw_tag_or_eof().map_err(wrong)? {
        // Field 2: config_path; field 3: config_body; both length-delimited.
        match tag {
            0x12 => path = input.read_string().map_err(wrong)?,
            0x1a => body = input.read_bytes().map_err(wrong)?,
            _ => containerd_shim::protos::protobuf::rt::skip_field_for_tag(tag, &mut input)
                .map_err(wrong)?,
        }
    }
    if !path.is_empty() {
        body = read(Path::new(&path)).map_err(|source| OptionsError::File {
            path: path.clone(),
            source,
        })?;
    }
    let text = String::from_utf8(body).map_err(|e| invalid(GENERIC, e))?;
    from_toml(&text)
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let length = fs::metadata(path)?.len();
    if length > MAX_CONFIG_BYTES {
        return Err(io::Error::other(format!(
            "{length} bytes are too many for a configuration"
        )));
    }
    fs::read(path)
}

fn from_toml(text: &str) -> Result<Options, OptionsError> {
    let table: toml::Table = text
        .parse()
        .map_err(|e: toml::de::Error| invalid(GENERIC, e.message()))?;
    let mut options = Options::new();
    for (key, value) in table {
        let wrong = || invalid(GENERIC, format!("{key} = {value}: not what the key takes"));
        let text = || value.as_str().map(str::to_owned).ok_or_else(wrong);
        let flag = || value.as_bool().ok_or_else(wrong);
        let number = || {
            value
                .as_integer()
                .and_then(|n| u32::try_from(n).ok())
                .ok_or_else(wrong)
        };
        // Go's decoder ignores the case of keys.
        match key.to_ascii_lowercase().replace('_', "").as_str() {
            "binaryname" => options.binary_name = text()?,
            "root" => options.root = text()?,
            "shimcgroup" => options.shim_cgroup = text()?,
            "criuimagepath" => options.criu_image_path = text()?,
            "criuworkpath" => options.criu_work_path = text()?,
            "systemdcgroup" => options.systemd_cgroup = flag()?,
            "nopivotroot" => options.no_pivot_root = flag()?,
            "nonewkeyring" => options.no_new_keyring = flag()?,
            "iouid" => options.io_uid = number()?,
            "iogid" => options.io_gid = number()?,
            // Keys of other runtimes and of newer versions do no harm.
            _ => {}
        }
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn any(kind: &str, value: Vec<u8>) -> Any {
        let mut any = Any::new();
        any.type_url = kind.into();
        any.value = value;
        any
    }

    fn body(toml: &str) -> Vec<u8> {
        let mut bytes = vec![0x0a, 1, b'x', 0x1a, u8::try_from(toml.len()).unwrap()];
        bytes.extend_from_slice(toml.as_bytes());
        bytes
    }

    #[test]
    fn every_kind() {
        assert_eq!(decode(None).unwrap(), Options::new());
        let mut mine = Options::new();
        mine.binary_name = "crun".into();
        mine.systemd_cgroup = true;
        assert_eq!(decode(Some(&encode(&mine).unwrap())).unwrap(), mine);
        let toml = "BinaryName = \"crun\"\nSystemdCgroup = true\nOther = 1\n";
        for kind in [GENERIC, "type.googleapis.com/runtimeoptions.v1.Options"] {
            assert_eq!(decode(Some(&any(kind, body(toml)))).unwrap(), mine);
        }
    }

    #[test]
    fn a_file_that_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "Root = \"/r\"\n").unwrap();
        let path = file.path().to_str().unwrap();
        let mut bytes = vec![0x12, u8::try_from(path.len()).unwrap()];
        bytes.extend_from_slice(path.as_bytes());
        assert_eq!(decode(Some(&any(GENERIC, bytes))).unwrap().root, "/r");
    }

    #[test]
    fn what_cannot_be_taken_is_named() {
        for (bad, want) in [
            (any("a.b", vec![]), "a.b"),
            (any(GENERIC, body("SystemdCgroup = 3")), "SystemdCgroup = 3"),
            (any(GENERIC, body("x = ")), GENERIC),
            (any(GENERIC, vec![0x12, 2, b'/', b'x']), "ConfigPath /x"),
            (any(GENERIC, vec![0x12, 9]), GENERIC),
            (any(RUNC, vec![0x12, 9]), RUNC),
        ] {
            let e = decode(Some(&bad)).unwrap_err().to_string();
            assert!(e.contains(want), "{e}");
        }
    }
}
