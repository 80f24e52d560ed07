//! Runs the driver agent: loads NVIDIA's libcuda once and makes every driver call of one checkpoint or restore, so that
//! CRIU's own process never does.
//!
//! `cryopod-cuda-agent --socket PATH [--report FILE] [--context] [--libcuda PATH]... [--identity FILE]...`
//!
//! Started before the freeze, because `cuInit` is slow; with `--context`, also a context on the first GPU, which a copy
//! needs. When a line has come on its stdin, it finds out what uses the GPUs. Prints one line of JSON when it listens or has
//! given up. Ends when its stdin is closed and no connection is left. If a connection ends without a commit, puts its
//! processes back first. Exit status: 0 done, 1 no driver, 2 a process could not be put back, 64 wrong arguments.

use cryopod_archive::format::limits::raise_open_files;
use cryopod_cuda::agent::server::{Server, listen};
use cryopod_cuda::agent::{Agent, Limits};
use cryopod_cuda::driver::{LibCuda, LoadError, usual_libraries};
use cryopod_cuda::gpus::nvidia;
use cryopod_cuda::messages::protocol::{AgentGpu, Hello};
use cryopod_cuda::messages::report::{AgentOutcome, AgentReady, GpuUser};
use cryopod_cuda::nvml;
use cryopod_cuda::vram::ceiling::Ceiling;
use cryopod_cuda::vram::worker;
use cryopod_host::files::Host;
use cryopod_host::processes::signals::keep_children;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// How long loading and initialising the driver may take: minutes when it starts cold without persistence mode on a
/// machine with many GPUs.
const INIT_LIMIT: Duration = Duration::from_secs(120);

#[derive(Default)]
struct Arguments {
    socket: PathBuf,
    report: Option<PathBuf>,
    has_context: bool,
    libraries: Vec<PathBuf>,
    identities: Vec<PathBuf>,
}

fn arguments() -> Result<Arguments, String> {
    let mut parsed = Arguments::default();
    let mut words = std::env::args_os().skip(1);
    while let Some(word) = words.next() {
        let name = word.to_string_lossy().into_owned();
        let mut value = || {
            words
                .next()
                .map(PathBuf::from)
                .ok_or(format!("{name} needs a value"))
        };
        match name.as_str() {
            "--socket" => parsed.socket = value()?,
            "--report" => parsed.report = Some(value()?),
            "--context" => parsed.has_context = true,
            "--libcuda" => parsed.libraries.push(value()?),
            "--identity" => parsed.identities.push(value()?),
            _ => return Err(format!("unknown argument {name}")),
        }
    }
    if parsed.socket.as_os_str().is_empty() {
        return Err("--socket is missing".into());
    }
    if parsed.libraries.is_empty() {
        parsed.libraries = usual_libraries();
    }
    Ok(parsed)
}

/// Calls the driver on a thread, since a faulty driver hangs.
fn within_limit<T: Send + 'static>(
    call: impl FnOnce() -> T + Send + 'static,
) -> Result<T, LoadError> {
    let (sender, receiver) = mpsc::channel();
    let start = std::thread::Builder::new()
        .name("load".into())
        .spawn(move || {
            let start = Instant::now();
            // After the limit nobody listens any more.
            let _ = sender.send(call());
            tracing::debug!(took = ?start.elapsed(), "loaded");
        });
    let failed = |cause: String| LoadError {
        cause,
        remedy: "check the driver with nvidia-smi and the kernel log (NVRM)".into(),
    };
    start.map_err(|error| failed(format!("cannot start a thread: {error}")))?;
    receiver.recv_timeout(INIT_LIMIT).map_err(|_| {
        failed(format!(
            "the driver did not initialise within {} s",
            INIT_LIMIT.as_secs()
        ))
    })
}

struct Loaded {
    agent: Arc<Agent<LibCuda>>,
    gpus: Vec<AgentGpu>,
    users: Vec<GpuUser>,
}

