//! `cryopod installer`: what the pods of the Kubernetes chart (`packages/kubernetes`) do beside `cryopod setup kubernetes`.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, bail};
use cryopod_cuda::gpus::nvidia;
use cryopod_host::files::Host;
use cryopod_host::programs::SystemTools;
use cryopod_operations::criu::{numbers, program, version_line};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::signal::{SigSet, Signal};
use reqwest::{Certificate, Client};
use serde_json::json;

use crate::setup;

/// Where Kubernetes gives a pod its identity.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
const ANSWER: Duration = Duration::from_secs(30);
const LABEL: &str = "cryopod.dev/ready";

#[derive(clap::Subcommand)]
pub enum Args {
    /// Runs the node's cryopod as on the node.
    Run {
        /// The directory with the node's root.
        #[arg(long)]
        node_root: PathBuf,
        /// An auth file of this container, for registries.
        #[arg(long)]
        auth_file: Option<PathBuf>,
        /// A private key of this container, for the node's --sign-by.
        #[arg(long)]
        sign_key: Option<PathBuf>,
        #[arg(last = true, required = true)]
        words: Vec<OsString>,
    },
    /// Labels this pod's node as ready, with the versions of cryopod, CRIU and NVIDIA's driver.
    Label {
        node: String,
        /// Removes the labels.
        #[arg(long)]
        remove: bool,
    },
    /// Waits until the pod is ended.
    Hold,
}

/// Runs `cryopod installer`, and returns its exit code.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args {
        Args::Run {
            node_root,
            auth_file,
            sign_key,
            words,
        } => on_node(
            &node_root,
            auth_file.as_deref(),
            sign_key.as_deref(),
            &words,
        ),
        Args::Label { node, remove } => {
            tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?
                .block_on(label(&node, remove))?;
            Ok(ExitCode::SUCCESS)
        }
        Args::Hold => {
            // As process 1 it ends by no signal that it does not wait for.
            let ends = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT]);
            ends.thread_block()?;
            ends.wait()?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn on_node(
    root: &Path,
    auth_file: Option<&Path>,
    sign_key: Option<&Path>,
    words: &[OsString],
) -> anyhow::Result<ExitCode> {
    let open = |path: Option<&Path>| {
        let file = path.map(|path| File::open(path).with_context(|| path.display().to_string()));
        file.transpose()
    };
    let (auth, key) = (open(auth_file)?, open(sign_key)?);
    setup::node::change_root(root)?;
    let mut command = Command::new(setup::node::program());
    command.args(words);
    // The node has no such paths: the program inherits the open files.
    let inherited = |file: &File| {
        fcntl(file, FcntlArg::F_SETFD(FdFlag::empty()))?;
        anyhow::Ok(format!("/proc/self/fd/{}", file.as_raw_fd()))
    };
    if let Some(file) = &auth {
        command.env("REGISTRY_AUTH_FILE", inherited(file)?);
    }
    if let Some(file) = &key {
        command.arg("--sign-by").arg(inherited(file)?);
    }
    Err(command.exec()).with_context(|| command.get_program().display().to_string())
}

/// Returns the node's labels; `None` removes one. The driver is the kernel's, CRIU the one that the installer brings.
fn facts() -> BTreeMap<&'static str, Option<String>> {
    let line =
        program::packaged().and_then(|criu| version_line(&SystemTools::from_env(), &criu, ANSWER));
    let criu = line.as_deref().and_then(numbers).map(|numbers| {
        let numbers: Vec<_> = numbers.iter().map(u32::to_string).collect();
        numbers.join(".")
    });
    BTreeMap::from([
        (LABEL, Some("true".to_owned())),
        (
            "cryopod.dev/version",
            Some(env!("CARGO_PKG_VERSION").to_owned()),
        ),
        ("cryopod.dev/criu", criu),
        (
            "cryopod.dev/driver",
            nvidia::driver_version(&Host::system()),
        ),
    ])
}

/// Changes the labels of a node with the pod's own account.
async fn label(node: &str, remove: bool) -> anyhow::Result<()> {
    let variable = |name| std::env::var(name).with_context(|| format!("{name}: not in a pod"));
    let host = variable("KUBERNETES_SERVICE_HOST")?;
    let port = variable("KUBERNETES_SERVICE_PORT")?;
    let host = if host.contains(':') {
        format!("[{host}]")
    } else {
        host
    };
    let read = |name: &str| {
        let path = Path::new(ACCOUNT).join(name);
        fs::read_to_string(&path).with_context(|| path.display().to_string())
    };
    // An error means that a provider is already installed.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = Client::builder()
        .tls_certs_only([Certificate::from_pem(read("ca.crt")?.as_bytes())?])
        .timeout(ANSWER)
        .build()?;
    let labels: BTreeMap<_, _> = facts()
        .into_iter()
        .map(|(name, value)| (name, value.filter(|_| !remove)))
        .collect();
    let answer = client
        .patch(format!("https://{host}:{port}/api/v1/nodes/{node}"))
        .bearer_auth(read("token")?.trim())
        .header("Content-Type", "application/merge-patch+json")
        .body(json!({"metadata": {"labels": labels}}).to_string())
        .send()
        .await
        .context("the API server")?;
    let status = answer.status();
    if !status.is_success() {
        let said = answer.text().await.unwrap_or_default();
        bail!("the API server refuses to label the node {node}: {status}: {said}");
    }
    match remove {
        true => println!("The node {node} has no label of cryopod's."),
        false => println!("The node {node} has the label {LABEL}=true."),
    }
    Ok(())
}
