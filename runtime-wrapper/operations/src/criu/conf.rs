//! Writes CRIU's configuration for one operation, and keeps the user's own.
//!
//! CRIU reads, each overriding the one before: `/etc/criu/default.conf`, `$HOME/.criu/default.conf`, the file that
//! `$CRIU_CONFIG_FILE` names, what the runtime sends, and last the file that the runtime names: the annotation
//! `org.criu.config`, else `/etc/criu/runc.conf` (crun: `crun.conf`, then `runc.conf`). Ours is `$CRIU_CONFIG_FILE`: it
//! contains a copy of the file that the user named there before. It also contains the runtime's file where the runtime
//! does not name one to CRIU (crun before 1.26, or CRIU before 4.2). Otherwise CRIU reads that file itself, after ours.
//! Only `libdir` cannot be the user's: it would hide the private plugin directory. So it is removed, and the plugins
//! found there are linked into the private directory.

use crate::error::Error;
use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

use cryopod_gpu_plan::ceiling::{AskedNode, Ceiling};
use cryopod_gpu_plan::refusal::Refusal;
use cryopod_host::files::Host;
use cryopod_host::spec::Spec;

use crate::config::Config;
use crate::criu::file;
use crate::criu::opts::CriuOptions;
use crate::request::lowlevel::RuntimeKind;
use crate::run::operation::Operation;

/// runc's annotation that names a CRIU configuration file.
pub const ANNOTATION: &str = "org.criu.config";

/// Why CRIU's configuration cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum CriuConfError {
    #[error("{path}: cannot read the CRIU configuration that {who} names: {source}")]
    Read {
        path: PathBuf,
        who: String,
        source: io::Error,
    },
    /// A container may not name this file.
    #[error("the annotation {ANNOTATION} cannot be followed: {0}")]
    Refused(String),
    #[error(
        "{path}: `libdir` there overrides cryopod's private plugin directory, and the GPU state would be lost; remove that line (name other plugins in CRIU_CONFIG_FILE or /etc/criu/default.conf)"
    )]
    Libdir { path: PathBuf },
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Extra {
    pub options: CriuOptions,
    /// Further lines: mounts that are external.
    pub lines: Vec<String>,
    /// How long CRIU may take, in seconds; 0: as `limits.checkpoint_s`.
    pub limit_s: u64,
}

/// A user's configuration: text without `libdir`, and the directories that `libdir` named.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct UserConf {
    text: String,
    libdirs: Vec<PathBuf>,
}

