//! What the steps of a migration are for each engine.

use std::io::{self, Write};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use cryopod_archive::source::Source;
use serde_json::{Value, json};

use super::{ARCHIVE, ASK, Move, State, quoted};
use crate::archives::bundle;
use crate::engines::engine::{Engine, EngineCall};
use crate::engines::export::containerd::write_image;
use crate::store::stores;

/// This program.
const CRYOPOD: &str = "/proc/self/exe";
/// Time for a killed container to end.
const END: Duration = Duration::from_secs(60);

/// What the container needs on the other host.
#[derive(Default)]
pub struct Needs {
    /// Its image, by the name that the other engine gets, and by its digest.
    image: String,
    digest: String,
    /// podman's archive has it: the other host has none of this name, or another one.
    with_image: bool,
    /// The engine's description of the container.
    inspected: Value,
    /// Sources of bind mounts.
    pub paths: Vec<String>,
    pub volumes: Vec<String>,
}

impl Engine {
    /// Returns the name of a container that its user may have named by its id.
    pub fn full_name(self, container: &str) -> anyhow::Result<String> {
        if self == Self::Containerd {
            return Ok(container.to_owned());
        }
        let args = ["container", "inspect", "--format", "{{.Name}}", "--"];
        let call = EngineCall::new(self.program(), ASK).args(args);
        let name = call.args([container]).run()?;
        Ok(name.trim().trim_start_matches('/').to_owned())
    }
}

impl Move {
    fn ctr(&self) -> EngineCall {
        EngineCall::new("ctr", self.limit()).args(["--namespace", &self.namespace])
    }

