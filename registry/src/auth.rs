//! Finds credentials as podman, skopeo and docker do: in their auth files, or from the credential helpers that these name.

mod helper;

use std::collections::BTreeMap;
use std::env;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use cryopod_host::files::read_bounded;
use serde::Deserialize;

use self::helper::HelperError;
use crate::Error;

const MAX_FILE: u64 = 1 << 20;

#[derive(Clone, PartialEq, Eq)]
pub struct Login {
    pub user: String,
    /// The password or token.
    pub password: String,
    /// The password is an identity token: the registry's token service gives access for it.
    pub identity_token: bool,
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Credentials({}, ...)", self.user)
    }
}

impl Login {
    /// Parses `USER:PASSWORD`.
    pub fn parse(text: &str) -> Option<Self> {
        let (user, password) = text.split_once(':')?;
        (!user.is_empty()).then(|| Self {
            user: user.into(),
            password: password.into(),
            identity_token: false,
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
    auths: BTreeMap<String, AuthEntry>,
    cred_helpers: BTreeMap<String, String>,
    creds_store: Option<String>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct AuthEntry {
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
/// read, if any file is invalid, or if a helper that it names fails.
pub fn find(
    explicit: Option<&Path>,
    registry: &str,
    repository: &str,
) -> Result<Option<Login>, Error> {
    let (files, named) = files(explicit);
    for path in files {
        let text = match read_bounded(&path, MAX_FILE) {
            Err(e) if e.kind() == io::ErrorKind::NotFound && !named => continue,
            read => read.map_err(LoginError::Read),
        };
        let found = text.and_then(|text| lookup(&text, registry, repository, &helper::ask));
        if let Some(found) = found.map_err(|reason| Error::AuthFile { path, reason })? {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// Why an auth file gives no login: an error, not a registry that it does not name.
#[derive(Debug, thiserror::Error)]
pub enum LoginError {
    #[error(transparent)]
    Read(io::Error),
    #[error(transparent)]
    Syntax(#[from] serde_json::Error),
    #[error("the entry {0} is not USER:PASSWORD in base64")]
    Entry(String),
    #[error(transparent)]
    Helper(#[from] HelperError),
}

type AuthQuestion<'a> = &'a dyn Fn(&str, &str) -> Result<Option<Login>, HelperError>;

/// Finds the most specific entry of a file: `registry/a/b`, `registry/a`, `registry`, and docker's URLs. A helper of this
/// registry comes first, and the helper of all registries last.
fn lookup(
    text: &[u8],
    registry: &str,
    repository: &str,
    ask: AuthQuestion<'_>,
) -> Result<Option<Login>, LoginError> {
    let file: AuthFile = serde_json::from_slice(text)?;
    let mut own = file.cred_helpers.iter();
    if let Some((_, helper)) = own.find(|(name, _)| normal(name) == registry)
        && let Some(found) = ask(helper, registry)?
    {
        return Ok(Some(found));
    }
    let whole = format!("{registry}/{repository}");
    let mut key = whole.as_str();
    // Logins that a helper keeps have an empty entry.
    let mut named = false;
    loop {
        let plain = file.auths.get(key);
        let entry = plain.or_else(|| {
            let url = |(name, _): &(&String, &AuthEntry)| normal(name) == key;
            file.auths.iter().find(url).map(|(_, entry)| entry)
        });
        if let Some(entry) = entry {
            named = true;
            if let Some(token) = entry.identitytoken.as_ref().filter(|t| !t.is_empty()) {
                return Ok(Some(Login {
                    user: decode(&entry.auth).map(|c| c.user).unwrap_or_default(),
                    password: token.clone(),
                    identity_token: true,
                }));
            }
            if !entry.auth.is_empty() {
                return decode(&entry.auth)
                    .map(Some)
                    .ok_or_else(|| LoginError::Entry(key.into()));
            }
        }
        match key.rfind('/') {
            Some(at) => key = &key[..at],
            None => break,
        }
    }
    let Some(store) = file.creds_store.as_ref().filter(|s| !s.is_empty()) else {
        return Ok(None);
    };
    match ask(store, registry) {
        // No login names this registry: it may need none.
        Err(why) if !named => {
            tracing::warn!("{why}; it goes on without credentials");
            Ok(None)
        }
        answer => Ok(answer?),
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

fn decode(auth: &str) -> Option<Login> {
    let text = String::from_utf8(STANDARD.decode(auth.trim()).ok()?).ok()?;
    Login::parse(text.trim_end_matches('\0'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"{"auths": {
        "r.example": {"auth": "dTpw"}, "r.example/team/app": {"auth": "dGVhbTpwOnE="},
        "https://index.docker.io/v1/": {"auth": "ZDpw"}, "bad.example": {"auth": "!"},
        "token.example": {"auth": "dTpw", "identitytoken": "x"}, "both.example": {"auth": "dTpw"}, "kept.example": {}},
        "credHelpers": {"helper.example": "pass", "https://both.example": "none", "broken.example": "fails"},
        "credsStore": "all"}"#;

    fn fails(_: &str, _: &str) -> Result<Option<Login>, HelperError> {
        Err(HelperError::Name("fails".into()))
    }

    fn user(registry: &str, repository: &str) -> Result<Option<String>, String> {
        let ask = |helper: &str, registry: &str| match helper {
            "none" => Ok(None),
            "fails" => fails(helper, registry),
            _ => Ok(Some(Login {
                user: helper.into(),
                password: registry.into(),
                identity_token: false,
            })),
        };
        let found = lookup(FILE.as_bytes(), registry, repository, &ask);
        let found = found.map_err(|e| e.to_string())?;
        Ok(found.map(|c| format!("{}/{}", c.user, c.password)))
    }

    #[test]
    fn the_most_specific_entry_counts() {
        assert_eq!(user("r.example", "other/app"), Ok(Some("u/p".into())));
        assert_eq!(user("r.example", "team/app"), Ok(Some("team/p:q".into())));
        assert_eq!(user("r.example", "team/app/x"), Ok(Some("team/p:q".into())));
        assert_eq!(user("r.example", "team/apps"), Ok(Some("u/p".into())));
        assert_eq!(user("docker.io", "library/x"), Ok(Some("d/p".into())));
    }

    #[test]
    fn helpers_are_asked() {
        let ok = |text: &str| Ok(Some(text.to_owned()));
        // Its own helper, before its entry; one without an answer leaves it to the entry.
        assert_eq!(user("helper.example", "x"), ok("pass/helper.example"));
        assert_eq!(user("both.example", "x"), ok("u/p"));
        assert!(user("broken.example", "x").unwrap_err().contains("fails"));
        // The helper of all, also for a login that is only in it.
        assert_eq!(user("none.example", "x"), ok("all/none.example"));
        assert_eq!(user("kept.example", "x"), ok("all/kept.example"));
        let broken = r#"{"auths": {"a.example": {}}, "credsStore": "fails"}"#.as_bytes();
        assert!(lookup(broken, "a.example", "x", &fails).is_err());
        assert_eq!(lookup(broken, "b.example", "x", &fails).unwrap(), None);
    }

    #[test]
    fn an_identity_token_is_no_password() {
        let no = |_: &str, _: &str| Ok(None);
        let found = lookup(FILE.as_bytes(), "token.example", "x", &no);
        let found = found.unwrap().unwrap();
        assert!(found.identity_token);
        assert_eq!((found.user.as_str(), found.password.as_str()), ("u", "x"));
    }

    #[test]
    fn what_cannot_be_used_is_said() {
        assert!(
            user("bad.example", "x")
                .unwrap_err()
                .contains("bad.example")
        );
        assert!(lookup(b"{", "r", "x", &|_, _| Ok(None)).is_err());
    }

    #[test]
    fn passwords_are_not_printed() {
        let credentials = Login::parse("me:secret").unwrap();
        assert!(!format!("{credentials:?}").contains("secret"));
    }
}