fn split(text: &str) -> UserConf {
    let mut conf = UserConf::default();
    for line in text.lines() {
        // CRIU takes `libdir X`, `libdir=X`, and any unambiguous prefix of the name.
        let mut words = line
            .split(|c: char| c.is_whitespace() || c == '=')
            .filter(|w| !w.is_empty());
        let first = words
            .next()
            .map(|w| w.trim_start_matches('-'))
            .unwrap_or_default();
        if first.len() >= 3 && "libdir".starts_with(first) {
            conf.libdirs
                .extend(words.next().map(|w| w.trim_matches('"').into()));
        } else {
            conf.text.push_str(line);
            conf.text.push('\n');
        }
    }
    conf
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConfReader {
    pub kind: RuntimeKind,
    /// True if it names a configuration file to CRIU: runc always, crun from 1.26 with CRIU from 4.2.
    pub names_file: bool,
    /// True for a restore, whose spec and annotations come from the archive, and so perhaps from a stranger.
    pub restore: bool,
}

/// A file that the runtime names to CRIU, or would name if it could.
#[derive(Debug, PartialEq, Eq)]
enum Named {
    /// By the container's annotation, perhaps a stranger's.
    Annotation(PathBuf),
    /// The runtime's default file.
    Runtime(PathBuf),
}

impl Named {
    fn path(&self) -> &Path {
        match self {
            Self::Annotation(path) | Self::Runtime(path) => path,
        }
    }

    /// Reads the file. One that an annotation names is read only where the configuration allows it.
    fn read(&self, ceiling: &Ceiling<'_>) -> Result<String, CriuConfError> {
        let (path, who, text) = match self {
            Self::Annotation(path) => {
                let asked = AskedNode::CriuFile(path);
                let refused = |r: Refusal| CriuConfError::Refused(r.to_string());
                ceiling.admit(asked).map_err(refused)?;
                let who = format!("the annotation {ANNOTATION}");
                (path, who, file::read_roots(path))
            }
            Self::Runtime(path) => (path, "the runtime".to_owned(), file::read(path)),
        };
        text.map_err(|source| CriuConfError::Read {
            path: path.clone(),
            who,
            source,
        })
    }
}

fn runtime_file(reader: ConfReader, spec: &Spec, exists: &dyn Fn(&Path) -> bool) -> Option<Named> {
    // Where the runtime would not follow a stranger's annotation, cryopod does not either.
    let trusted = reader.names_file || !reader.restore;
    match spec.annotation(ANNOTATION).filter(|_| trusted) {
        Some("") => None,
        Some(path) => Some(Named::Annotation(path.into())),
        None => {
            let files: &[&str] = match reader.kind {
                RuntimeKind::Crun => &["/etc/criu/crun.conf", "/etc/criu/runc.conf"],
                RuntimeKind::Runc => &["/etc/criu/runc.conf"],
            };
            let found = files.iter().map(Path::new).find(|p| exists(p));
            found.map(|p| Named::Runtime(p.to_owned()))
        }
    }
}

/// Returns the text of the file that the runtime names to CRIU, or would; `None`: no file, or it may not be used.
pub fn runtime_text(kind: RuntimeKind, ceiling: &Ceiling<'_>) -> Option<String> {
    let reader = ConfReader {
        kind,
        names_file: false,
        restore: false,
    };
    let named = runtime_file(reader, ceiling.spec, &|p| p.exists())?;
    named.read(ceiling).ok()
}

/// Returns the file that the runtime names to CRIU, or would, and what it says.
///
/// # Errors
/// A restore is refused because of it.
pub fn runtime_conf(
    reader: ConfReader,
    ceiling: &Ceiling<'_>,
) -> Result<Option<(PathBuf, UserConf)>, CriuConfError> {
    let Some(named) = runtime_file(reader, ceiling.spec, &|p| p.exists()) else {
        return Ok(None);
    };
    let user = split(&named.read(ceiling)?);
    let path = named.path().to_owned();
    match reader.names_file && !user.libdirs.is_empty() {
        true => Err(CriuConfError::Libdir { path }),
        false => Ok(Some((path, user))),
    }
}

/// Merges the configurations. `env` is the old value of `CRIU_CONFIG_FILE`. Returns the text and the plugin directories
/// that the user named.
pub fn merge(
    op: &Operation,
    config: &Config,
    reader: ConfReader,
    spec: &Spec,
    env: Option<&Path>,
    extra: &Extra,
) -> Result<(String, Vec<PathBuf>), CriuConfError> {
    let host = Host::system();
    let ceiling = config.ceiling(&host, spec);
    let mut text = String::from("# Made by cryopod for one operation.\n");
    let mut libdirs = Vec::new();
    let mut take = |path: &Path, user: UserConf| {
        let _ = write!(text, "# From {}:\n{}", path.display(), user.text);
        libdirs.extend(user.libdirs);
    };
    if let Some(path) = env {
        let text = file::read(path).map_err(|source| CriuConfError::Read {
            path: path.to_owned(),
            who: "CRIU_CONFIG_FILE".to_owned(),
            source,
        })?;
        take(path, split(&text));
    }
    if let Some((path, user)) = runtime_conf(reader, &ceiling)?
        && !reader.names_file
    {
        take(&path, user);
    }
    text.push_str("# cryopod's own:\n");
    // CRIU's default alarm of 10 seconds for stopping the processes would cut off the driver's lock.
    let limit = extra.limit_s.max(config.limits.checkpoint_s);
    let _ = writeln!(text, "timeout {limit}");
    let options = extra.options.lines(reader.restore);
    for line in options.iter().chain(&extra.lines) {
        let _ = writeln!(text, "{line}");
    }
    let _ = writeln!(text, "libdir {}", op.plugins().display());
    let _ = writeln!(
        text,
        "action-script {}",
        op.file(crate::run::action_script::HOOK_NAME).display()
    );
    Ok((text, libdirs))
}

/// Returns the plugins in the directories that the user named, without those of the GPU vendors: the plan decides about
/// these.
pub fn user_plugins(libdirs: &[PathBuf]) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = libdirs
        .iter()
        .filter_map(|d| std::fs::read_dir(d).ok())
        .flat_map(|entries| entries.flatten().map(|e| e.path()))
        .filter(|p| {
            let name = p.file_name().unwrap_or_default().to_string_lossy();
            name.ends_with(".so")
                && !matches!(
                    &*name,
                    "cuda_plugin.so" | "amdgpu_plugin.so" | "cryopod_nvidia.so"
                )
        })
        .collect();
    found.sort();
    found.dedup_by(|a, b| a.file_name() == b.file_name());
    found
}