    fn call<'a>(&self, args: impl IntoIterator<Item = &'a str>) -> anyhow::Result<String> {
        match self.engine {
            Engine::Containerd => self.ctr().args(args).run(),
            engine => EngineCall::new(engine.program(), self.limit())
                .args(args)
                .run(),
        }
    }

    /// The engine on the other host.
    fn program(&self) -> String {
        match self.engine {
            Engine::Containerd => format!("ctr --namespace {}", self.namespace),
            engine => engine.program().to_owned(),
        }
    }

    /// The image of ctr's checkpoint, on both hosts.
    fn image(&self) -> String {
        format!("localhost/cryopod-migrate:{}", self.token())
    }

    // ---- commands for the other host

    /// Succeeds if the engine has a container of this name.
    pub fn known(&self) -> String {
        match self.engine {
            Engine::Containerd => format!("{} containers info {}", self.program(), self.name),
            _ => format!("{} container inspect {}", self.program(), self.name),
        }
    }

    /// Prints `true` or `RUNNING` if the container runs.
    pub fn running(&self) -> String {
        let (program, name) = (self.program(), &self.name);
        match self.engine {
            Engine::Containerd => {
                format!("{program} tasks ls | awk '$1 == \"{name}\" {{print $3}}'")
            }
            _ => format!("{program} container inspect --format '{{{{.State.Running}}}}' {name}"),
        }
    }

    /// Prints the names of all containers. It fails if the engine does not answer.
    pub fn list(&self) -> String {
        let program = self.program();
        match self.engine {
            Engine::Containerd => format!("{program} tasks ls -q && {program} containers ls -q"),
            _ => format!("{program} ps --all --format '{{{{.Names}}}}'"),
        }
    }

    /// Starts the container from its checkpoint.
    pub fn start(&self) -> String {
        let (program, name) = (self.program(), &self.name);
        match self.engine {
            Engine::Podman => format!(
                "cryopod import {}/{ARCHIVE} --engine podman --restore --quiet",
                self.there()
            ),
            Engine::Docker => format!("{program} start --checkpoint {} {name}", self.token()),
            Engine::Containerd => format!(
                "{program} containers restore --rw --live {name} {}",
                self.image()
            ),
        }
    }

    /// Removes what there is of it.
    pub fn undo(&self) -> String {
        let (program, name) = (self.program(), &self.name);
        match self.engine {
            Engine::Podman => format!("{program} rm --force --time 0 {name}"),
            Engine::Docker => format!("{program} rm --force {name}"),
            Engine::Containerd => format!(
                "{program} tasks delete --force {name}; {program} containers rm {name}; {}",
                self.tidy()
            ),
        }
    }

    /// Removes what a running container does not need.
    pub fn tidy(&self) -> String {
        let program = self.program();
        match self.engine {
            Engine::Podman => "true".into(),
            Engine::Docker => format!("{program} checkpoint rm {} {}", self.name, self.token()),
            Engine::Containerd => format!("{program} images rm --sync {}", self.image()),
        }
    }

    // ---- here

    /// Asks the engine what the container needs.
    pub fn needs(&self) -> anyhow::Result<Needs> {
        let mut needs = Needs::default();
        if self.engine == Engine::Containerd {
            let info: Value =
                serde_json::from_str(&self.call(["containers", "info", &self.name])?)
                    .context("ctr containers info: not JSON")?;
            needs.image = info["Image"].as_str().unwrap_or_default().to_owned();
            needs.digest = digest(&self.call(["images", "ls"])?, &needs.image);
            let mounts = info["Spec"]["mounts"].as_array().into_iter().flatten();
            needs.paths = mounts
                .filter(|mount| mount["type"] == "bind")
                .filter_map(|mount| Some(mount["source"].as_str()?.to_owned()))
                .collect();
            return Ok(needs);
        }
        let said = self.call(["container", "inspect", &self.name])?;
        let said: Value = serde_json::from_str(&said).context("container inspect: not JSON")?;
        let said = said[0].clone();
        let name = match self.engine {
            Engine::Docker => &said["Config"]["Image"],
            _ => &said["ImageName"],
        };
        needs.image = name.as_str().unwrap_or_default().to_owned();
        needs.digest = said["Image"].as_str().unwrap_or_default().to_owned();
        for mount in said["Mounts"].as_array().into_iter().flatten() {
            let text = |key: &str| mount[key].as_str().unwrap_or_default().to_owned();
            match mount["Type"].as_str() {
                Some("bind") => needs.paths.push(text("Source")),
                // podman's archive has its volumes.
                Some("volume") if self.engine == Engine::Docker => needs.volumes.push(text("Name")),
                _ => {}
            }
        }
        needs.inspected = said;
        Ok(needs)
    }

    /// Asks the engine for the container's state.
    pub fn state(&self) -> anyhow::Result<State> {
        if self.engine == Engine::Containerd {
            let tasks = self.call(["tasks", "ls"])?;
            let mut lines = tasks.lines().map(|l| l.split_whitespace());
            let mut own = lines.find_map(|mut words| (words.next()? == self.name).then_some(words));
            let pid = own.as_mut().and_then(Iterator::next).unwrap_or_default();
            return Ok(match own.and_then(|mut words| words.next()) {
                Some("RUNNING") => State::Running(pid.parse()?),
                Some("PAUSED") => State::Paused,
                Some(_) => State::Stopped,
                None => State::Missing,
            });
        }
        let format = "{{.State.Paused}} {{.State.Running}} {{.State.Pid}}";
        let said = self.call(["container", "inspect", "--format", format, &self.name]);
        let said = match said {
            // No container, or an engine that does not answer?
            Err(e) => {
                let names = self.call(["ps", "--all", "--format", "{{.Names}}"])?;
                if names.lines().any(|name| name == self.name) {
                    return Err(e);
                }
                return Ok(State::Missing);
            }
            Ok(said) => said,
        };
        Ok(match said.split_whitespace().collect::<Vec<_>>()[..] {
            ["true", ..] => State::Paused,
            [_, "true", pid] => State::Running(pid.parse()?),
            _ => State::Stopped,
        })
    }

    /// Step 2; returns the archive.
    pub fn checkpoint(&self, needs: &Needs) -> anyhow::Result<PathBuf> {
        let archive = self.directory.join(ARCHIVE);
        let cryopod = |verb: &str| EngineCall::new(CRYOPOD, self.limit()).args([verb]);
        if self.engine != Engine::Containerd {
            if self.engine == Engine::Docker {
                self.call(["pause", &self.name])?;
            }
            cryopod("export")
                .args([&self.name, "--quiet", "--engine", &self.engine.to_string()])
                .args([
                    "--timeout",
                    &self.seconds.to_string(),
                    "--compression",
                    "none",
                    "--no-encrypt",
                ])
                .flag(self.engine == Engine::Docker, "--leave-running")
                .flag(needs.with_image, "--with-image")
                .args(["--output"])
                .args([&archive])
                .shown("cryopod export".into())
                .run()?;
            return Ok(archive);
        }
        let image = self.image();
        // It pauses the container; the resume at its end is refused.
        self.call([
            "containers",
            "checkpoint",
            "--rw",
            "--task",
            &self.name,
            &image,
        ])?;
        write_image(|| self.ctr(), &image, &archive)?;
        let source = Source::open(&archive)?;
        if bundle::found(&source, &stores(&[])?)?.is_none() {
            return Ok(archive);
        }
        let whole = self.directory.join("whole.tar");
        cryopod("bundle")
            .args([&archive])
            .args([
                "--quiet",
                "--no-encrypt",
                "--compression",
                "none",
                "--output",
            ])
            .args([format!("oci-archive:{}", whole.display())])
            .shown("cryopod bundle".into())
            .run()?;
        Ok(whole)
    }

    /// Sends the image, if the other host lacks it.
    pub fn send_image(&self, needs: &mut Needs) -> anyhow::Result<()> {
        let (program, image) = (self.program(), quoted(&needs.image));
        let ask = match self.engine {
            Engine::Containerd => format!("{program} images ls"),
            _ => {
                format!("{program} image inspect --format '{{{{.Id}}}}' {image} 2> /dev/null || :")
            }
        };
        let said = self.far(&program, &ask, ASK).run()?;
        let digest = match self.engine {
            Engine::Containerd => digest(&said, &needs.image),
            _ => said.trim().to_owned(),
        };
        if digest == needs.digest {
            return Ok(());
        }
        if self.engine == Engine::Podman {
            needs.with_image = true;
            return Ok(());
        }
        if !digest.is_empty() {
            bail!(
                "{}: it has another image {}: {digest}",
                self.host,
                needs.image
            );
        }
        let file = self.directory.join("image.tar");
        let load = match self.engine {
            Engine::Containerd => {
                write_image(|| self.ctr(), &needs.image, &file)?;
                format!("{program} images import -")
            }
            _ => {
                let call = EngineCall::new(self.engine.program(), self.limit());
                let call = call.args(["image", "save", "--output"]).args([&file]);
                call.args([&needs.image]).run()?;
                format!("{program} image load")
            }
        };
        let input = std::fs::File::open(&file).with_context(|| file.display().to_string())?;
        self.far(&load, &load, self.limit()).input(input).run()?;
        std::fs::remove_file(&file).with_context(|| file.display().to_string())?;
        Ok(())
    }

    /// Hands the archive to the engine there, which starts nothing yet.
    pub fn prepare(&self, needs: &Needs) -> anyhow::Result<()> {
        let import = format!("cryopod import {}/{ARCHIVE} --quiet", self.there());
        let import = match self.engine {
            Engine::Podman => return Ok(()),
            Engine::Docker => {
                self.create(&needs.inspected)?;
                format!(
                    "{import} --engine docker --container {} --name {}",
                    self.name,
                    self.token()
                )
            }
            Engine::Containerd => {
                format!(
                    "{import} --engine containerd --namespace {}",
                    self.namespace
                )
            }
        };
        self.far("cryopod import", &import, self.limit()).run()?;
        Ok(())
    }

    /// Creates docker's container there, through docker's API: no command takes what `docker inspect` says.
    fn create(&self, inspected: &Value) -> anyhow::Result<()> {
        let mut body = inspected["Config"].clone();
        body["HostConfig"] = inspected["HostConfig"].clone();
        let networks = inspected["NetworkSettings"]["Networks"].as_object();
        // What the user chose of each.
        let networks = networks.into_iter().flatten().map(|(name, network)| {
            let chosen = ["IPAMConfig", "Links", "Aliases", "DriverOpts"];
            let chosen = chosen.map(|key| (key.to_owned(), network[key].clone()));
            (name.clone(), chosen.into_iter().collect::<Value>())
        });
        body["NetworkingConfig"] = json!({"EndpointsConfig": networks.collect::<Value>()});
        let body = serde_json::to_string(&body)?;
        let request = format!(
            "POST /containers/create?name={} HTTP/1.1\r\nHost: docker\r\nConnection: close\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            self.name,
            body.len()
        );
        // docker's server gives up when its client closes, so the pipe stays open until it has answered.
        let (reader, mut writer) = io::pipe()?;
        let call = self.far("docker create", "exec docker system dial-stdio", ASK);
        let write = thread::spawn(move || writer.write_all(request.as_bytes()).map(|()| writer));
        let said = call.input(reader).run();
        drop(write.join());
        let said = said?;
        let status = said.split_whitespace().nth(1).unwrap_or_default();
        if status != "201" {
            let why = said.lines().find(|line| line.starts_with('{'));
            bail!(
                "{}: docker create: {}",
                self.host,
                why.unwrap_or("no answer")
            );
        }
        let made = format!(": > {}/made", self.there());
        self.far("docker create", &made, ASK).run().map(drop)
    }

    /// Returns the command by which a user resumes the container.
    pub fn resume_command(&self) -> String {
        match self.engine {
            // podman has removed it (`--rm`).
            Engine::Podman if matches!(self.state(), Ok(State::Missing)) => format!(
                "cryopod import --restore --engine podman {}",
                self.directory.join(ARCHIVE).display()
            ),
            Engine::Podman => format!("podman container restore {}", self.name),
            Engine::Docker => format!("docker unpause {}", self.name),
            Engine::Containerd => {
                format!(
                    "ctr --namespace {} tasks resume {}",
                    self.namespace, self.name
                )
            }
        }
    }

    /// Has it run here again, as after any step.
    pub fn resume_here(&self) -> anyhow::Result<()> {
        match (self.state()?, self.engine) {
            (State::Running(_), _) => String::new(),
            (State::Paused, Engine::Podman | Engine::Docker) => {
                self.call(["unpause", &self.name])?
            }
            (State::Paused, Engine::Containerd) => self.call(["tasks", "resume", &self.name])?,
            (State::Stopped, Engine::Podman) => self.call(["container", "restore", &self.name])?,
            // podman has removed it (`--rm`).
            (State::Missing, Engine::Podman) => EngineCall::new(CRYOPOD, self.limit())
                .args(["import", "--quiet", "--restore", "--engine", "podman"])
                .args([self.directory.join(ARCHIVE)])
                .shown("cryopod import".into())
                .run()?,
            (other, _) => bail!("{other:?}"),
        };
        if self.engine == Engine::Containerd {
            let _ = self.call(["images", "rm", "--sync", &self.image()]);
        }
        Ok(())
    }

    /// Removes it here. It does not run again: the signal to end comes before the resume.
    pub fn end_here(&self) -> anyhow::Result<()> {
        match (self.engine, self.state()?) {
            (_, State::Missing) => {}
            (Engine::Podman, _) => drop(self.call(["rm", "--force", "--time", "0", &self.name])?),
            (Engine::Docker, _) => drop(self.call(["rm", "--force", &self.name])?),
            (Engine::Containerd, _) => {
                self.call(["tasks", "kill", "--signal", "SIGKILL", &self.name])?;
                let _ = self.call(["tasks", "resume", &self.name]);
                let end = Instant::now() + END;
                while matches!(self.state()?, State::Running(_) | State::Paused)
                    && Instant::now() < end
                {
                    thread::sleep(Duration::from_millis(50));
                }
                let _ = self.call(["tasks", "delete", &self.name]);
            }
        }
        if self.engine == Engine::Containerd {
            let _ = self.call(["containers", "rm", &self.name]);
            let _ = self.call(["images", "rm", "--sync", &self.image()]);
        }
        match self.state()? {
            State::Missing => Ok(()),
            other => bail!("{other:?}"),
        }
    }
}

/// The digest of an image in the output of `ctr images ls`; empty if it has none of this name.
fn digest(images: &str, name: &str) -> String {
    let mut lines = images.lines().map(|line| line.split_whitespace());
    let found = lines.find_map(|mut words| (words.next()? == name).then(|| words.nth(1)).flatten());
    found.unwrap_or_default().to_owned()
}
