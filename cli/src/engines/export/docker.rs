//! Checkpoints with docker: `docker checkpoint create` writes only CRIU's images. Adds config.dump and spec.dump from
//! docker's own data. The root file system stays with the container: docker cannot export its difference.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use cryopod_archive::format::names;
use serde_json::{Value, json};

use super::{Args, Taken};
use crate::engines::engine::EngineCall;
use crate::terminal::ui::Steps;

/// The checkpoint's name, below the directory that docker gets.
const NAME: &str = "checkpoint";
const ASK: Duration = Duration::from_secs(60);

pub fn checkpoint(args: &Args, temp: &Path, steps: &mut Steps) -> anyhow::Result<Taken> {
    args.without_options_of_podman("docker")?;
    let said = EngineCall::new("docker", ASK)
        .args(["container", "inspect", &args.container])
        .run()?;
    let said: Value = serde_json::from_str(&said).context("docker container inspect: not JSON")?;
    let extra = records(&said[0])?;
    EngineCall::new("docker", args.limit())
        .args(["checkpoint", "create", "--checkpoint-dir"])
        .args([temp])
        .flag(args.leave_running, "--leave-running")
        .args([args.container.as_str(), NAME])
        .run()
        .context("docker checkpoint (it needs a daemon with `experimental`)")?;
    steps.done("docker checkpoint create");
    Ok(Taken {
        source: temp.join(NAME),
        extra,
        request: None,
    })
}

/// In the schema that CRI-O, containerd and checkpointctl share.
fn records(said: &Value) -> anyhow::Result<BTreeMap<String, Vec<u8>>> {
    let id = said["Id"]
        .as_str()
        .context("docker container inspect: no Id")?;
    let name = said["Name"].as_str().unwrap_or(id).trim_start_matches('/');
    let config = json!({
        "id": id,
        "name": name,
        "rootfsImage": said["Config"]["Image"],
        "rootfsImageName": said["Config"]["Image"],
        "rootfsImageRef": said["Image"],
        "runtime": said["HostConfig"]["Runtime"],
        "createdTime": said["Created"],
    });
    let mut words = vec![said["Path"].clone()];
    words.extend(said["Args"].as_array().into_iter().flatten().cloned());
    let mounts = said["Mounts"].as_array();
    let mounts: Vec<Value> = mounts
        .into_iter()
        .flatten()
        .map(|m| json!({"destination": m["Destination"], "source": m["Source"], "type": "bind"}))
        .collect();
    let spec = json!({
        "ociVersion": "1.0.0",
        "process": {"args": words, "env": said["Config"]["Env"], "cwd": said["Config"]["WorkingDir"]},
        "hostname": said["Config"]["Hostname"],
        "mounts": mounts,
        "annotations": {"io.container.manager": "docker"},
    });
    Ok(BTreeMap::from([
        (names::CONFIG_DUMP.to_owned(), serde_json::to_vec(&config)?),
        (names::SPEC_DUMP.to_owned(), serde_json::to_vec(&spec)?),
    ]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_docker_says() {
        let said = json!({"Id": "a1", "Name": "/job", "Image": "sha256:1", "Created": "2026-01-01T00:00:00Z",
            "Path": "sh", "Args": ["-c", "x"], "Config": {"Image": "busybox"}, "HostConfig": {"Runtime": "cryopod"}});
        let files = records(&said).unwrap();
        let facts = cryopod_archive::container::engine::read(&files).unwrap();
        assert_eq!(facts.engine, Some("docker"));
        assert_eq!(facts.name.as_deref(), Some("job"));
        assert_eq!(facts.image.as_deref(), Some("busybox"));
        assert_eq!(facts.image_id.as_deref(), Some("sha256:1"));
        assert_eq!(facts.command, ["sh", "-c", "x"]);
        assert!(records(&json!(null)).is_err());
    }
}