impl From<CriuConfError> for Error {
    fn from(error: CriuConfError) -> Self {
        Self::Failed(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn libdir_is_taken_out_and_nothing_else() {
        let conf = split(
            "# mine\nghost-limit 5M\n libdir /opt/criu\n--libdir \"/x\"\ntcp-close\nlibdirs no\nlibdir=/y\nlibd /z\n",
        );
        assert_eq!(conf.text, "# mine\nghost-limit 5M\ntcp-close\nlibdirs no\n");
        assert_eq!(conf.libdirs, ["/opt/criu", "/x", "/y", "/z"].map(Path::new));
    }

    #[test]
    fn which_file_the_runtime_names() {
        let none = Spec::from_json(json!({}));
        let with = |v: &str| Spec::from_json(json!({"annotations": {ANNOTATION: v}}));
        let file = |kind, spec: &Spec, there: &'static [&'static str]| {
            let reader = ConfReader {
                kind,
                names_file: true,
                restore: true,
            };
            runtime_file(reader, spec, &|p| there.iter().any(|t| Path::new(t) == p))
                .map(|named| named.path().to_owned())
        };
        let both: &[&str] = &["/etc/criu/crun.conf", "/etc/criu/runc.conf"];
        assert_eq!(
            file(RuntimeKind::Crun, &none, both).unwrap(),
            Path::new("/etc/criu/crun.conf")
        );
        assert_eq!(
            file(RuntimeKind::Crun, &none, &["/etc/criu/runc.conf"]).unwrap(),
            Path::new("/etc/criu/runc.conf")
        );
        assert_eq!(
            file(RuntimeKind::Runc, &none, &["/etc/criu/crun.conf"]),
            None
        );
        assert_eq!(
            file(RuntimeKind::Runc, &with("/my.conf"), both).unwrap(),
            Path::new("/my.conf")
        );
        assert_eq!(file(RuntimeKind::Runc, &with(""), both), None);
        let old = |restore| ConfReader {
            kind: RuntimeKind::Crun,
            names_file: false,
            restore,
        };
        let named = |restore| runtime_file(old(restore), &with("/my.conf"), &|_| false);
        assert!(named(false).is_some() && named(true).is_none());
    }

    #[test]
    fn an_annotation_names_only_files_of_the_directories_that_are_configured() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("mine.conf");
        std::fs::write(&file, "tcp-close\n").unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
        let spec = |path: &Path| Spec::from_json(json!({"annotations": {ANNOTATION: path}}));
        let host = Host::at("/nowhere");
        let mut config = Config::default();
        let read = |config: &Config, path: &Path| {
            Named::Annotation(path.to_owned()).read(&config.ceiling(&host, &spec(path)))
        };
        for path in [&file, Path::new("/dev/zero")] {
            let e = read(&config, path).unwrap_err().to_string();
            assert!(
                e.contains("none of the directories for CRIU's configuration"),
                "{e}"
            );
            assert_eq!(
                runtime_text(RuntimeKind::Runc, &config.ceiling(&host, &spec(path))),
                None
            );
        }
        config.criu.config_directories.push(dir.path().into());
        assert_eq!(read(&config, &file).unwrap(), "tcp-close\n");
        config.criu.config_directories.push("/dev".into());
        let e = read(&config, Path::new("/dev/zero"))
            .unwrap_err()
            .to_string();
        assert!(
            e.contains("/dev/zero: cannot read") && e.contains("/dev/zero"),
            "{e}"
        );
    }
}
