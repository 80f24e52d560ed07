//! Finds the images of the checkpoint that a new container names.
//!
//! A directory of CRIU's images is used as it is. Archives and images in registries come through the host's cache:
//! `cryopod cache pull` brings them there and verifies them (docs/copies.md). Only what `restore.allow` has for the
//! container's tenant is opened, and a refusal says nothing of what exists or what others may have.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cryopod_archive::format::names;
use cryopod_archive::source::ArchivePlace;
use cryopod_host::files::bytes_below;
use cryopod_host::programs::{SystemTools, ToolError, Tools};
use nix::fcntl::{Flock, FlockArg};

use crate::config::Config;
use crate::config::restore::{Asker, REGISTRY, Rule};
use crate::config::tenant::Tenant;
use crate::images::owners;
use crate::images::place::{allowed, prune};

/// The command line, in whose cache archives are unpacked.
const PROGRAM: &str = "cryopod";
/// How often a checkpoint is pulled that another process removes from the cache before it is used.
const TRIES: usize = 3;

/// CRIU's images. They stay while this exists.
#[derive(Debug)]
pub struct SourceImages {
    directory: PathBuf,
    /// The lock on the checkpoint, against those that remove it from the cache or its place.
    _in_use: Option<Flock<File>>,
}

impl SourceImages {
    /// Returns the image directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }
}

/// A container's wish for a checkpoint.
#[derive(Debug, Clone, Copy)]
pub struct SourceRequest<'a> {
    /// An absolute path of an image directory or an archive, `oci:DIR[:NAME]`, `oci-archive:FILE[:NAME]`,
    /// `docker://REGISTRY/REPOSITORY:TAG` or `@DIGEST`.
    pub checkpoint: &'a str,
    /// By a variable of the container's process, which may be the image's.
    pub by_variable: bool,
    /// It is a directory of a place that the container may use.
    pub is_in_place: bool,
    pub tenant: &'a Tenant,
}

impl SourceRequest<'_> {
    fn asker(&self) -> Asker<'_> {
        Asker {
            tenant: self.tenant,
            by_variable: self.by_variable,
        }
    }

    fn not_allowed(&self, what: &str) -> String {
        self.asker().not_allowed(what, "restore.allow")
    }
}

/// Finds the images that a container wishes.
pub fn find(config: &Config, wish: SourceRequest<'_>) -> Result<SourceImages, String> {
    match wish.checkpoint.starts_with(REGISTRY) {
        true => image(config, wish),
        false => path(config, wish),
    }
}

fn image(config: &Config, wish: SourceRequest<'_>) -> Result<SourceImages, String> {
    let named = wish.checkpoint;
    let Some(rule) = rule_of(config, wish) else {
        return Err(wish.not_allowed("registry or repository"));
    };
    // The registry alone knows how much it is.
    let limit = config.limits.restore(0);
    cached(named.as_ref(), &rule.keys, limit)
}

/// Returns the first rule that has an image: by its registry, its repository or its whole name.
fn rule_of<'c>(config: &'c Config, wish: SourceRequest<'_>) -> Option<&'c Rule> {
    let named = wish.checkpoint;
    let below = |rule: &Rule| {
        let allowed = rule.from.trim_end_matches('/');
        let repository = allowed.strip_prefix(REGISTRY);
        // `host:5000` is another registry than `host`.
        let names_image = repository.is_some_and(|r| r.contains('/'));
        // A tag's rule is not for each digest of its repository.
        let image = repository.and_then(|r| r.rsplit('/').next());
        let is_whole = names_image && image.is_some_and(|i| i.contains([':', '@']));
        let after = match (names_image, is_whole) {
            (true, false) => &['/', ':', '@'][..],
            (true, true) => &[],
            (false, _) => &['/'],
        };
        let rest = named.strip_prefix(allowed);
        let is_below = |r: &str| r.starts_with(after) || r.is_empty() && names_image;
        repository.is_some() && rest.is_some_and(is_below)
    };
    let asker = wish.asker();
    asker.rules(&config.restore).find(|rule| below(rule))
}

