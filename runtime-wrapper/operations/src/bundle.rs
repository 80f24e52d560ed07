//! Edits the new container's `config.json` before the low-level runtime reads it.
//!
//! An edit changes the spec as JSON, so that fields unknown to this version survive. The edits of an operation are one
//! ordered list. The file is written once, after all of them have succeeded, and only if anything has changed: a new
//! file is renamed over the old one. If the operation then fails, the old text comes back. If it succeeds, the edits
//! that are not lasting are taken back.

pub mod avoid;
mod devices;
mod hooks;
pub mod lock;
pub mod render;

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use cryopod_host::files::{Host, create_private};
use cryopod_host::spec::Spec;
use serde_json::Value;

pub use devices::Devices;
pub use hooks::DroppedHooks;

use crate::error::Error;

/// One change of a bundle's `config.json`.
pub trait Edit {
    fn name(&self) -> &'static str;

    /// Returns false for an edit that is taken back when the restore has succeeded.
    fn is_lasting(&self) -> bool {
        true
    }

    /// Changes the spec. An edit that finds nothing to do leaves it exactly as it was.
    fn apply(&self, host: &Host, spec: &mut Value) -> Result<(), Error>;
}

/// Returns the container's environment, for an edit; `None` where the spec has no process.
pub fn environment(spec: &mut Value) -> Option<&mut Vec<Value>> {
    let process = spec.get_mut("process")?.as_object_mut()?;
    process
        .entry("env")
        .or_insert_with(|| Value::Array(Vec::new()))
        .as_array_mut()
}

/// A bundle whose `config.json` was edited. Dropped without [`BundleUndo::keep`], it is restored to the old text.
#[derive(Debug)]
pub struct BundleUndo {
    /// The file and its old text; `None`: nothing was changed.
    before: Option<(PathBuf, Vec<u8>)>,
    /// The text to keep, if it is another than the one that was written.
    lasting: Option<Vec<u8>>,
}

/// The old text of a bundle's spec, in the directory of an operation that may be killed before it can put it back.
const NOTED: &str = "config.json.before";
/// The text that took its place.
const WRITTEN: &str = "config.json.written";

