//! `kubectl cryopod`: a plugin of kubectl, which runs this program by the name `kubectl-cryopod`. kubectl does what is asked of
//! the cluster, with its user's rights.

use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Parser;
use cryopod_host::programs::{SystemTools, Tools};
use cryopod_operations::config::restore::REGISTRY;
use cryopod_registry::parse_reference;
use serde_json::{Value, json};

use crate::terminal::numbers;

pub const NAME: &str = "kubectl-cryopod";
const ASK: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_secs(1);
/// The chart's runtime class and DaemonSet.
const CHART: &str = "cryopod";
/// The runtime class's annotation with the chart's namespace.
const NAMESPACE: &str = "cryopod.dev/namespace";
const NOT_INSTALLED: &str =
    "the cluster has no installer of cryopod, or an older one: helm install or upgrade it first";
const RUNTIME_CLASS: &str = "cryopod";
const RESTORE: &str = "dev.cryopod.restore";
/// The chart's annotation with the name of the secret that signs.
const SIGNING: &str = "cryopod.dev/signing-secret";
/// The job's pod ends by itself after this time, and is removed after the next.
const REMOVED_AFTER_S: u64 = 3600;

/// Checkpoints containers of pods, and starts deployments from checkpoints.
#[derive(Parser)]
#[command(name = "kubectl cryopod", version)]
struct Plugin {
    #[command(subcommand)]
    command: PluginCommand,
}

#[derive(clap::Subcommand)]
enum PluginCommand {
    /// Checkpoints a container of a pod, pushes the checkpoint from its node, and prints its name with the digest.
    Checkpoint {
        pod: String,
        /// The container, of several.
        #[arg(short, long)]
        container: Option<String>,
        #[command(flatten)]
        target: PushTarget,
        #[command(flatten)]
        cluster: ClusterArgs,
        /// The longest time for the checkpoint and for the push, each, in seconds.
        #[arg(long, default_value_t = 1800, value_parser = numbers::seconds)]
        timeout: u64,
    },
    /// Lets the pods of a deployment begin at a checkpoint.
    Warm {
        deployment: String,
        /// docker://REGISTRY/REPOSITORY@DIGEST
        #[arg(long, required_unless_present = "undo")]
        from: Option<String>,
        /// The container, of several.
        #[arg(short, long)]
        container: Option<String>,
        /// Lets them begin anew.
        #[arg(long, conflicts_with = "from")]
        undo: bool,
        #[command(flatten)]
        cluster: ClusterArgs,
    },
}

/// Where the node pushes the checkpoint.
#[derive(clap::Args)]
struct PushTarget {
    /// docker://REGISTRY/REPOSITORY:TAG
    #[arg(long)]
    to: String,
    /// false: accept any certificate of the registry, and plain HTTP if there is no TLS.
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    tls_verify: bool,
}

/// Which cluster and namespace, in kubectl's words.
#[derive(clap::Args)]
struct ClusterArgs {
    #[arg(short, long)]
    namespace: Option<String>,
    #[arg(long)]
    context: Option<String>,
    #[arg(long)]
    kubeconfig: Option<PathBuf>,
}