fn path(config: &Config, wish: SourceRequest<'_>) -> Result<SourceImages, String> {
    let place = ArchivePlace::parse(wish.checkpoint);
    let allow: Vec<_> = wish
        .asker()
        .rules(&config.restore)
        .filter_map(Rule::directory)
        .collect();
    let real = match wish.is_in_place {
        true => place.path().canonicalize().map_err(|e| e.to_string())?,
        false => allowed(place.path(), &allow, || wish.not_allowed("directory"))?,
    };
    // Whoever can write there could exchange the images while they are read.
    owners::check(&real)?;
    if real.join(names::CRIU_INVENTORY).is_file() {
        if config.restore.require.is_some() {
            return Err("restore.require = \"signed\": images without an archive have no signature; pack and sign them, with --sign-by".into());
        }
        return Ok(SourceImages {
            _in_use: prune::hold(&real)?,
            directory: real,
        });
    }
    // By its real path, which is the one that was checked.
    let mut source = match real.is_dir() {
        true => OsString::from("oci:"),
        false => OsString::from("oci-archive:"),
    };
    source.push(&real);
    if let Some(image) = place.image() {
        source.push(":");
        source.push(image);
    }
    cached(&source, &[], limit_of(config, &real))
}

/// Returns how long an archive may take to be brought into the cache.
fn limit_of(config: &Config, archive: &Path) -> Duration {
    config.limits.restore(bytes_below(archive))
}

/// Brings a checkpoint into the cache, unless it is there, and holds it.
fn cached(source: &OsStr, keys: &[PathBuf], limit: Duration) -> Result<SourceImages, String> {
    let tools = SystemTools::from_env();
    let beside = std::env::current_exe().ok();
    let beside = beside.and_then(|exe| Some(exe.parent()?.join(PROGRAM)));
    let program = beside
        .filter(|p| p.is_file())
        .or_else(|| tools.find(PROGRAM));
    let program = program.ok_or_else(|| {
        format!("the program {PROGRAM} is neither beside the runtime nor on PATH: install it")
    })?;
    let mut args = ["cache", "pull", "--quiet"].map(OsStr::new).to_vec();
    for key in keys {
        args.extend([OsStr::new("--signed-by"), key.as_os_str()]);
    }
    args.extend([OsStr::new("--"), source]);
    for _ in 0..TRIES {
        let out = tools.output(&program, &args, limit).map_err(unfinished)?;
        if out.code != 0 {
            let said = out.stderr.trim();
            let why = said.rsplit_once("Error: ").map_or(said, |(_, why)| why);
            return Err(why.to_owned());
        }
        let directory = PathBuf::from(out.stdout.trim_end());
        match held(&directory) {
            Ok(lock) if directory.is_dir() => {
                return Ok(SourceImages {
                    directory,
                    _in_use: Some(lock),
                });
            }
            _ => tracing::info!("{}: removed from the cache meanwhile", directory.display()),
        }
    }
    Err("it was removed from the cache again and again: raise cache.max_gib".into())
}

fn unfinished(e: ToolError) -> String {
    let is_late = matches!(e, ToolError::Timeout { .. });
    let remedy = match is_late {
        true => "; raise limits.restore_s, or run this before",
        false => "",
    };
    format!("{e}{remedy}")
}

