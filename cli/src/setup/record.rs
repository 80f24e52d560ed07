//! What a setup changed, in `/var/lib/cryopod/setup/ENGINE`: `record.json`, and the files as they were before.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, bail};
use cryopod_host::files::{Host, if_there};
use serde::{Deserialize, Serialize};

use super::change::{self, Change};
use super::own_files::{self, OwnFiles};

const DIRECTORY: &str = "/var/lib/cryopod/setup";
const NAME: &str = "record.json";
/// The record of cryopod's own configuration, which the setups of all engines share: the undoing of the last one undoes it.
pub const SHARED: &str = "cryopod";

/// The directory of an engine's record and backups.
pub fn directory(engine: &str) -> PathBuf {
    Path::new(DIRECTORY).join(engine)
}

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
    /// cryopod's own files were brought to this node.
    #[serde(default)]
    own_files: bool,
}

impl SetupRecord {
    /// Reads the record of an engine; an empty one if there is none.
    pub fn read(host: &Host, engine: &str) -> anyhow::Result<Self> {
        let path = directory(engine).join(NAME);
        let mut record: Self = match change::read(host, &path)? {
            Some(text) => serde_json::from_str(&text)
                .with_context(|| format!("{}: not a record of a setup", path.display()))?,
            None => Self::default(),
        };
        record.engine = engine.to_owned();
        Ok(record)
    }

    /// The other engines that are set up.
    pub fn others(host: &Host, engine: &str) -> Vec<String> {
        let mut all = host.names(DIRECTORY);
        all.retain(|name| name != engine && name != SHARED);
        all
    }

    /// Returns true if this file is as the last setup left it, and was not there before the first.
    pub fn made_file(&self, path: &Path, text: &str) -> bool {
        self.changes.iter().any(|change| {
            matches!(change, Change::File { path: of, before: None, after: Some(after) } if of == path && after == text)
        })
    }

    /// Fails if the place of cryopod's own files has others.
    pub fn ensure_place(host: &Host, engine: &str) -> anyhow::Result<()> {
        let place = own_files::DIRECTORY;
        if host.path(place).exists() && !Self::read(host, engine)?.own_files {
            bail!("{place} is not of this setup: move it away");
        }
        Ok(())
    }

    /// Closes the backups to all but root: an engine's configuration can hold secrets.
    pub fn close(host: &Host) -> anyhow::Result<()> {
        let closed = fs::set_permissions(host.path(DIRECTORY), PermissionsExt::from_mode(0o700));
        if_there(closed).context(DIRECTORY)?;
        Ok(())
    }

