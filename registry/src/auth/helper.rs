//! Asks credential helpers, the programs `docker-credential-NAME`, as docker and podman do: the registry's name on standard
//! input, JSON on standard output.

use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use serde::Deserialize;

use super::Login;

/// Time limit: a helper may ask a service on the network.
const LIMIT: Duration = Duration::from_secs(30);
/// Largest answer, in bytes.
const MAX_ANSWER: u64 = 256 << 10;
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

/// Asks a helper; `None` if it has nothing for this registry.
pub(super) fn ask(name: &str, registry: &str) -> Result<Option<Login>, String> {
    within(name, registry, LIMIT)
}

fn within(name: &str, registry: &str, limit: Duration) -> Result<Option<Login>, String> {
    let program = format!("docker-credential-{name}");
    let wrong =
        |what: String| format!("{program}, which has the credentials of {registry}: {what}");
    if name.contains('/') {
        return Err(wrong("the name of a helper has no `/`".into()));
    }
    let server = match registry {
        "docker.io" => "https://index.docker.io/v1/",
        other => other,
    };
    let (code, text) = run(&program, server, limit).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => {
            wrong("it is not installed; install it, or log in with `podman login`".into())
        }
        io::ErrorKind::TimedOut => wrong(format!(
            "no answer within {} s; it was ended",
            limit.as_secs()
        )),
        _ => wrong(e.to_string()),
    })?;
    if code != 0 {
        if text.contains(NOTHING) {
            return Ok(None);
        }
        let said = crate::text::shortened(text.trim());
        return Err(wrong(format!("it failed with {code}: {said}")));
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

/// Returns exit code and output.
fn run(program: &str, input: &str, limit: Duration) -> io::Result<(i32, String)> {
    let mut child = Command::new(program)
        .arg("get")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        // A group of its own: what it starts ends with it.
        .process_group(0)
        .spawn()?;
    let group = nix::unistd::Pid::from_raw(i32::try_from(child.id()).unwrap_or(0));
    if let Some(mut stdin) = child.stdin.take() {
        // A helper that reads nothing answers nothing of use either.
        let _ = stdin.write_all(input.as_bytes());
    }
    let stdout = child.stdout.take();
    let (send, answer) = mpsc::channel();
    thread::spawn(move || {
        let mut text = Vec::new();
        if let Some(stdout) = stdout {
            let _ = stdout.take(MAX_ANSWER).read_to_end(&mut text);
        }
        let status = child.wait();
        let _ = send.send(status.map(|s| (s.code().unwrap_or(-1), text)));
    });
    match answer.recv_timeout(limit) {
        Ok(done) => done.map(|(code, text)| (code, String::from_utf8_lossy(&text).into_owned())),
        Err(_) => {
            if group.as_raw() > 1 {
                let _ = nix::sys::signal::killpg(group, nix::sys::signal::Signal::SIGKILL);
            }
            Err(io::ErrorKind::TimedOut.into())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// Names a helper by its path, which `docker-credential-` in front of it cannot: through a directory of that name.
    fn with_helper<T>(script: &str, test: impl FnOnce(&str) -> T) -> T {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("helper");
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        test(path.to_str().unwrap())
    }

    #[test]
    fn it_gets_the_registry_and_may_answer_anything() {
        let long = Duration::from_secs(20);
        let (code, text) = with_helper("read -r r; echo \"$1 $r\"; exit 3", |p| {
            run(p, "r.example", long).unwrap()
        });
        assert_eq!((code, text.as_str()), (3, "get r.example\n"));
        let slow = with_helper("sleep 1000 & sleep 1000", |p| {
            run(p, "r", Duration::from_millis(200)).unwrap_err().kind()
        });
        assert_eq!(slow, io::ErrorKind::TimedOut);
        let much = with_helper("cat /dev/zero", |p| run(p, "r", long).unwrap());
        assert_eq!(much.1.len() as u64, MAX_ANSWER);
    }

    #[test]
    fn a_helper_that_is_not_there_is_named() {
        let error = ask("no-such-helper", "r.example").unwrap_err();
        assert!(
            error.contains("docker-credential-no-such-helper"),
            "{error}"
        );
        assert!(error.contains("not installed"), "{error}");
        assert!(ask("../x", "r.example").unwrap_err().contains("no `/`"));
    }
}