/// Locks the checkpoint of an image directory in the cache, so that nobody removes it.
fn held(images: &Path) -> std::io::Result<Flock<File>> {
    let checkpoint = images.parent().unwrap_or(images);
    let lock = Flock::lock(File::open(checkpoint)?, FlockArg::LockSharedNonblock);
    lock.map_err(|(_, e)| e.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::restore;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn images_are_roots_alone() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let (images, pages) = (root.join("c1"), root.join("c1/pages-1.img"));
        fs::create_dir(&images).unwrap();
        fs::write(images.join(names::CRIU_INVENTORY), "").unwrap();
        fs::write(&pages, "").unwrap();
        let rule = Rule {
            from: root.to_str().unwrap().to_owned(),
            ..Rule::default()
        };
        let config = config(vec![rule]);
        let ask = || {
            let checkpoint = images.to_str().unwrap();
            let wish = SourceRequest {
                checkpoint,
                by_variable: false,
                is_in_place: false,
                tenant: &Tenant::Root,
            };
            find(&config, wish)
        };
        for path in [&images, &images.join(names::CRIU_INVENTORY), &pages] {
            fs::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
        }
        assert_eq!(ask().unwrap().directory(), images);
        fs::set_permissions(&pages, Permissions::from_mode(0o666)).unwrap();
        let said = ask().unwrap_err();
        assert!(said.contains("pages-1.img is not root's alone"), "{said}");
    }

    #[test]
    fn a_large_archive_has_more_time_and_a_late_one_names_the_limit() {
        let archive = tempfile::NamedTempFile::new().unwrap();
        let limit = || limit_of(&Config::default(), archive.path()).as_secs();
        assert_eq!(limit(), 900);
        archive.as_file().set_len(1 << 40).unwrap();
        assert_eq!(limit(), (1 << 20) / 50);
        let said = unfinished(ToolError::Timeout {
            program: PROGRAM.into(),
            args: "cache pull".into(),
            limit: Duration::from_secs(900),
        });
        assert!(said.contains("cache pull: no answer within 900s"), "{said}");
        assert!(said.contains("limits.restore_s"), "{said}");
    }

    fn config(rules: Vec<Rule>) -> Config {
        Config {
            restore: restore::RestoreOptions {
                allow: rules,
                ..restore::RestoreOptions::default()
            },
            ..Config::default()
        }
    }

    #[test]
    fn only_allowed_repositories() {
        for (allow, named) in [
            ("docker://r.example", "docker://r.example.evil/a:1"),
            ("docker://r.example", "docker://r.example:5000/a:1"),
            ("docker://r.example/team", "docker://r.example/teams/a:1"),
            ("docker://r.example/team/", "docker://r.example/other:1"),
            ("docker://r.example/a:1", "docker://r.example/a:12"),
            ("docker://r.example/a:1", "docker://r.example/a:1@sha256:0"),
            ("docker://r.example/a:1", "docker://r.example/a:2"),
            ("docker://r.example", "docker://r.example"),
            ("/srv", "docker://r.example/a:1"),
        ] {
            let rule = Rule {
                from: allow.into(),
                ..Rule::default()
            };
            let wish = SourceRequest {
                checkpoint: named,
                by_variable: false,
                is_in_place: false,
                tenant: &Tenant::Root,
            };
            let said = find(&config(vec![rule]), wish).unwrap_err();
            assert!(
                said.contains("that is not allowed"),
                "{allow} {named}: {said}"
            );
        }
    }

    #[test]
    fn a_rule_has_a_registry_a_repository_or_an_image() {
        for (allow, named) in [
            ("docker://r.example", "docker://r.example/a:1"),
            ("docker://r.example/team/", "docker://r.example/team/a:1"),
            ("docker://r.example/a", "docker://r.example/a:1"),
            ("docker://r.example/a:1", "docker://r.example/a:1"),
            (
                "docker://r.example/a@sha256:00",
                "docker://r.example/a@sha256:00",
            ),
        ] {
            let rule = Rule {
                from: allow.into(),
                ..Rule::default()
            };
            let wish = SourceRequest {
                checkpoint: named,
                by_variable: false,
                is_in_place: false,
                tenant: &Tenant::Root,
            };
            assert!(
                rule_of(&config(vec![rule]), wish).is_some(),
                "{allow} {named}"
            );
        }
    }

    /// A refusal is the same whether the checkpoint exists and whether another tenant may have it.
    #[test]
    fn a_refusal_says_nothing_of_others() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        fs::create_dir_all(root.join("b/real")).unwrap();
        let rule = |from: &str, namespace: &str| Rule {
            from: from.into(),
            who: Some(restore::Who {
                kubernetes: vec![namespace.into()],
                ..restore::Who::default()
            }),
            ..Rule::default()
        };
        let of_b = root.join("b");
        let rules = vec![
            rule("docker://r.example/a", "a"),
            rule("docker://r.example/b", "b"),
            rule(of_b.to_str().unwrap(), "b"),
        ];
        let config = config(rules);
        let ask = |checkpoint: &str, by_variable| {
            let tenant = &Tenant::Pod(Some("a".into()));
            let wish = SourceRequest {
                checkpoint,
                is_in_place: false,
                by_variable,
                tenant,
            };
            find(&config, wish).unwrap_err()
        };
        let path = |name: &str| root.join(name).to_str().unwrap().to_owned();
        for (one, other) in [
            (path("b/real"), path("b/none")),
            (path("b/real"), path("c/none")),
            (
                format!("oci:{}", path("b/real")),
                format!("oci:{}", path("b/none:x")),
            ),
            (
                "docker://r.example/b/x:1".into(),
                "docker://r.example/c/x:1".into(),
            ),
        ] {
            for by_variable in [false, true] {
                let said = ask(&one, by_variable);
                assert!(said.contains("kubernetes = [\"a\"]"), "{said}");
                assert_eq!(said.contains("variable = true"), by_variable, "{said}");
                assert_eq!(said, ask(&other, by_variable), "{one} {other}");
            }
        }
        // Its own repository, but by a variable, which an image may have set.
        let said = ask("docker://r.example/a/x:1", true);
        assert!(said.contains("variable = true"), "{said}");
    }
}