    /// Makes changes, and returns the directory of the backup, which is complete before the first change.
    pub fn make(
        host: &Host,
        engine: &str,
        changes: &[Change],
        files: Option<&OwnFiles>,
    ) -> anyhow::Result<PathBuf> {
        let mut record = Self::read(host, engine)?;
        record.own_files |= files.is_some();
        for change in changes {
            record.add(change.clone());
            record.add_made(missing(host, change.path()));
        }
        if files.is_some() {
            record.add_made(missing(host, Path::new(own_files::DIRECTORY)));
        }
        let directory = directory(engine);
        let failed = || format!("{}: the backup cannot be written", directory.display());
        fs::create_dir_all(host.path(&directory)).with_context(failed)?;
        Self::close(host)?;
        for change in &record.changes {
            if let Change::File {
                path,
                before: Some(text),
                ..
            } = change
            {
                // By the whole path: two files of one name are two.
                let names = path
                    .components()
                    .filter(|part| matches!(part, Component::Normal(_)));
                let copy = host.path(directory.join(names.collect::<PathBuf>()));
                fs::create_dir_all(copy.parent().unwrap_or(&copy)).with_context(failed)?;
                change::write(&copy, text).with_context(failed)?;
                if let Ok(original) = host.path(path).metadata() {
                    fs::set_permissions(&copy, original.permissions()).with_context(failed)?;
                }
            }
        }
        let text = serde_json::to_string_pretty(&record)?;
        let path = host.path(directory.join(NAME));
        change::write(&path, &text).with_context(failed)?;
        fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).with_context(failed)?;
        for dir in &record.made {
            let path = host.path(dir);
            // Rootless engines read what is in it, whatever this process's umask.
            let open = |()| fs::set_permissions(&path, PermissionsExt::from_mode(0o755));
            match fs::create_dir(&path).and_then(open) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(e).with_context(|| format!("{}: cannot be made", dir.display()));
                }
                _ => {}
            }
        }
        if let Some(files) = files {
            files.install(host).context(own_files::DIRECTORY)?;
        }
        for change in changes {
            change.make(host)?;
        }
        Ok(directory)
    }

    fn add_made(&mut self, directories: Vec<PathBuf>) {
        let new = |directory: &PathBuf| !self.made.contains(directory);
        let new: Vec<_> = directories.into_iter().filter(new).collect();
        self.made.extend(new);
    }

    /// Adds a change to those of an earlier setup: what was before that one stays the first state.
    fn add(&mut self, new: Change) {
        let same = |old: &&mut Change| old.path() == new.path();
        match (self.changes.iter_mut().find(same), &new) {
            (None, _) => self.changes.push(new),
            (
                Some(Change::File {
                    before: first,
                    after,
                    ..
                }),
                Change::File {
                    path,
                    before,
                    after: to,
                },
            ) => {
                // As before the first setup: that one was killed before it made its change, or somebody took it back.
                if after != before && first != before {
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
                        now if now == before => continue,
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
                    let now = fs::read_link(host.path(path)).ok();
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

    /// Removes the backup, cryopod's own files, and the directories that the setup made, if they are empty. The record goes
    /// last: a run that was killed is repeated.
    pub fn remove(&self, host: &Host) -> anyhow::Result<()> {
        if self.engine.is_empty() {
            bail!("the record has no engine");
        }
        if self.own_files {
            own_files::remove(host)?;
        }
        for change in &self.changes {
            if_there(fs::remove_file(change::beside(&host.path(change.path()))))
                .with_context(|| change.path().display().to_string())?;
        }
        for dir in self.made.iter().rev() {
            // It may hold other things by now.
            let _ = fs::remove_dir(host.path(dir));
        }
        let own = directory(&self.engine);
        let removed = if_there(fs::remove_dir_all(host.path(&own)));
        removed.with_context(|| own.display().to_string())?;
        for dir in own.ancestors().skip(1).take(2) {
            let _ = fs::remove_dir(host.path(dir));
        }
        Ok(())
    }

    /// The files that were changed.
    pub fn paths(&self) -> Vec<PathBuf> {
        let paths = self.changes.iter().map(Change::path);
        paths.map(Path::to_owned).collect()
    }

    /// Returns true if the setup brought cryopod's own files.
    pub fn has_own_files(&self) -> bool {
        self.own_files
    }

    /// Returns true if no setup is recorded.
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty() && !self.own_files
    }
}

/// The directories above a path that are not there, from the outermost in.
fn missing(host: &Host, path: &Path) -> Vec<PathBuf> {
    let above = path.ancestors().skip(1);
    let mut all: Vec<_> = above
        .take_while(|dir| !host.path(dir).exists())
        .map(Path::to_owned)
        .collect();
    all.reverse();
    all
}

#[cfg(test)]
mod tests {
    use cryopod_test_files::TestFiles;

    use super::*;

    fn file(before: Option<&str>, after: &str) -> Change {
        Change::of(
            "/etc/engine/e.conf".into(),
            before.map(Into::into),
            after.into(),
        )
        .unwrap()
    }

    fn undone(host: &Host) -> Vec<Change> {
        let cut = |_: &Path, text: &str, _: Option<&str>| Ok(Some(text.replace("ours\n", "")));
        let record = SetupRecord::read(host, "e").unwrap();
        record.undone(host, cut).unwrap()
    }

    #[test]
    fn made_and_undone() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::at(dir.path());
        fs::create_dir(dir.path().join("var")).unwrap();
        fs::create_dir(dir.path().join("var/lib")).unwrap();
        let change = file(None, "ours\n");
        SetupRecord::make(&host, "e", std::slice::from_ref(&change), None).unwrap();
        let path = dir.path().join("etc/engine/e.conf");
        assert_eq!(fs::read_to_string(&path).unwrap(), "ours\n");
        let record = SetupRecord::read(&host, "e").unwrap();
        for undo in undone(&host) {
            undo.make(&host).unwrap();
        }
        record.remove(&host).unwrap();
        assert!(!dir.path().join("etc").exists(), "the setup made it");
        assert!(!dir.path().join("var/lib/cryopod").exists());
        assert!(dir.path().join("var/lib").exists());
        assert!(undone(&host).is_empty());
    }

    #[test]
    fn what_others_changed_since_stays() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::at(dir.path());
        let path = dir.path().join("etc/engine/e.conf");
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "a\n").unwrap();
        SetupRecord::make(&host, "e", &[file(Some("a\n"), "a\nours\n")], None).unwrap();
        let backup = dir.path().join("var/lib/cryopod/setup/e/etc/engine/e.conf");
        assert_eq!(fs::read_to_string(backup).unwrap(), "a\n");
        fs::write(&path, "a\nours\nb\n").unwrap();
        assert_eq!(undone(&host), [file(Some("a\nours\nb\n"), "a\nb\n")]);
        // After a second setup, too.
        let all = "a\nours\nb\nours\n";
        SetupRecord::make(&host, "e", &[file(Some("a\nours\nb\n"), all)], None).unwrap();
        assert_eq!(undone(&host), [file(Some(all), "a\nb\n")]);
    }

    #[test]
    fn a_setup_that_was_killed_is_no_edit() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::at(dir.path());
        let path = dir.path().join("etc/engine/e.conf");
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "a  \n").unwrap();
        let change = file(Some("a  \n"), "a\nours\n");
        SetupRecord::make(&host, "e", std::slice::from_ref(&change), None).unwrap();
        // Killed before the file was renamed.
        fs::write(&path, "a  \n").unwrap();
        fs::write(change::beside(&path), "half").unwrap();
        assert!(undone(&host).is_empty());
        SetupRecord::make(&host, "e", &[change], None).unwrap();
        let record = SetupRecord::read(&host, "e").unwrap();
        assert_eq!(undone(&host), [file(Some("a\nours\n"), "a  \n")]);
        fs::write(change::beside(&path), "half").unwrap();
        record.remove(&host).unwrap();
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn two_files_of_one_name_have_two_backups() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::at(dir.path());
        let change = |path: &str| {
            dir.put(&path[1..], path);
            Change::of(path.into(), Some(path.into()), "ours".into()).unwrap()
        };
        let changes = ["/etc/a/c.toml", "/etc/b/c.toml"].map(change);
        SetupRecord::make(&host, "e", &changes, None).unwrap();
        for change in &changes {
            let backup = format!("{DIRECTORY}/e{}", change.path().display());
            let backup = fs::read_to_string(host.path(backup)).unwrap();
            assert_eq!(Path::new(&backup), change.path());
        }
    }

    #[test]
    fn a_place_of_somebody_else() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::at(dir.path());
        SetupRecord::ensure_place(&host, "e").unwrap();
        dir.dir(&own_files::DIRECTORY[1..]);
        assert!(SetupRecord::ensure_place(&host, "e").is_err());
        let ours = r#"{"changes": [], "made": [], "edited": [], "own_files": true}"#;
        dir.put("var/lib/cryopod/setup/e/record.json", ours);
        SetupRecord::ensure_place(&host, "e").unwrap();
    }

    #[test]
    fn backups_are_roots_alone() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::at(dir.path());
        // An older setup left it open.
        dir.dir(&DIRECTORY[1..]);
        dir.put("etc/engine/e.conf", "secret\n");
        let original = dir.path().join("etc/engine/e.conf");
        fs::set_permissions(&original, PermissionsExt::from_mode(0o640)).unwrap();
        let change = file(Some("secret\n"), "secret\nours\n");
        SetupRecord::make(&host, "e", &[change], None).unwrap();
        let mode = |path: &str| {
            let path = host.path(DIRECTORY).join(path);
            path.metadata().unwrap().permissions().mode() & 0o777
        };
        assert_eq!(mode(""), 0o700);
        assert_eq!(mode("e/etc/engine/e.conf"), 0o640);
        assert_eq!(mode("e/record.json"), 0o600);
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
        SetupRecord::make(&host, "e", &[link], None).unwrap();
        assert_eq!(undone(&host).len(), 1);
        let path = dir.path().join("bin/shim");
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/usr/bin/theirs", &path).unwrap();
        assert!(undone(&host).is_empty());
    }
}