/// Loads the driver, and asks for what uses the GPUs when a line has come on stdin, or its end.
fn load(arguments: &Arguments) -> Result<Loaded, LoadError> {
    let libraries = arguments.libraries.clone();
    let cuda = within_limit(move || LibCuda::load_first(&libraries))??;
    let library = cuda.path().to_owned();
    let mut gpus = cuda.gpus().to_vec();
    let agent = Agent::new(cuda);
    agent.preloads().gpus.use_driver(library.clone(), &gpus);
    if arguments.has_context {
        agent.preloads().prepare_later(Vec::new(), false);
    }
    // Whatever it says is only the start; the server reads its end.
    let _ = std::io::stdin().read(&mut [0]);
    let (gpus, users) = within_limit(move || {
        let users = nvml::ask(&library, &mut gpus);
        (gpus, users)
    })?;
    Ok(Loaded { agent, gpus, users })
}

fn announce(ready: &AgentReady) {
    let line = serde_json::to_string(ready).unwrap_or_default();
    // The wrapper may be gone; stdin then says so.
    let _ = writeln!(std::io::stdout(), "{line}");
    let _ = std::io::stdout().flush();
}

fn give_up(error: impl Into<String>, remedy: impl Into<String>) -> ExitCode {
    announce(&AgentReady {
        ready: false,
        cryopod: Some(cryopod_cuda::VERSION.into()),
        driver_version: nvidia::driver_version(&Host::system()),
        cuda_version: None,
        libcuda: None,
        gpus: Vec::new(),
        users: Vec::new(),
        error: Some(error.into()),
        remedy: Some(remedy.into()),
    });
    ExitCode::FAILURE
}

fn prepare_process() {
    // SAFETY: called first, on the only thread.
    unsafe {
        // It would hide GPUs that containers have.
        std::env::remove_var("CUDA_VISIBLE_DEVICES");
        // One channel fills PCIe as well, and a context with one is there in half the time (H200: 0.055 s, not 0.12), and
        // gone in half (0.025 s, not 0.06).
        std::env::set_var("CUDA_DEVICE_MAX_CONNECTIONS", "1");
        // A terminal's ^C or a stopped service reaches the whole group; locked processes must still be put back. Only
        // the end of stdin ends this program.
        for signal in [libc::SIGINT, libc::SIGHUP, libc::SIGTERM, libc::SIGPIPE] {
            libc::signal(signal, libc::SIG_IGN);
        }
    }
}

fn main() -> ExitCode {
    keep_children();
    if std::env::args_os()
        .nth(1)
        .is_some_and(|word| word == worker::ARGUMENT)
    {
        return ExitCode::from(worker::main());
    }
    prepare_process();
    // A handle for each piece of GPU memory.
    raise_open_files();
    let filter = tracing_subscriber::EnvFilter::try_from_env("CRYOPOD_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    let arguments = match arguments() {
        Ok(arguments) => arguments,
        Err(error) => {
            eprintln!("cryopod-cuda-agent: {error}");
            return ExitCode::from(64);
        }
    };
    let Loaded { agent, gpus, users } = match load(&arguments) {
        Ok(loaded) => loaded,
        Err(error) => return give_up(error.cause, error.remedy),
    };
    let listener = match listen(&arguments.socket) {
        Ok(listener) => listener,
        Err(error) => {
            let what = format!("cannot listen on {}: {error}", arguments.socket.display());
            return give_up(what, "check the directory's permissions and space");
        }
    };
    let ceiling = Ceiling::new(&gpus, &users);
    let hello = Hello {
        driver_version: nvidia::driver_version(&Host::system()),
        cuda_version: agent.driver().version(),
        gpus,
    };
    announce(&AgentReady {
        ready: true,
        cryopod: Some(cryopod_cuda::VERSION.into()),
        driver_version: hello.driver_version.clone(),
        cuda_version: Some(hello.cuda_version),
        libcuda: Some(agent.driver().path().to_owned()),
        gpus: hello.gpus.clone(),
        users,
        error: None,
        remedy: None,
    });
    agent.vram_files().bound(ceiling);
    agent.vram_files().unlock_with(arguments.identities);
    let server = Arc::new(Server {
        agent,
        hello,
        report: arguments.report,
        limits: Limits::default(),
    });
    let code = match server.run(&listener, std::io::stdin().as_fd()) {
        Ok(AgentOutcome::RollbackFailed) => 2,
        Ok(_) => 0,
        Err(error) => {
            tracing::error!("{error}");
            2
        }
    };
    // A thread may still be in the driver, whose handlers of `exit` would meet it there.
    // SAFETY: ends this process, which has written all that it writes.
    unsafe { libc::_exit(code) }
}