/// Returns the spec after these edits, and writes nothing.
pub fn preview(host: &Host, spec: &Spec, edits: &[Box<dyn Edit + '_>]) -> Result<Spec, Error> {
    let mut json = spec.json().clone();
    for edit in edits {
        edit.apply(host, &mut json)?;
    }
    Ok(Spec::from_json(json))
}

/// Applies the edits in order and writes the spec, if it has changed. `spec`: what `config.json` holds now. `noted`: the
/// directory of the operation, where [`put_back`] finds the old text if the operation is killed.
///
/// # Errors
/// An edit fails, or the file cannot be written. It is as it was.
pub fn edit(
    host: &Host,
    bundle: &Path,
    spec: &Spec,
    edits: &[Box<dyn Edit + '_>],
    noted: Option<&Path>,
) -> Result<BundleUndo, Error> {
    let apply = |edit: &dyn Edit, json: &mut Value| -> Result<(), Error> {
        let before = json.clone();
        edit.apply(host, json)?;
        if *json != before {
            tracing::info!("the container's spec: {}", edit.name());
        }
        Ok(())
    };
    let mut lasting = spec.json().clone();
    for edit in edits.iter().filter(|e| e.is_lasting()) {
        apply(&**edit, &mut lasting)?;
    }
    let mut json = lasting.clone();
    for edit in edits.iter().filter(|e| !e.is_lasting()) {
        apply(&**edit, &mut json)?;
    }
    if json == *spec.json() {
        return Ok(BundleUndo {
            before: None,
            lasting: None,
        });
    }
    let path = bundle.join("config.json");
    let unwritten = |path: &Path| format!("{}: cannot be written", path.display());
    let before = fs::read(&path).map_err(Error::at(&path, "cannot be read"))?;
    let text = |json: &Value| {
        serde_json::to_vec(json).map_err(|e| Error::Failed(format!("{}: {e}", unwritten(&path))))
    };
    let kept = match lasting {
        lasting if lasting == json => None,
        lasting if lasting == *spec.json() => Some(before.clone()),
        lasting => Some(text(&lasting)?),
    };
    let new = text(&json)?;
    if let Some(noted) = noted.filter(|_| kept.is_some()) {
        for (name, text) in [(WRITTEN, &new), (NOTED, &before)] {
            let note = noted.join(name);
            fs::write(&note, text).map_err(Error::io(unwritten(&note)))?;
        }
    }
    replace(&path, &new).map_err(Error::io(unwritten(&path)))?;
    Ok(BundleUndo {
        before: Some((path, before)),
        lasting: kept,
    })
}

/// Puts the old text of a bundle's spec back that a killed operation has noted in its directory.
pub fn put_back(bundle: &Path, noted: &Path) {
    let Ok(text) = fs::read(noted.join(NOTED)) else {
        return;
    };
    let path = bundle.join("config.json");
    // The engine may have written another one since.
    if fs::read(&path).ok() != fs::read(noted.join(WRITTEN)).ok() {
        return;
    }
    if let Err(e) = replace(&path, &text) {
        tracing::warn!("{}: the old text cannot be put back: {e}", path.display());
    }
}

impl BundleUndo {
    /// Keeps the new spec, after a successful restore.
    pub fn keep(mut self) {
        self.before = match (self.before.take(), self.lasting.take()) {
            (Some((path, _)), Some(text)) => Some((path, text)),
            _ => None,
        };
    }
}

impl Drop for BundleUndo {
    fn drop(&mut self) {
        if let Some((path, text)) = self.before.take()
            && let Err(e) = replace(&path, &text)
        {
            tracing::warn!("{}: the old text cannot be put back: {e}", path.display());
        }
    }
}

/// Writes a new file beside the old one, with its mode and owner, and renames it into place.
fn replace(path: &Path, text: &[u8]) -> std::io::Result<()> {
    let old = fs::metadata(path)?;
    let partial = path.with_file_name(".config.json.cryopod");
    let _ = fs::remove_file(&partial);
    let mut file = create_private(&partial)?;
    let written = file
        .write_all(text)
        .and_then(|()| std::os::unix::fs::fchown(&file, Some(old.uid()), Some(old.gid())))
        .and_then(|()| file.set_permissions(fs::Permissions::from_mode(old.mode() & 0o7777)))
        .and_then(|()| file.sync_all())
        .and_then(|()| fs::rename(&partial, path));
    if written.is_err() {
        let _ = fs::remove_file(&partial);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Adds a key; one in capital letters for a time.
    struct Add(&'static str);
    impl Edit for Add {
        fn is_lasting(&self) -> bool {
            !self.0.starts_with(char::is_uppercase)
        }
        fn name(&self) -> &'static str {
            "test"
        }
        fn apply(&self, _: &Host, spec: &mut Value) -> Result<(), Error> {
            match self.0 {
                "" => Ok(()),
                "no" => Err(Error::Failed("no".into())),
                key => {
                    spec[key] = json!(1);
                    Ok(())
                }
            }
        }
    }

    #[test]
    fn written_once_and_put_back_unless_kept() {
        let (dir, noted) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let path = dir.path().join("config.json");
        let text = "{ \"unknown\" : [1] }\n";
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        let now = || fs::read_to_string(&path).unwrap();
        let inode = || fs::metadata(&path).unwrap().ino();
        let go = |keys: &[&'static str]| {
            let spec = Spec::of_bundle(dir.path()).unwrap();
            let edits: Vec<Box<dyn Edit>> = keys.iter().map(|k| Box::new(Add(k)) as _).collect();
            edit(
                &Host::system(),
                dir.path(),
                &spec,
                &edits,
                Some(noted.path()),
            )
        };
        let first = inode();
        drop(go(&[""]).unwrap());
        assert!(go(&["a", "no"]).is_err());
        assert_eq!((now().as_str(), inode()), (text, first));
        let edited = go(&["a", "b"]).unwrap();
        assert_eq!(now(), r#"{"unknown":[1],"a":1,"b":1}"#);
        drop(edited);
        assert_eq!(now(), text);
        go(&["a"]).unwrap().keep();
        assert_eq!(now(), r#"{"unknown":[1],"a":1}"#);
        // One that is for the time of the restore.
        let edited = go(&["A", "b"]).unwrap();
        assert_eq!(now(), r#"{"unknown":[1],"a":1,"b":1,"A":1}"#);
        edited.keep();
        assert_eq!(now(), r#"{"unknown":[1],"a":1,"b":1}"#);
        let edited = go(&["A"]).unwrap();
        // Killed.
        std::mem::forget(edited);
        assert!(now().contains('A'));
        put_back(dir.path(), noted.path());
        assert_eq!(now(), r#"{"unknown":[1],"a":1,"b":1}"#);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o640);
        std::mem::forget(go(&["B"]).unwrap());
        fs::write(&path, "{}").unwrap();
        put_back(dir.path(), noted.path());
        assert_eq!(now(), "{}", "the engine's own");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