/// Runs as kubectl's plugin.
pub fn run() -> anyhow::Result<ExitCode> {
    let tools = SystemTools::from_env();
    let program = tools.find("kubectl").context("kubectl is not on PATH")?;
    let kubectl = |cluster: ClusterArgs| {
        let mut cluster_words = Vec::new();
        if let Some(context) = cluster.context {
            cluster_words.push(format!("--context={context}"));
        }
        if let Some(path) = cluster.kubeconfig {
            cluster_words.push(format!("--kubeconfig={}", path.display()));
        }
        Kubectl {
            tools: &tools,
            program: &program,
            cluster_words,
            namespace: cluster.namespace,
        }
    };
    match Plugin::parse().command {
        PluginCommand::Checkpoint {
            pod,
            container,
            target,
            cluster,
            timeout,
        } => {
            let limit = Duration::from_secs(timeout);
            let container = container.as_deref();
            let digest = checkpoint(&kubectl(cluster), &pod, container, &target, limit)?;
            println!("{digest}");
        }
        PluginCommand::Warm {
            deployment,
            from,
            container,
            undo: _,
            cluster,
        } => {
            let kubectl = kubectl(cluster);
            warm(&kubectl, &deployment, from.as_deref(), container.as_deref())?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

struct Kubectl<'a> {
    tools: &'a dyn Tools,
    program: &'a Path,
    cluster_words: Vec<String>,
    namespace: Option<String>,
}

impl Kubectl<'_> {
    fn run(&self, args: &[&str], limit: Duration) -> anyhow::Result<String> {
        let cluster = self.cluster_words.iter().map(OsStr::new);
        let words: Vec<&OsStr> = args.iter().map(OsStr::new).chain(cluster).collect();
        let out = self.tools.output(self.program, &words, limit)?;
        match out.code {
            0 => Ok(out.stdout),
            _ => bail!("kubectl {}: {}", args[0], out.stderr.trim()),
        }
    }

    /// Asks until `end`: an API server that is away for a moment, or while it is upgraded, ends no push.
    fn ask_until(&self, args: &[&str], end: Instant) -> anyhow::Result<String> {
        loop {
            match self.run(args, ASK) {
                Err(error) if Instant::now() <= end && !is_gone(&error) => thread::sleep(PAUSE),
                answer => return answer,
            }
        }
    }

    /// An object of the chart. Only one that is not there means that the chart is not installed.
    fn installed(&self, words: &[&str]) -> anyhow::Result<Value> {
        let said = [&["get"], words, &["--output=json", "--ignore-not-found"]].concat();
        match self.run(&said, ASK)?.trim() {
            "" => bail!(NOT_INSTALLED),
            object => Ok(serde_json::from_str(object)?),
        }
    }

    /// An object of the user's namespace.
    fn object(&self, kind: &str, name: &str) -> anyhow::Result<Value> {
        let namespace = self.namespace.as_ref().map(|n| format!("--namespace={n}"));
        let mut args = vec!["get", kind, name, "--output=json"];
        args.extend(namespace.as_deref());
        Ok(serde_json::from_str(&self.run(&args, ASK)?)?)
    }
}

/// Returns true if the object is gone. kubectl gives the reason in brackets. `(Forbidden)` and `(Unauthorized)` are answers
/// of a server that has just been started, too.
fn is_gone(error: &anyhow::Error) -> bool {
    error.to_string().contains("(NotFound)")
}

fn checkpoint(
    kubectl: &Kubectl<'_>,
    pod: &str,
    container: Option<&str>,
    target: &PushTarget,
    limit: Duration,
) -> anyhow::Result<String> {
    let to = &target.to;
    if !to.starts_with(REGISTRY) {
        bail!("--to {to}: write docker://REGISTRY/REPOSITORY:TAG");
    }
    let image = parse_reference(to)?;
    // Before the checkpoint: without the installer nothing would push it.
    let installer = Installer::find(kubectl)?;
    let object = kubectl.object("pod", pod)?;
    let container = chosen(&object["spec"], container).with_context(|| format!("pod {pod}"))?;
    let node = object["spec"]["nodeName"].as_str();
    let node = node.with_context(|| format!("pod {pod} runs on no node yet"))?;
    let namespace = object["metadata"]["namespace"]
        .as_str()
        .unwrap_or("default");
    let path = format!("/api/v1/nodes/{node}/proxy/checkpoint/{namespace}/{pod}/{container}");
    let path = format!("{path}?timeout={}", limit.as_secs());
    let answer = kubectl
        .run(
            &["create", "--raw", &path, "--filename=/dev/null"],
            limit + ASK,
        )
        .with_context(|| format!("the kubelet made no checkpoint, and the container runs on; if it gave no answer, look into /var/lib/kubelet/checkpoints on {node}"))?;
    let answer: Value = serde_json::from_str(&answer)?;
    let archive = answer["items"][0].as_str();
    let archive = archive.context("the kubelet names no archive")?;
    eprintln!("{archive} on {node} has the checkpoint; a job pushes it.");
    let digest = push(kubectl, &installer, node, archive, target, limit)
        .with_context(|| format!("{archive} on {node} was not pushed, and stays"))?;
    let repository = format!("{}/{}", image.registry(), image.repository());
    Ok(format!("{REGISTRY}{repository}@{digest}"))
}

/// The chart's DaemonSet, which says how a pod of the installer is made.
struct Installer {
    namespace: String,
    spec: Value,
    /// The secret with the key that signs, as cosign makes it. No pod of the DaemonSet has it.
    signing: Value,
}

impl Installer {
    fn find(kubectl: &Kubectl<'_>) -> anyhow::Result<Self> {
        // Whoever may write DaemonSets in some namespace could name one as ours, and what it names runs as root on the
        // nodes. Runtime classes belong to no namespace, and only administrators write them.
        let class = kubectl.installed(&["runtimeclass", CHART])?;
        let namespace = class["metadata"]["annotations"][NAMESPACE].as_str();
        let namespace = namespace.context(NOT_INSTALLED)?;
        let within = format!("--namespace={namespace}");
        let one = kubectl.installed(&["daemonset", CHART, &within])?;
        Ok(Self {
            namespace: namespace.into(),
            spec: one["spec"]["template"]["spec"].clone(),
            signing: one["metadata"]["annotations"][SIGNING].clone(),
        })
    }

    /// The job that packs an archive of a node, and pushes it.
    fn job(&self, node: &str, archive: &str, target: &PushTarget, limit: Duration) -> Value {
        let volumes = self.spec["volumes"].as_array().cloned().unwrap_or_default();
        let auth = volumes.into_iter().find(|v| v["name"] == "auth");
        let mut command = vec![
            "/opt/cryopod/bin/cryopod",
            "installer",
            "run",
            "--node-root=/host",
        ];
        let mut mounts = vec![json!({"name": "host", "mountPath": "/host"})];
        let mut volumes = vec![json!({"name": "host", "hostPath": {"path": "/"}})];
        if let Some(auth) = auth {
            command.push("--auth-file=/auth/.dockerconfigjson");
            mounts.push(json!({"name": "auth", "mountPath": "/auth", "readOnly": true}));
            volumes.push(auth);
        }
        let mut env = Vec::new();
        if let Value::String(secret) = &self.signing {
            command.push("--sign-key=/sign/cosign.key");
            mounts.push(json!({"name": "sign", "mountPath": "/sign", "readOnly": true}));
            volumes.push(json!({"name": "sign", "secret": {"secretName": secret}}));
            let password = json!({"secretKeyRef": {"name": secret, "key": "cosign.password"}});
            env.push(json!({"name": "COSIGN_PASSWORD", "valueFrom": password}));
        }
        command.extend(["--", "pack", archive, "--output", &target.to]);
        if !target.tls_verify {
            command.push("--tls-verify=false");
        }
        json!({
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {
                "generateName": "cryopod-push-",
                "namespace": self.namespace,
                "labels": {"app.kubernetes.io/name": "cryopod-push"},
            },
            "spec": {
                "backoffLimit": 0,
                "activeDeadlineSeconds": limit.as_secs(),
                "ttlSecondsAfterFinished": REMOVED_AFTER_S,
                "template": {"spec": {
                    "nodeName": node,
                    "hostPID": true,
                    "restartPolicy": "Never",
                    "automountServiceAccountToken": false,
                    "imagePullSecrets": self.spec["imagePullSecrets"],
                    "tolerations": [{"operator": "Exists"}],
                    "containers": [{
                        "name": "push",
                        "image": self.spec["containers"][0]["image"],
                        "command": command,
                        "env": env,
                        "securityContext": {"privileged": true},
                        "volumeMounts": mounts,
                    }],
                    "volumes": volumes,
                }},
            },
        })
    }
}

/// Packs and pushes on the node, and returns the digest.
fn push(
    kubectl: &Kubectl<'_>,
    installer: &Installer,
    node: &str,
    archive: &str,
    target: &PushTarget,
    limit: Duration,
) -> anyhow::Result<String> {
    let mut file = tempfile::NamedTempFile::new()?;
    file.write_all(
        installer
            .job(node, archive, target, limit)
            .to_string()
            .as_bytes(),
    )?;
    let file = file.path().to_string_lossy().into_owned();
    let made = kubectl.run(&["create", "--filename", &file, "--output=name"], ASK)?;
    let job = made.trim();
    let of = format!("--namespace={}", installer.namespace);
    // The deadline of the job itself comes first.
    let end = Instant::now() + limit + ASK;
    let done = loop {
        let state = kubectl.ask_until(&["get", job, &of, "--output=json"], end)?;
        let state: Value = serde_json::from_str(&state)?;
        let conditions = state["status"]["conditions"].as_array();
        let is = |kind: &str| {
            let mut all = conditions.into_iter().flatten();
            all.any(|c| c["type"] == kind && c["status"] == "True")
        };
        if is("Complete") {
            break Ok(());
        }
        if is("Failed") || Instant::now() > end {
            let said = kubectl.run(&["logs", job, &of, "--tail=3"], ASK);
            break Err(format!("{job}: {}", said.unwrap_or_default().trim()));
        }
        thread::sleep(PAUSE);
    };
    if let Err(why) = done {
        bail!(why);
    }
    let said = kubectl.ask_until(&["logs", job, &of], end)?;
    let digest = digest_in(&said).with_context(|| format!("{job} names no digest: {said}"))?;
    if let Err(error) = kubectl.run(&["delete", job, &of, "--wait=false"], ASK) {
        eprintln!("{job} stays: {error:#}");
    }
    Ok(digest.to_owned())
}

/// What `cryopod pack` prints of an image that it pushed.
fn digest_in(said: &str) -> Option<&str> {
    let words = said.split(|c: char| !c.is_ascii_alphanumeric() && c != ':');
    words.rev().find(|word| {
        let hex = word.strip_prefix("sha256:");
        hex.is_some_and(|hex| hex.len() == 64 && hex.bytes().all(|b| b.is_ascii_hexdigit()))
    })
}

/// The container that is named, or the only one.
fn chosen(spec: &Value, named: Option<&str>) -> anyhow::Result<String> {
    let all = spec["containers"].as_array().cloned().unwrap_or_default();
    let names: Vec<&str> = all.iter().filter_map(|c| c["name"].as_str()).collect();
    match (named, &names[..]) {
        (Some(name), _) if names.contains(&name) => Ok(name.into()),
        (None, [one]) => Ok((*one).into()),
        _ => bail!("name one of its containers with -c: {}", names.join(", ")),
    }
}

fn warm(
    kubectl: &Kubectl<'_>,
    deployment: &str,
    from: Option<&str>,
    container: Option<&str>,
) -> anyhow::Result<()> {
    if let Some(from) = from {
        let image = from.starts_with(REGISTRY).then(|| parse_reference(from));
        let image = image.with_context(|| format!("--from {from}: not docker://"))??;
        if image.digest().is_none() {
            bail!("--from {from}: name it by its digest, so that all pods begin at the same");
        }
    }
    let object = kubectl.object("deployment", deployment)?;
    let template = &object["spec"]["template"];
    let name =
        chosen(&template["spec"], container).with_context(|| format!("deployment {deployment}"))?;
    let patch = json!({"spec": {"template": patch(template, &name, from)}}).to_string();
    let namespace = object["metadata"]["namespace"]
        .as_str()
        .unwrap_or("default");
    let of = format!("--namespace={namespace}");
    let words = [
        "patch",
        "deployment",
        deployment,
        &of,
        "--type=merge",
        "--patch",
        &patch,
    ];
    print!("{}", kubectl.run(&words, ASK)?);
    Ok(())
}

/// The merge patch of a pod's template. The runtime class stays as long as another container begins at a checkpoint.
fn patch(template: &Value, container: &str, from: Option<&str>) -> Value {
    let own = format!("{RESTORE}.{container}");
    let others = template["metadata"]["annotations"].as_object();
    let mut others = others.into_iter().flatten();
    let others = others.any(|(key, _)| key.starts_with(RESTORE) && *key != own);
    let class = (from.is_some() || others).then_some(RUNTIME_CLASS);
    json!({"metadata": {"annotations": {own: from}}, "spec": {"runtimeClassName": class}})
}

#[cfg(test)]
mod tests {
    use cryopod_host::programs::{Output, ToolError};

    use super::*;

    /// What kubectl says of each object, and its exit code.
    struct KubectlSays(&'static str, i32);

    impl Tools for KubectlSays {
        fn find(&self, name: &str) -> Option<PathBuf> {
            Some(name.into())
        }
        fn output(&self, _: &Path, _: &[&OsStr], _: Duration) -> Result<Output, ToolError> {
            let (code, text) = (self.1, self.0.to_owned());
            let (stdout, stderr) = match code {
                0 => (text, String::new()),
                _ => (String::new(), text),
            };
            Ok(Output {
                code,
                stdout,
                stderr,
            })
        }
    }

    fn kubectl(says: &KubectlSays) -> Kubectl<'_> {
        Kubectl {
            tools: says,
            program: Path::new("kubectl"),
            cluster_words: Vec::new(),
            namespace: None,
        }
    }

    /// Without a stop at once the first would be asked for an hour.
    #[test]
    fn what_is_gone_is_not_asked_for_again() {
        let hour = Instant::now() + Duration::from_secs(3600);
        let said = "Error from server (NotFound): jobs.batch \"push\" not found";
        let error = kubectl(&KubectlSays(said, 1)).ask_until(&["get"], hour);
        assert_eq!(
            error.unwrap_err().to_string(),
            format!("kubectl get: {said}")
        );
        let away = KubectlSays("Unable to connect to the server: EOF", 1);
        let soon = Instant::now() + PAUSE / 2;
        assert!(kubectl(&away).ask_until(&["get"], soon).is_err());
        assert!(Instant::now() > soon, "it was asked again");
    }

    #[test]
    fn no_installer_or_no_answer() {
        let found = |says: KubectlSays| {
            Installer::find(&kubectl(&says))
                .map(|found| found.namespace)
                .map_err(|e| format!("{e:#}"))
        };
        assert_eq!(found(KubectlSays("", 0)), Err(NOT_INSTALLED.into()));
        let older = KubectlSays(r#"{"metadata": {}}"#, 0);
        assert_eq!(found(older), Err(NOT_INSTALLED.into()));
        let class = r#"{"metadata": {"annotations": {"cryopod.dev/namespace": "n"}}}"#;
        assert_eq!(found(KubectlSays(class, 0)), Ok("n".into()));
        let refused = found(KubectlSays("Error from server (Forbidden): no", 1)).unwrap_err();
        assert_eq!(refused, "kubectl get: Error from server (Forbidden): no");
    }

    #[test]
    fn the_container() {
        let spec = |names: &[&str]| {
            let all: Vec<_> = names.iter().map(|n| json!({"name": n})).collect();
            json!({"containers": all})
        };
        assert_eq!(chosen(&spec(&["a"]), None).unwrap(), "a");
        assert_eq!(chosen(&spec(&["a", "b"]), Some("b")).unwrap(), "b");
        let error = chosen(&spec(&["a", "b"]), None).unwrap_err().to_string();
        assert!(error.contains("-c: a, b"), "{error}");
        assert!(chosen(&spec(&["a"]), Some("b")).is_err());
    }

    #[test]
    fn the_patch() {
        let template = json!({"metadata": {"annotations": {"dev.cryopod.restore.b": "x"}}});
        assert_eq!(
            patch(&json!({}), "a", Some("docker://r/a@sha256:0")),
            json!({
                "metadata": {"annotations": {"dev.cryopod.restore.a": "docker://r/a@sha256:0"}},
                "spec": {"runtimeClassName": "cryopod"},
            })
        );
        assert_eq!(
            patch(&template, "a", None)["spec"]["runtimeClassName"],
            "cryopod"
        );
        assert!(patch(&template, "b", None)["spec"]["runtimeClassName"].is_null());
    }

    #[test]
    fn the_digest() {
        let digest = format!("sha256:{}", "0a".repeat(32));
        let said = format!("pushed docker://r/a:1 ({digest}), 3 layers\n");
        assert_eq!(digest_in(&said), Some(&*digest));
        assert_eq!(digest_in("sha256:00"), None);
    }
}
