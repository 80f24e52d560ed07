//! Reads credentials from the auth files of podman, skopeo and docker.

use std::collections::BTreeMap;
use std::env;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use crate::Error;

const MAX_FILE: u64 = 1 << 20;

#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    pub user: String,
    /// The password or token.
    pub password: String,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Credentials({}, ...)", self.user)
    }
}

impl Credentials {
    /// Parses `USER:PASSWORD`.
    pub fn parse(text: &str) -> Option<Self> {
        let (user, password) = text.split_once(':')?;
        (!user.is_empty()).then(|| Self {
            user: user.into(),
            password: password.into(),
        })
    }

    /// Returns the value of an `Authorization` header.
    pub(crate) fn basic(&self) -> String {
        let plain = format!("{}:{}", self.user, self.password);
        format!("Basic {}", STANDARD.encode(plain))
    }
}

/// The format of containers-auth.json(5) and docker's config.json.
#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct AuthFile {
    auths: BTreeMap<String, Entry>,
    cred_helpers: BTreeMap<String, String>,
    creds_store: Option<String>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Entry {
    auth: String,
    identitytoken: Option<String>,
}

/// Lists the auth files in search order: `$REGISTRY_AUTH_FILE` alone, else the user's and docker's.
fn files(explicit: Option<&Path>) -> (Vec<PathBuf>, bool) {
    let var = |name: &str| {
        env::var_os(name)
            .filter(|v| !v.is_empty())
            .map(PathBuf::from)
    };
    if let Some(path) = explicit
        .map(Path::to_owned)
        .or_else(|| var("REGISTRY_AUTH_FILE"))
    {
        return (vec![path], true);
    }
    let run = var("XDG_RUNTIME_DIR").map_or_else(
        || PathBuf::from(format!("/run/containers/{}", nix::unistd::getuid())),
        |dir| dir.join("containers"),
    );
    let docker = var("DOCKER_CONFIG").or_else(|| Some(var("HOME")?.join(".docker")));
    let mut files = vec![run.join("auth.json")];
    files.extend(docker.map(|dir| dir.join("config.json")));
    (files, false)
}

/// Finds the credentials for `REGISTRY/REPOSITORY`; `None` if none are stored. Fails if the explicit file cannot be
/// read, if any file is invalid, or if a helper program has the credentials.
pub fn find(
    explicit: Option<&Path>,
    registry: &str,
    repository: &str,
) -> Result<Option<Credentials>, Error> {
    let (files, named) = files(explicit);
    for path in files {
        let text = match read(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound && !named => continue,
            Err(source) => {
                return Err(Error::AuthFile {
                    path,
                    reason: source.to_string(),
                });
            }
        };
        let found = lookup(&text, registry, repository);
        if let Some(found) = found.map_err(|reason| Error::AuthFile { path, reason })? {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    File::open(path)?
        .take(MAX_FILE + 1)
        .read_to_end(&mut text)?;
    if text.len() as u64 > MAX_FILE {
        return Err(io::Error::other(format!("larger than {MAX_FILE} bytes")));
    }
    Ok(text)
}

/// Finds the most specific entry of a file: `registry/a/b`, `registry/a`, `registry`, and docker's URLs.
fn lookup(text: &[u8], registry: &str, repository: &str) -> Result<Option<Credentials>, String> {
    let file: AuthFile = serde_json::from_slice(text).map_err(|e| e.to_string())?;
    let whole = format!("{registry}/{repository}");
    let mut key = whole.as_str();
    loop {
        let plain = file.auths.get(key);
        let entry = plain.or_else(|| {
            let url = |(name, _): &(&String, &Entry)| normal(name) == key;
            file.auths.iter().find(url).map(|(_, entry)| entry)
        });
        if let Some(entry) = entry {
            if entry.identitytoken.as_ref().is_some_and(|t| !t.is_empty()) {
                return Err(format!(
                    "{key} has an identity token, which is not supported; log in with a password or token"
                ));
            }
            if !entry.auth.is_empty() {
                return decode(&entry.auth)
                    .map(Some)
                    .ok_or_else(|| format!("the entry {key} is not USER:PASSWORD in base64"));
            }
        }
        match key.rfind('/') {
            Some(at) => key = &key[..at],
            None => break,
        }
    }
    match file
        .cred_helpers
        .get(registry)
        .or(file.creds_store.as_ref())
    {
        Some(helper) if file.cred_helpers.contains_key(registry) || !file.auths.is_empty() => {
            Err(format!(
                "the credentials of {registry} are kept by docker-credential-{helper}, which is not asked; give them with --creds, or log in with `podman login`"
            ))
        }
        _ => Ok(None),
    }
}

/// Strips scheme and path version, as in docker's `https://index.docker.io/v1/`.
fn normal(key: &str) -> &str {
    let key = key
        .strip_prefix("https://")
        .or_else(|| key.strip_prefix("http://"))
        .unwrap_or(key)
        .trim_end_matches('/');
    let key = key
        .strip_suffix("/v1")
        .or_else(|| key.strip_suffix("/v2"))
        .unwrap_or(key);
    if key == "index.docker.io" {
        "docker.io"
    } else {
        key
    }
}

fn decode(auth: &str) -> Option<Credentials> {
    let text = String::from_utf8(STANDARD.decode(auth.trim()).ok()?).ok()?;
    Credentials::parse(text.trim_end_matches('\0'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"{"auths": {
        "r.example": {"auth": "dTpw"}, "r.example/team/app": {"auth": "dGVhbTpwOnE="},
        "https://index.docker.io/v1/": {"auth": "ZDpw"}, "bad.example": {"auth": "!"},
        "token.example": {"auth": "dTpw", "identitytoken": "x"}},
        "credHelpers": {"helper.example": "pass"}}"#;

    fn user(registry: &str, repository: &str) -> Result<Option<String>, String> {
        lookup(FILE.as_bytes(), registry, repository)
            .map(|c| c.map(|c| format!("{}/{}", c.user, c.password)))
    }

    #[test]
    fn the_most_specific_entry_counts() {
        assert_eq!(user("r.example", "other/app"), Ok(Some("u/p".into())));
        assert_eq!(user("r.example", "team/app"), Ok(Some("team/p:q".into())));
        assert_eq!(user("r.example", "team/app/x"), Ok(Some("team/p:q".into())));
        assert_eq!(user("r.example", "team/apps"), Ok(Some("u/p".into())));
        assert_eq!(user("docker.io", "library/x"), Ok(Some("d/p".into())));
        assert_eq!(user("none.example", "x"), Ok(None));
    }

    #[test]
    fn what_cannot_be_used_is_said() {
        assert!(
            user("bad.example", "x")
                .unwrap_err()
                .contains("bad.example")
        );
        assert!(
            user("token.example", "x")
                .unwrap_err()
                .contains("identity token")
        );
        assert!(
            user("helper.example", "x")
                .unwrap_err()
                .contains("docker-credential-pass")
        );
        assert!(lookup(b"{", "r", "x").is_err());
    }

    #[test]
    fn passwords_are_not_printed() {
        let credentials = Credentials::parse("me:secret").unwrap();
        assert!(!format!("{credentials:?}").contains("secret"));
    }
}
