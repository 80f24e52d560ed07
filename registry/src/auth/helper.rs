//! Asks credential helpers, the programs `docker-credential-NAME`, as docker and podman do: the registry's name on standard
//! input, JSON on standard output.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use cryopod_host::limited;
use serde::Deserialize;

use super::Login;

/// Time limit: a helper may ask a service on the network.
const LIMIT: Duration = Duration::from_secs(30);
/// The user name that marks a secret as an identity token.
const TOKEN_USER: &str = "<token>";
/// How docker's helpers say that they have nothing for a registry.
const NOTHING: &str = "credentials not found";

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct HelperAnswer {
    #[serde(default)]
    username: String,
    secret: String,
}

/// A helper has not answered.
#[derive(Debug, thiserror::Error)]
pub enum HelperError {
    #[error("{0}: the name of a helper has no `/`")]
    Name(String),
    #[error("{program}, which has the credentials of {registry}: {what}")]
    Program {
        program: String,
        registry: String,
        what: String,
    },
}

/// Asks a helper; `None` if it has nothing for this registry.
pub(super) fn ask(name: &str, registry: &str) -> Result<Option<Login>, HelperError> {
    if name.contains('/') {
        return Err(HelperError::Name(name.into()));
    }
    ask_program(&format!("docker-credential-{name}"), registry)
}

fn ask_program(program: &str, registry: &str) -> Result<Option<Login>, HelperError> {
    let wrong = |what: String| HelperError::Program {
        program: program.into(),
        registry: registry.into(),
        what,
    };
    let server = match registry {
        "docker.io" => "https://index.docker.io/v1/",
        other => other,
    };
    // A group of its own: what it starts ends with it.
    let mut command = Command::new(program);
    let command = command.arg("get").process_group(0).stderr(Stdio::null());
    let said = limited::run(command, Some(server.as_bytes()), LIMIT);
    let said = said.map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => {
            wrong("it is not installed; install it, or log in with `podman login`".into())
        }
        _ => wrong(e.to_string()),
    })?;
    let text = String::from_utf8_lossy(&said.stdout);
    if !said.status.success() {
        if text.contains(NOTHING) {
            return Ok(None);
        }
        let shown = crate::text::shortened(text.trim());
        return Err(wrong(format!("{}: {shown}", said.status)));
    }
    // The answer has a secret: it is in no message.
    let answer: HelperAnswer = serde_json::from_str(&text)
        .map_err(|_| wrong("its answer is not JSON with Username and Secret".into()))?;
    if answer.secret.is_empty() {
        return Ok(None);
    }
    Ok(Some(Login {
        identity_token: answer.username == TOKEN_USER,
        user: answer.username,
        password: answer.secret,
    }))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn it_gets_the_registry_and_answers() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("helper");
        let script = "#!/bin/sh\nread -r r\necho \"{\\\"Username\\\": \\\"$1\\\", \\\"Secret\\\": \\\"$r\\\"}\"\n";
        std::fs::write(&path, script).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let login = ask_program(path.to_str().unwrap(), "docker.io");
        let login = login.unwrap().unwrap();
        let index = "https://index.docker.io/v1/";
        assert_eq!((&login.user[..], &login.password[..]), ("get", index));
    }

    #[test]
    fn a_helper_that_is_not_there_is_named() {
        let said = |name| ask(name, "r.example").unwrap_err().to_string();
        let absent = said("no-such-helper");
        assert!(
            absent.contains("docker-credential-no-such-helper") && absent.contains("not installed"),
            "{absent}"
        );
        assert!(said("../x").contains("no `/`"));
    }
}
