//! What a setup changed, in `/var/lib/cryopod/setup/ENGINE`: `record.json`, and the files as they were before.

use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use cryopod_host::files::Host;
use serde::{Deserialize, Serialize};

use super::change::{self, Change};

const DIRECTORY: &str = "/var/lib/cryopod/setup";
const NAME: &str = "record.json";

#[derive(Debug, Default, Serialize, Deserialize)]
pub struct SetupRecord {
    #[serde(skip)]
    engine: String,
    /// Each file once: as it was before the first setup, and as the last one left it.
    changes: Vec<Change>,
    /// Directories that were made, from the outermost in.
    made: Vec<PathBuf>,
    /// Files that somebody changed between two setups.
    edited: Vec<PathBuf>,
}

impl SetupRecord {
    pub fn read(host: &Host, engine: &str) -> anyhow::Result<Self> {
        let path = Path::new(DIRECTORY).join(engine).join(NAME);
        let mut record: Self = match change::read(host, &path)? {
            Some(text) => serde_json::from_str(&text)
                .with_context(|| format!("{}: not a record of a setup", path.display()))?,
            None => Self::default(),
        };
        record.engine = engine.to_owned();
        Ok(record)
    }

    /// Makes changes, and returns the directory of the backup, which is complete before the first change.
    pub fn make(host: &Host, engine: &str, changes: &[Change]) -> anyhow::Result<PathBuf> {
        let mut record = Self::read(host, engine)?;
        for change in changes {
            record.add(change.clone());
            let parents = change.path().ancestors().skip(1);
            let missing: Vec<_> = parents
                .take_while(|dir| !host.path(dir).exists())
                .map(Path::to_owned)
                .collect();
            record.made.extend(missing.into_iter().rev());
        }
        let directory = Path::new(DIRECTORY).join(engine);
        let failed = || format!("{}: the backup cannot be written", directory.display());
        std::fs::create_dir_all(host.path(&directory)).with_context(failed)?;
        for change in &record.changes {
            if let Change::File {
                path,
                before: Some(text),
                ..
            } = change
            {
                let name = path.file_name().unwrap_or_default();
                change::write(&host.path(directory.join(name)), text).with_context(failed)?;
            }
        }
        let text = serde_json::to_string_pretty(&record)?;
        change::write(&host.path(directory.join(NAME)), &text).with_context(failed)?;
        for dir in &record.made {
            match std::fs::create_dir(host.path(dir)) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(e).with_context(|| format!("{}: cannot be made", dir.display()));
                }
                _ => {}
            }
        }
        for change in changes {
            change.make(host)?;
        }
        Ok(directory)
    }

    /// Adds a change to those of an earlier setup: what was before that one stays the first state.
    fn add(&mut self, new: Change) {
        let same = |old: &&mut Change| old.path() == new.path();
        match (self.changes.iter_mut().find(same), &new) {
            (None, _) => self.changes.push(new),
            (
                Some(Change::File { after, .. }),
                Change::File {
                    path,
                    before,
                    after: to,
                },
            ) => {
                if after != before {
                    self.edited.push(path.clone());
                }
                after.clone_from(to);
            }
            (Some(Change::Link { after, .. }), Change::Link { after: to, .. }) => {
                after.clone_from(to);
            }
            (Some(old), _) => *old = new,
        }
    }

    /// Returns the changes that undo the setup. A file that nobody has changed since becomes what it was. From another
    /// one `without` takes out what the setup added: it gets the path, the text as it is, and as it was before the setup.
    pub fn undone(
        &self,
        host: &Host,
        without: impl Fn(&Path, &str, Option<&str>) -> anyhow::Result<Option<String>>,
    ) -> anyhow::Result<Vec<Change>> {
        let mut all = Vec::new();
        for change in &self.changes {
            match change {
                Change::File {
                    path,
                    before,
                    after,
                } => {
                    let now = change::read(host, path)?;
                    let wanted = match &now {
                        None => continue,
                        now if now == after && !self.edited.contains(path) => before.clone(),
                        Some(text) => without(path, text, before.as_deref())
                            .with_context(|| path.display().to_string())?,
                    };
                    if now != wanted {
                        all.push(Change::File {
                            path: path.clone(),
                            before: now,
                            after: wanted,
                        });
                    }
                }
                Change::Link { path, after, .. } => {
                    let now = std::fs::read_link(host.path(path)).ok();
                    // Another link is not ours.
                    if now.is_some() && now == *after {
                        all.push(Change::Link {
                            path: path.clone(),
                            before: now,
                            after: None,
                        });
                    }
                }
            }
        }
        Ok(all)
    }

    /// Removes the backup, and the directories that the setup made, if they are empty.
    pub fn remove(&self, host: &Host) -> anyhow::Result<()> {
        if self.engine.is_empty() {
            bail!("the record has no engine");
        }
        let own = Path::new(DIRECTORY).join(&self.engine);
        match std::fs::remove_dir_all(host.path(&own)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                return Err(e).with_context(|| own.display().to_string());
            }
            _ => {}
        }
        let ours = own.ancestors().skip(1).take(2).map(Path::to_owned);
        for dir in self.made.iter().rev().cloned().chain(ours) {
            // It may hold other things by now.
            let _ = std::fs::remove_dir(host.path(dir));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(before: Option<&str>, after: &str) -> Change {
        Change::of(
            "/etc/engine/e.conf".into(),
            before.map(Into::into),
            after.into(),
        )
        .unwrap()
    }

    fn cut(_: &Path, text: &str, _: Option<&str>) -> anyhow::Result<Option<String>> {
        Ok(Some(text.replace("ours\n", "")))
    }

    #[test]
    fn made_and_undone() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::at(dir.path());
        std::fs::create_dir(dir.path().join("var")).unwrap();
        std::fs::create_dir(dir.path().join("var/lib")).unwrap();
        let change = file(None, "ours\n");
        SetupRecord::make(&host, "e", std::slice::from_ref(&change)).unwrap();
        let path = dir.path().join("etc/engine/e.conf");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "ours\n");
        let record = SetupRecord::read(&host, "e").unwrap();
        for undo in record.undone(&host, cut).unwrap() {
            undo.make(&host).unwrap();
        }
        record.remove(&host).unwrap();
        assert!(!dir.path().join("etc").exists(), "the setup made it");
        assert!(!dir.path().join("var/lib/cryopod").exists());
        assert!(dir.path().join("var/lib").exists());
        assert!(
            SetupRecord::read(&host, "e")
                .unwrap()
                .undone(&host, cut)
                .unwrap()
                .is_empty()
        );
    }

    #[test]
    fn what_others_changed_since_stays() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::at(dir.path());
        let path = dir.path().join("etc/engine/e.conf");
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, "a\n").unwrap();
        SetupRecord::make(&host, "e", &[file(Some("a\n"), "a\nours\n")]).unwrap();
        let backup = dir.path().join("var/lib/cryopod/setup/e/e.conf");
        assert_eq!(std::fs::read_to_string(backup).unwrap(), "a\n");
        std::fs::write(&path, "a\nours\nb\n").unwrap();
        let undone = SetupRecord::read(&host, "e")
            .unwrap()
            .undone(&host, cut)
            .unwrap();
        assert_eq!(undone, [file(Some("a\nours\nb\n"), "a\nb\n")]);
        // After a second setup, too.
        let all = "a\nours\nb\nours\n";
        SetupRecord::make(&host, "e", &[file(Some("a\nours\nb\n"), all)]).unwrap();
        let undone = SetupRecord::read(&host, "e")
            .unwrap()
            .undone(&host, cut)
            .unwrap();
        assert_eq!(undone, [file(Some(all), "a\nb\n")]);
    }

    #[test]
    fn a_link_of_somebody_else_stays() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::at(dir.path());
        let link = Change::Link {
            path: "/bin/shim".into(),
            before: None,
            after: Some("/usr/bin/ours".into()),
        };
        SetupRecord::make(&host, "e", &[link]).unwrap();
        let record = SetupRecord::read(&host, "e").unwrap();
        assert_eq!(record.undone(&host, cut).unwrap().len(), 1);
        let path = dir.path().join("bin/shim");
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/usr/bin/theirs", &path).unwrap();
        assert!(record.undone(&host, cut).unwrap().is_empty());
    }
}
