//! Finds the engine that a user means, so that `-e` is needed only where two engines are possible.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::bail;
use clap::ValueEnum;
use cryopod_host::programs::{SystemTools, Tools};

use super::{Engine, EngineCall};

/// containerd's socket.
const SOCKET: &str = "/run/containerd/containerd.sock";
/// Time limit for a question.
const ASK: Duration = Duration::from_secs(30);
const ALL: [Engine; 3] = [Engine::Podman, Engine::Docker, Engine::Containerd];

impl Engine {
    /// Returns the engine that an archive names as its maker.
    pub fn named(maker: &str) -> Option<Self> {
        match maker {
            "podman" => Some(Self::Podman),
            "docker" => Some(Self::Docker),
            "containerd" | "containerd-ctr" => Some(Self::Containerd),
            _ => None,
        }
    }

    /// Returns the name of its program on PATH.
    pub fn program(self) -> &'static str {
        match self {
            Self::Podman => "podman",
            Self::Docker => "docker",
            Self::Containerd => "ctr",
        }
    }

    /// Asks for the id of a container. The error has the engine's reason: it has no such container, or does not answer.
    fn id_of(self, name: &str, namespace: &str) -> anyhow::Result<String> {
        // ctr waits long for a containerd that does not run.
        let socket =
            std::env::var_os("CONTAINERD_ADDRESS").map_or_else(|| SOCKET.into(), PathBuf::from);
        if self == Self::Containerd && !socket.exists() {
            bail!("it does not run: {} is missing", socket.display());
        }
        let call = EngineCall::new(self.program(), ASK);
        let said = match self {
            Self::Podman | Self::Docker => call
                .args(["container", "inspect", "--format", "{{.Id}}", "--", name])
                .run()?,
            Self::Containerd => call
                .args(["--namespace", namespace, "containers", "info", name])
                .run()
                .map(|_| name.to_owned())?,
        };
        Ok(said.trim().to_owned())
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value();
        f.write_str(value.as_ref().map_or("", |v| v.get_name()))
    }
}

/// Finds the one engine that knows a container.
pub fn knows(name: &str, namespace: &str) -> anyhow::Result<Engine> {
    let tools = SystemTools::from_env();
    let here = ALL
        .into_iter()
        .filter(|e| tools.find(e.program()).is_some());
    let answers = here.map(|engine| (engine, engine.id_of(name, namespace)));
    decide(name, namespace, answers.collect())
}

fn decide(
    name: &str,
    namespace: &str,
    answers: Vec<(Engine, anyhow::Result<String>)>,
) -> anyhow::Result<Engine> {
    let mut found: Vec<(Engine, String)> = Vec::new();
    let mut reasons = Vec::new();
    for (engine, answer) in answers {
        match answer {
            // podman's own command `docker` answers with podman's containers.
            Ok(id) if !found.iter().any(|(_, known)| *known == id) => found.push((engine, id)),
            Ok(_) => {}
            Err(e) => reasons.push(format!("{engine}: {e:#}")),
        }
    }
    match found[..] {
        [(engine, _)] => Ok(engine),
        [] if reasons.is_empty() => {
            bail!("{name}: neither podman nor docker nor ctr is installed, or not in PATH")
        }
        [] => bail!(
            "{name}: no engine knows this container (containerd was asked in the namespace {namespace}; --namespace names another): {}",
            reasons.join(" | ")
        ),
        _ => bail!(
            "{name}: {} know a container of this name: say which with --engine",
            names(found.iter().map(|(engine, _)| *engine))
        ),
    }
}

/// Finds the engine for an archive: the one that made it, if it is installed, else the only one that is.
pub fn fits(made_by: Option<&str>) -> anyhow::Result<Engine> {
    let tools = SystemTools::from_env();
    let here = ALL
        .into_iter()
        .filter(|e| tools.find(e.program()).is_some());
    choose(made_by, here.collect())
}

fn choose(made_by: Option<&str>, here: Vec<Engine>) -> anyhow::Result<Engine> {
    match (made_by.and_then(Engine::named), &here[..]) {
        (Some(engine), _) if here.contains(&engine) => Ok(engine),
        (_, [only]) => Ok(*only),
        (_, []) => bail!("neither podman nor docker nor ctr is installed, or not in PATH"),
        _ => bail!(
            "{} are installed, and the archive does not say which of them made it: say which with --engine",
            names(here.into_iter())
        ),
    }
}

fn names(engines: impl Iterator<Item = Engine>) -> String {
    let names: Vec<String> = engines.map(|e| e.to_string()).collect();
    names.join(" and ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_engine_that_knows_the_container() {
        let know = |id: &str| Ok(id.to_owned());
        let unknown = || Err(anyhow::anyhow!("no such container"));
        let decide = |answers| decide("job", "default", answers);
        let one = decide(vec![
            (Engine::Podman, unknown()),
            (Engine::Docker, know("a")),
        ]);
        assert_eq!(one.unwrap(), Engine::Docker);
        let alias = decide(vec![
            (Engine::Podman, know("a")),
            (Engine::Docker, know("a")),
        ]);
        assert_eq!(alias.unwrap(), Engine::Podman);
        let two = decide(vec![
            (Engine::Podman, know("a")),
            (Engine::Docker, unknown()),
            (Engine::Containerd, know("job")),
        ]);
        let two = two.unwrap_err().to_string();
        assert!(
            two.contains("podman and containerd know a container"),
            "{two}"
        );
        let none = decide(vec![(Engine::Podman, unknown())]).unwrap_err();
        assert!(none.to_string().contains("podman: no such container"));
        let bare = decide(Vec::new()).unwrap_err().to_string();
        assert!(bare.contains("nor ctr is installed"), "{bare}");
    }

    #[test]
    fn the_engine_for_an_archive() {
        use Engine::{Containerd, Docker, Podman};
        assert_eq!(
            choose(Some("docker"), vec![Podman, Docker]).unwrap(),
            Docker
        );
        assert_eq!(
            choose(Some("containerd-ctr"), vec![Podman, Containerd]).unwrap(),
            Containerd
        );
        assert_eq!(choose(Some("podman"), vec![Docker]).unwrap(), Docker);
        assert_eq!(choose(None, vec![Podman]).unwrap(), Podman);
        let several = choose(Some("cri-o"), vec![Podman, Docker]).unwrap_err();
        assert!(
            several
                .to_string()
                .contains("podman and docker are installed")
        );
        assert!(choose(None, Vec::new()).is_err());
    }
}
