//! Finds the low-level runtime: runc, crun, or one that takes their command line.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use cryopod_gpu_plan::gpus::own_nodes;
use cryopod_host::files::Host;
use cryopod_host::programs::{SystemTools, Tools};
use cryopod_host::spec::Spec;

use crate::config::Config;
use crate::error::LowLevelError;

/// Environment variable that names the low-level runtime where the configuration does not.
pub const ENV: &str = "CRYOPOD_LOW_LEVEL_RUNTIME";

/// Whose command line the low-level runtime takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RuntimeKind {
    Crun,
    /// runc's (Go flags); also assumed for a runtime of another name.
    Runc,
}

impl RuntimeKind {
    /// Returns the directory for the containers' state where the command line names none. runc's root user has it in
    /// /run, crun's has not (`get_run_directory` of crun's utils, `shouldHonorXDGRuntimeDir` of runc).
    pub fn default_root(self) -> PathBuf {
        let own = std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty());
        self.root_in(own.as_deref().map(Path::new), is_a_user())
    }

    fn root_in(self, runtime_dir: Option<&Path>, is_a_user: bool) -> PathBuf {
        let run = Path::new("/run");
        match self {
            Self::Crun => runtime_dir.unwrap_or(run).join("crun"),
            Self::Runc => (runtime_dir.filter(|_| is_a_user))
                .unwrap_or(run)
                .join("runc"),
        }
    }
}

/// Whether runc takes this process for a user's: not root, or root of a user namespace under another name.
fn is_a_user() -> bool {
    let named_root = || std::env::var_os("USER").is_some_and(|user| user == "root");
    let within = || own_nodes::in_user_namespace(&Host::system(), &Spec::default());
    !nix::unistd::geteuid().is_root() || within() && !named_root()
}

/// The low-level runtime.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LowLevel {
    /// The name as given: becomes `argv[0]`, so that its messages read as when it is called directly.
    pub name: OsString,
    pub path: PathBuf,
    pub kind: RuntimeKind,
}

impl LowLevel {
    /// Finds it: the configuration, then the environment variable [`ENV`], then crun, then runc on PATH.
    pub fn find(config: &Config) -> Result<Self, LowLevelError> {
        let env = std::env::var(ENV).ok().filter(|v| !v.is_empty());
        Self::search(
            config.runtime.low_level.as_deref(),
            env.as_deref(),
            &SystemTools::from_env(),
        )
    }

    /// Finds it where these two name it: [`Self::find`] for another configuration or another process's environment.
    pub fn search(
        config: Option<&str>,
        env: Option<&str>,
        tools: &dyn Tools,
    ) -> Result<Self, LowLevelError> {
        let named = config
            .map(|n| (n, "runtime.low_level in the configuration"))
            .or(env.map(|n| (n, ENV)));
        let (name, path) = match named {
            Some((name, origin)) => {
                let path = tools.find(name).ok_or_else(|| LowLevelError::Named {
                    name: name.to_owned(),
                    origin: origin.to_owned(),
                })?;
                (name, path)
            }
            None => ["crun", "runc"]
                .into_iter()
                .find_map(|n| Some((n, tools.find(n)?)))
                .ok_or(LowLevelError::None)?,
        };
        if same_file(&path, Path::new("/proc/self/exe")) {
            return Err(LowLevelError::Myself(path));
        }
        Ok(Self {
            kind: kind_of(&path),
            name: name.into(),
            path,
        })
    }

    /// Returns the name of its file, for messages.
    pub fn label(&self) -> String {
        self.path
            .file_name()
            .unwrap_or(OsStr::new("runtime"))
            .to_string_lossy()
            .into_owned()
    }
}

fn same_file(a: &Path, b: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    matches!((a.metadata(), b.metadata()), (Ok(x), Ok(y)) if (x.dev(), x.ino()) == (y.dev(), y.ino()))
}

/// Returns `Crun` if the name says so, or if it is a link to a file whose name does.
fn kind_of(path: &Path) -> RuntimeKind {
    let says_crun = |p: &Path| {
        p.file_name()
            .is_some_and(|n| n.to_string_lossy().contains("crun"))
    };
    if says_crun(path) || path.canonicalize().is_ok_and(|p| says_crun(&p)) {
        RuntimeKind::Crun
    } else {
        RuntimeKind::Runc
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryopod_host::programs::{Output, ToolError};

    struct Has(&'static [&'static str]);
    impl Tools for Has {
        fn find(&self, name: &str) -> Option<PathBuf> {
            self.0.contains(&name).then(|| {
                if name.contains('/') {
                    name.into()
                } else {
                    Path::new("/usr/bin").join(name)
                }
            })
        }
        fn output(
            &self,
            _: &Path,
            _: &[&OsStr],
            _: std::time::Duration,
        ) -> Result<Output, ToolError> {
            unreachable!("finding a runtime runs nothing")
        }
    }

    #[test]
    fn a_state_directory_is_where_the_runtime_has_it() {
        use RuntimeKind::{Crun, Runc};
        let own = Some(Path::new("/run/user/0"));
        for (kind, own, is_a_user, want) in [
            (Crun, None, false, "/run/crun"),
            (Crun, own, false, "/run/user/0/crun"),
            (Crun, own, true, "/run/user/0/crun"),
            (Runc, None, true, "/run/runc"),
            (Runc, own, false, "/run/runc"),
            (Runc, own, true, "/run/user/0/runc"),
        ] {
            assert_eq!(kind.root_in(own, is_a_user), Path::new(want));
        }
    }

    #[test]
    fn order() {
        let find =
            |config, env, has| LowLevel::search(config, env, &Has(has)).map(|l| (l.path, l.kind));
        let all = &["crun", "runc", "/opt/runc"];
        assert_eq!(
            find(None, None, all).unwrap(),
            ("/usr/bin/crun".into(), RuntimeKind::Crun)
        );
        assert_eq!(
            find(None, None, &["runc"]).unwrap(),
            ("/usr/bin/runc".into(), RuntimeKind::Runc)
        );
        assert_eq!(
            find(None, Some("runc"), all).unwrap().0,
            Path::new("/usr/bin/runc")
        );
        assert_eq!(
            find(Some("/opt/runc"), Some("crun"), all).unwrap().0,
            Path::new("/opt/runc")
        );
        let e = |config, env, has| find(config, env, has).unwrap_err().to_string();
        assert!(e(None, None, &[]).contains("neither crun nor runc"));
        assert!(
            e(Some("kata"), None, all).contains(
                "\"kata\" (runtime.low_level in the configuration) was not found on PATH"
            )
        );
        assert!(
            e(None, Some("/x/crun"), all).contains("CRYOPOD_LOW_LEVEL_RUNTIME) was not found;")
        );
    }

    #[test]
    fn itself_is_refused() {
        let me = std::env::current_exe().unwrap();
        let e = LowLevel::search(me.to_str(), None, &SystemTools::from_env()).unwrap_err();
        assert!(matches!(e, LowLevelError::Myself(_)));
    }
}
