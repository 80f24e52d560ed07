//! Tests a setup without an engine, which is what CRI-O needs: cryopod-runtime runs, checkpoints, deletes and restores a
//! container by itself.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use cryopod_host::files::Host;
use cryopod_host::programs::Tools;
use serde_json::{Value, json};

use crate::temp_dir::{Holds, LockedTempDir};

use super::WantedSetup;
use super::trial::{COMMAND, EMPTY, PROGRAMS, TrialOutcome, mounts, run_one, works};

const LIMIT: Duration = Duration::from_secs(120);
const ID: &str = "cryopod-setup";

/// Tests the setup, and returns how that ended.
pub fn run(wanted: &WantedSetup<'_>) -> anyhow::Result<TrialOutcome> {
    let temp = LockedTempDir::anywhere(Holds::Copy)?;
    let trial = RuntimeTrial {
        tools: wanted.tools,
        runtime: &wanted.runtime,
        temp: temp.path(),
        mounts: &mounts(wanted.host),
    };
    let start = Instant::now();
    trial.run(wanted.host)?;
    Ok(works(start))
}

struct RuntimeTrial<'a> {
    tools: &'a dyn Tools,
    runtime: &'a Path,
    /// For all files of the test.
    temp: &'a Path,
    /// Directories that the container sees of the host.
    mounts: &'a [String],
}

impl RuntimeTrial<'_> {
    fn run(&self, host: &Host) -> anyhow::Result<()> {
        let bundle = self.bundle(host)?;
        let bundle = bundle.to_string_lossy();
        let (images, work) = (self.path("images"), self.path("work"));
        let on = ["--image-path", &images, "--work-path", &work];
        let done = self
            .call(&["run", "--detach", "--bundle", &bundle, ID])
            .and_then(|()| self.call(&[&["checkpoint"], &on[..], &[ID]].concat()))
            .and_then(|()| self.call(&["delete", "--force", ID]))
            .and_then(|()| {
                let from = ["restore", "--detach", "--bundle", &bundle];
                self.call(&[&from, &on[..], &[ID]].concat())
            })
            .and_then(|()| self.runs());
        let removed = self.call(&["delete", "--force", ID]);
        done.and(removed)
    }

    fn path(&self, name: &str) -> String {
        self.temp.join(name).to_string_lossy().into_owned()
    }

    fn global(&self) -> [String; 2] {
        ["--root".into(), self.path("state")]
    }

    /// The container keeps standard input and output of whoever starts it, so they are the null device's.
    fn call(&self, args: &[&str]) -> anyhow::Result<()> {
        let log = self.temp.join("log");
        let runtime = self.runtime.to_string_lossy();
        let [root, state] = self.global();
        let log_path = log.to_string_lossy();
        let mut words = vec![
            "-c",
            "exec \"$@\" > /dev/null 2>&1",
            "sh",
            &runtime,
            &root,
            &state,
        ];
        words.extend(["--log", &log_path]);
        words.extend(args);
        run_one(self.tools, Path::new("/bin/sh"), &words, LIMIT).with_context(|| {
            let said = fs::read_to_string(&log).unwrap_or_default();
            let last = said.lines().last().unwrap_or_default();
            format!("{runtime} {}: {last}", args[0])
        })?;
        Ok(())
    }

    fn runs(&self) -> anyhow::Result<()> {
        let [root, state] = self.global();
        let said = run_one(
            self.tools,
            self.runtime,
            &[&root, &state, "state", ID],
            LIMIT,
        )?;
        let state: Value = serde_json::from_str(&said)?;
        match state["status"].as_str() {
            Some("running") => Ok(()),
            _ => bail!("the restored container does not run: {said}"),
        }
    }

    /// Makes a bundle whose root file system has directories and links alone.
    fn bundle(&self, host: &Host) -> anyhow::Result<PathBuf> {
        let bundle = self.temp.join("bundle");
        let root = bundle.join("rootfs");
        fs::create_dir_all(&root)?;
        for name in EMPTY.iter().chain(&PROGRAMS) {
            let there = host.path(format!("/{name}"));
            match there.read_link() {
                Ok(to) => symlink(to, root.join(name))?,
                Err(_) if there.is_dir() => fs::create_dir(root.join(name))?,
                Err(_) => {}
            }
        }
        let bind = |path: &String| json!({"destination": path, "source": path, "type": "bind", "options": ["bind", "ro"]});
        let mut mounts: Vec<Value> = self.mounts.iter().map(bind).collect();
        mounts.push(json!({"destination": "/proc", "type": "proc", "source": "proc"}));
        let namespaces = ["pid", "network", "ipc", "uts", "mount"].map(|of| json!({"type": of}));
        let spec = json!({
            "ociVersion": "1.0.2",
            "process": {"user": {"uid": 0, "gid": 0}, "args": COMMAND, "cwd": "/", "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]},
            "root": {"path": "rootfs", "readonly": true},
            "mounts": mounts,
            "linux": {"namespaces": namespaces},
        });
        fs::write(bundle.join("config.json"), spec.to_string())?;
        Ok(bundle)
    }
}
