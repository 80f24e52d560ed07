//! What the shim looks up in a bundle's spec.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};

use serde_json::Value;

/// The spec's name in a bundle.
const FILE: &str = "config.json";
/// Specs are small; a larger one is a mistake.
const MAX_BYTES: u64 = 16 << 20;

/// A spec that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {source}; the bundle is damaged, create the container anew", path = path.display())]
pub struct SpecError {
    path: PathBuf,
    source: io::Error,
}

/// A container's spec, as far as it matters here.
#[derive(Debug, Clone, Default, serde::Deserialize)]
pub struct Spec {
    #[serde(default)]
    annotations: HashMap<String, String>,
    linux: Option<Linux>,
}

#[derive(Debug, Clone, Default, serde::Deserialize)]
struct Linux {
    #[serde(rename = "cgroupsPath")]
    cgroups_path: Option<String>,
}

impl Spec {
    /// Reads a bundle's.
    ///
    /// # Errors
    /// [`SpecError`].
    pub fn read(bundle: &Path) -> Result<Self, SpecError> {
        parse(bundle)
    }

    /// Is the annotation set to `on`?
    pub fn is_on(&self, annotation: &str) -> bool {
        self.annotations.get(annotation).is_some_and(|v| v == "on")
    }

    /// The container's cgroup below each hierarchy; `None` if it is named as systemd's, or oddly.
    pub fn cgroup(&self) -> Option<&Path> {
        let path = self.linux.as_ref()?.cgroups_path.as_deref()?;
        let path = Path::new(path.trim_start_matches('/'));
        let plain = |c| matches!(c, Component::Normal(n) if !n.to_string_lossy().contains(':'));
        (!path.as_os_str().is_empty() && path.components().all(plain)).then_some(path)
    }

    /// Is the container's cgroup written as systemd's (`SLICE:PREFIX:NAME`)? docker tells its cgroup driver only to
    /// runtimes that it knows by name.
    pub fn names_a_slice(&self) -> bool {
        let path = self.linux.as_ref().and_then(|l| l.cgroups_path.as_deref());
        path.is_some_and(|path| {
            let mut parts = path.split(':');
            parts.next().is_some_and(|slice| slice.ends_with(".slice")) && parts.count() == 2
        })
    }
}

/// The whole spec, to be changed and written back: nothing of it is lost.
///
/// # Errors
/// [`SpecError`].
pub fn whole(bundle: &Path) -> Result<Value, SpecError> {
    parse(bundle)
}

/// Where the spec is.
pub fn path(bundle: &Path) -> PathBuf {
    bundle.join(FILE)
}

fn parse<T: serde::de::DeserializeOwned>(bundle: &Path) -> Result<T, SpecError> {
    let path = path(bundle);
    let mut bytes = Vec::new();
    File::open(&path)
        .and_then(|f| f.take(MAX_BYTES + 1).read_to_end(&mut bytes))
        .and_then(|_| match bytes.len() as u64 > MAX_BYTES {
            true => Err(io::Error::other(format!("larger than {MAX_BYTES} bytes"))),
            false => serde_json::from_slice(&bytes).map_err(io::Error::from),
        })
        .map_err(|source| SpecError { path, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Spec, SpecError> {
        let bundle = tempfile::tempdir().unwrap();
        std::fs::write(path(bundle.path()), text).unwrap();
        Spec::read(bundle.path())
    }

    #[test]
    fn what_is_looked_up() {
        let spec =
            read(r#"{"annotations":{"a":"on","b":"off"},"linux":{"cgroupsPath":"x.slice:p:n"}}"#);
        let spec = spec.unwrap();
        assert!(spec.is_on("a") && !spec.is_on("b") && !spec.is_on("c"));
        assert!(spec.names_a_slice());
        for other in ["/a/b", "a:b:c", "x.slice:p", "x.slice:p:n:m", ""] {
            let spec = read(&format!(r#"{{"linux":{{"cgroupsPath":"{other}"}}}}"#));
            assert!(!spec.unwrap().names_a_slice(), "{other}");
        }
        assert!(!read("{}").unwrap().names_a_slice());
        for (path, want) in [
            ("/a/b", Some("a/b")),
            ("c", Some("c")),
            ("/", None),
            ("", None),
            ("/a/../../b", None),
            ("a.slice:b:c", None),
        ] {
            let spec = read(&format!(r#"{{"linux":{{"cgroupsPath":"{path}"}}}}"#)).unwrap();
            assert_eq!(spec.cgroup(), want.map(Path::new), "{path}");
        }
    }

    #[test]
    fn what_cannot_be_used_is_named() {
        for bad in ["", "{", "[]", r#"{"annotations":3}"#] {
            let e = read(bad).unwrap_err().to_string();
            assert!(e.contains("config.json") && e.contains("anew"), "{e}");
        }
        let e = read(&" ".repeat(MAX_BYTES as usize + 1)).unwrap_err();
        assert!(e.to_string().contains("larger than"), "{e}");
        let none = Spec::read(Path::new("/no/such/bundle")).unwrap_err();
        assert!(none.to_string().contains("/no/such/bundle/config.json"));
    }
}
