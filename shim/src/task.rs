//! What is changed in the calls of the task service.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use containerd_shim::api::{
    CheckpointTaskRequest, ConnectRequest, ConnectResponse, CreateTaskRequest, CreateTaskResponse,
    DeleteRequest, KillRequest, ResumeRequest, StartRequest, StateRequest, StateResponse,
    WaitRequest, WaitResponse,
};
use containerd_shim::protos::protobuf::well_known_types::any::Any;
use containerd_shim::protos::protobuf::well_known_types::timestamp::Timestamp;
use containerd_shim::protos::protobuf::{Message, MessageField};
use containerd_shim::protos::ttrpc::{Code, Request, Response, Status};

use crate::address::Address;
use crate::lifecycle::DEFAULT_ROOT;
use crate::restore::{self, Restoring, Wanted};
use crate::{options, proxy, rpc};

/// The log that the stock shim has the runtime write, in the bundle.
const LOG: &str = "log.json";
/// The most of it that one call writes.
const MAX_LOG_BYTES: u64 = 256 << 10;
/// A file that no unpacked tar has: for containerd the name says that `cryopod` is to be removed. It makes a checkpoint's
/// tar another than the one that docker packs of the same checkpoint at a restore. docker 26 refuses the same.
const NOT_THE_SAME: &str = ".wh.cryopod";

/// The annotation of a container that ends with each checkpoint whose engine says nothing of it.
const EXIT_ANNOTATION: &str = "dev.cryopod.checkpoint.exit";
/// runc's options of a checkpoint; field 1 is `exit`.
const EXIT_TYPE: &str = "containerd.runc.v1.CheckpointOptions";
const EXIT: [u8; 2] = [1 << 3, 1];

/// How long the stock shim may take to resume a container.
const RESUME: Duration = Duration::from_secs(30);
/// Exit code after SIGKILL.
const KILLED: u32 = 137;

/// What becomes of a request.
#[derive(Debug)]
pub enum Fate {
    /// It goes on as it came.
    Pass,
    /// It goes on like this.
    Changed(Request),
    /// It does not go on; this is the answer.
    Answered(Response),
    /// It waits: for the container to run, or to be given up. Its id.
    Held(String),
}

/// A call that is held; dropped, nobody answers it.
pub trait Held: Send {
    /// It goes on as it came.
    fn pass(self: Box<Self>);
    /// It does not go on; this is the answer.
    fn answer(self: Box<Self>, response: Response);
}

/// A call whose answer is looked at.
#[derive(Debug)]
pub struct Watched {
    call: Call,
    id: String,
    /// How long the runtime's log was.
    log_bytes: u64,
}

#[derive(Debug)]
enum Call {
    Create,
    Start,
    State,
    Connect,
    Checkpoint(PathBuf),
    Delete,
    /// The request, for a second try; containerd's namespace.
    Resume(Vec<u8>, String),
}

/// A container of this shim.
struct Container {
    bundle: PathBuf,
    /// Where the runtime keeps it, but for containerd's namespace.
    root: PathBuf,
    /// The engine has mounted its root file system, as docker does.
    mounted: bool,
    /// It comes from a checkpoint, and does not run yet.
    restoring: Option<Restoring>,
    /// The engine has given it up before it ran.
    given_up: bool,
    /// Who waits for its end.
    waiting: Vec<Box<dyn Held>>,
}

impl Container {
    /// Has the engine been told of a process that the stock shim does not know?
    fn pretended(&self) -> bool {
        self.restoring.as_ref().is_some_and(|r| r.pid().is_some())
    }

    /// It ends before it ran. containerd waits for the end of whatever has a pid, and here nothing ends.
    fn give_up(&mut self) {
        self.given_up = true;
        for held in self.waiting.drain(..) {
            held.answer(ended());
        }
    }
}

/// The answer to Wait for a container that never ran.
fn ended() -> Response {
    let mut wait = WaitResponse::new();
    wait.exit_status = KILLED;
    wait.exited_at = MessageField::some(Timestamp::now());
    let mut response = Response::new();
    response.set_status(Status::new());
    response.payload = wait.write_to_bytes().unwrap_or_default();
    response
}

/// The containers of this shim, as far as they matter here.
pub struct Tasks {
    /// cryopod-runtime; `None`: containers keep the one that their engine names.
    runtime: Option<PathBuf>,
    upstream: Address,
    containers: Mutex<HashMap<String, Container>>,
}

impl Tasks {
    /// `runtime`: cryopod-runtime; `None`: containers keep the one that their engine names.
    pub fn new(runtime: Option<PathBuf>, upstream: Address) -> Self {
        Self {
            runtime,
            upstream,
            containers: Mutex::default(),
        }
    }

    /// Looks at a request of containerd's.
    pub fn request(&self, request: &Request) -> (Fate, Option<Watched>) {
        if !rpc::TASK_SERVICES.contains(&request.service.as_str()) {
            return (Fate::Pass, None);
        }
        if request.method == "Create" {
            return match self.create(request) {
                Ok((changed, id)) => (Fate::Changed(changed), self.watched(Call::Create, id)),
                Err(e) => {
                    let answer = rpc::failure(Code::INVALID_ARGUMENT, format!("cryopod: {e}"));
                    (Fate::Answered(answer), None)
                }
            };
        }
        if let Some(fate) = self.pretend(request) {
            return (fate, None);
        }
        let watched = self.watch(request);
        match &watched {
            Some(w) if matches!(w.call, Call::Checkpoint(_)) => {
                (self.checkpoint(request, w), watched)
            }
            _ => (Fate::Pass, watched),
        }
    }

    /// Looks at the answer to a call.
    pub fn response(&self, watched: Watched, mut response: Response) -> Response {
        let failed = !rpc::succeeded(&response);
        match (&watched.call, failed) {
            (Call::Start | Call::Checkpoint(_), true) => self.explain(&watched, &mut response),
            (Call::Create | Call::Delete, failed) => {
                let removed = matches!(watched.call, Call::Delete) != failed;
                if removed && let Some(mut gone) = self.lock().remove(&watched.id) {
                    gone.give_up();
                    restore::remove(&gone.bundle);
                } else if !failed {
                    self.answer_pid::<CreateTaskResponse>(&watched.id, &mut response);
                }
            }
            (Call::State, false) => {
                self.answer_pid::<StateResponse>(&watched.id, &mut response);
                self.answer_given_up(&watched.id, &mut response);
            }
            (Call::Connect, false) => {
                self.answer_pid::<ConnectResponse>(&watched.id, &mut response);
            }
            (Call::Resume(request, namespace), true) => {
                if let Some(second) = self.resume(&watched.id, request, namespace) {
                    return second;
                }
            }
            (Call::Checkpoint(images), false) => self.make_another(&watched.id, images),
            _ => {}
        }
        if matches!(watched.call, Call::Start) {
            self.restored(&watched.id, failed);
        }
        response
    }

    /// Wait and Kill of a container that has a pid for the engine, and no process for the stock shim.
    fn pretend(&self, request: &Request) -> Option<Fate> {
        let (id, exec) = match request.method.as_str() {
            "Wait" => {
                let r = WaitRequest::parse_from_bytes(&request.payload).ok()?;
                (r.id, r.exec_id)
            }
            "Kill" => {
                let r = KillRequest::parse_from_bytes(&request.payload).ok()?;
                (r.id, r.exec_id)
            }
            _ => return None,
        };
        let mut containers = self.lock();
        let container = containers.get_mut(&id)?;
        if !exec.is_empty() || !container.pretended() {
            return None;
        }
        if request.method == "Kill" {
            container.give_up();
            let mut done = Response::new();
            done.set_status(Status::new());
            return Some(Fate::Answered(done));
        }
        Some(match container.given_up {
            true => Fate::Answered(ended()),
            false => Fate::Held(id),
        })
    }

    /// Keeps a call until the container runs or is given up.
    pub fn hold(&self, id: &str, held: Box<dyn Held>) {
        match self.lock().get_mut(id) {
            Some(c) if c.given_up => held.answer(ended()),
            Some(c) if c.pretended() => c.waiting.push(held),
            _ => held.pass(),
        }
    }

    /// The restore has ended; the engine may ask once more for the one that failed.
    fn restored(&self, id: &str, failed: bool) {
        let mut containers = self.lock();
        let Some(container) = containers.get_mut(id) else {
            return;
        };
        if failed && container.pretended() {
            return;
        }
        for held in container.waiting.drain(..) {
            held.pass();
        }
        if let Some(restoring) = container.restoring.take()
            && !failed
        {
            // Large images take their time; containerd need not wait for it.
            let _ = proxy::spawn("images", move || restoring.succeeded());
        }
    }

    /// A checkpoint that was killed, as containerd's death does, may leave a container running that the stock shim had
    /// paused and believes paused: it could neither be resumed nor get an exec. It is paused once more, for the stock
    /// shim to resume.
    fn resume(&self, id: &str, request: &[u8], namespace: &str) -> Option<Response> {
        let root = self.lock().get(id)?.root.join(namespace);
        let runtime = self.runtime.clone()?;
        let paused = Command::new(runtime)
            .arg("--root")
            .arg(root)
            .args(["pause", id])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        if !paused.is_ok_and(|status| status.success()) {
            return None;
        }
        let request = ResumeRequest::parse_from_bytes(request).ok()?;
        rpc::task_call(&self.upstream, namespace, "Resume", &request, RESUME).ok()
    }

    /// docker's checkpoints only.
    fn make_another(&self, id: &str, images: &Path) {
        if self.lock().get(id).is_some_and(|c| c.mounted) {
            let _ = File::create(images.join(NOT_THE_SAME));
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Container>> {
        self.containers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The container's OCI runtime is cryopod-runtime.
    fn create(&self, request: &Request) -> Result<(Request, String), String> {
        let mut create = CreateTaskRequest::parse_from_bytes(&request.payload)
            .map_err(|e| format!("containerd's Create request: {e}"))?;
        let mut options = options::decode(create.options.as_ref()).map_err(|e| e.to_string())?;
        let bundle = PathBuf::from(&create.bundle);
        if let Some(runtime) = &self.runtime {
            options.binary_name = runtime.to_string_lossy().into_owned();
            options.systemd_cgroup |= names_a_slice(&bundle);
        }
        let root = match options.root.as_str() {
            "" => DEFAULT_ROOT.into(),
            root => PathBuf::from(root),
        };
        create.options = MessageField::some(options::encode(&options).map_err(|e| e.to_string())?);
        let named = !options.criu_image_path.is_empty();
        // Other engines connect networks by hooks, or have a namespace ready.
        let mounted = create.rootfs.is_empty();
        let mut restoring = None;
        if !create.checkpoint.is_empty() {
            let wanted = Wanted {
                bundle: &bundle,
                images: Path::new(&create.checkpoint),
                named,
                network: mounted,
            };
            restoring = Some(Restoring::new(wanted).map_err(|e| e.to_string())?);
        }
        let mut changed = request.clone();
        changed.payload = create.write_to_bytes().map_err(|e| e.to_string())?;
        let container = Container {
            bundle,
            root,
            mounted,
            restoring,
            given_up: false,
            waiting: Vec::new(),
        };
        self.lock().insert(create.id.clone(), container);
        Ok((changed, create.id))
    }

    /// docker, and ctr 1.7, send options of a checkpoint to runtimes of containerd's own name alone; without any the
    /// container goes on running, unless its annotation says otherwise.
    fn checkpoint(&self, request: &Request, watched: &Watched) -> Fate {
        let changed = || {
            let mut checkpoint = CheckpointTaskRequest::parse_from_bytes(&request.payload).ok()?;
            let bundle = self.lock().get(&watched.id)?.bundle.clone();
            if checkpoint.options.is_some() || !exits(&bundle) {
                return None;
            }
            let mut any = Any::new();
            any.type_url = EXIT_TYPE.into();
            any.value = EXIT.to_vec();
            checkpoint.options = MessageField::some(any);
            let mut changed = request.clone();
            changed.payload = checkpoint.write_to_bytes().ok()?;
            Some(changed)
        };
        changed().map_or(Fate::Pass, Fate::Changed)
    }

    /// Is the answer to this one to be looked at?
    fn watch(&self, request: &Request) -> Option<Watched> {
        let payload = &request.payload;
        let (call, id, exec) = match request.method.as_str() {
            "Start" => {
                let r = StartRequest::parse_from_bytes(payload).ok()?;
                (Call::Start, r.id, r.exec_id)
            }
            "State" => {
                let r = StateRequest::parse_from_bytes(payload).ok()?;
                (Call::State, r.id, r.exec_id)
            }
            "Connect" => {
                let r = ConnectRequest::parse_from_bytes(payload).ok()?;
                (Call::Connect, r.id, String::new())
            }
            "Checkpoint" => {
                let r = CheckpointTaskRequest::parse_from_bytes(payload).ok()?;
                (Call::Checkpoint(r.path.into()), r.id, String::new())
            }
            "Delete" => {
                let r = DeleteRequest::parse_from_bytes(payload).ok()?;
                (Call::Delete, r.id, r.exec_id)
            }
            "Resume" => {
                let r = ResumeRequest::parse_from_bytes(payload).ok()?;
                let namespace = rpc::namespace(request).unwrap_or_default().to_owned();
                (
                    Call::Resume(payload.clone(), namespace),
                    r.id,
                    String::new(),
                )
            }
            _ => return None,
        };
        if exec.is_empty() {
            self.watched(call, id)
        } else {
            None
        }
    }

    fn watched(&self, call: Call, id: String) -> Option<Watched> {
        let containers = self.lock();
        let container = containers.get(&id)?;
        let log = container.bundle.join(LOG);
        Some(Watched {
            call,
            id,
            log_bytes: log.metadata().map_or(0, |m| m.len()),
        })
    }

    /// A container that is yet to be restored has no process; engines that want one get the holder of its network.
    fn answer_pid<M: Pid>(&self, id: &str, response: &mut Response) {
        let pid = self
            .lock()
            .get(id)
            .and_then(|c| c.restoring.as_ref()?.pid());
        let Some(pid) = pid else { return };
        let Ok(mut answer) = M::parse_from_bytes(&response.payload) else {
            return;
        };
        if *answer.pid() == 0 {
            *answer.pid() = pid;
            if let Ok(bytes) = answer.write_to_bytes() {
                response.payload = bytes;
            }
        }
    }

    fn answer_given_up(&self, id: &str, response: &mut Response) {
        if !self.lock().get(id).is_some_and(|c| c.given_up) {
            return;
        }
        let Ok(mut state) = StateResponse::parse_from_bytes(&response.payload) else {
            return;
        };
        state.status = containerd_shim::api::Status::STOPPED.into();
        state.exit_status = KILLED;
        state.exited_at = MessageField::some(Timestamp::now());
        if let Ok(bytes) = state.write_to_bytes() {
            response.payload = bytes;
        }
    }

    /// The stock shim passes on the first line that a failed runtime says, which is the low-level runtime's. What
    /// cryopod-runtime says of it stands in the log.
    fn explain(&self, watched: &Watched, response: &mut Response) {
        let bundle = self.lock().get(&watched.id).map(|c| c.bundle.clone());
        let Some(reason) = bundle.and_then(|b| reason(&b.join(LOG), watched.log_bytes)) else {
            return;
        };
        if let Some(status) = response.status.as_mut()
            && !status.message().contains(&reason)
        {
            status.set_message(format!("{reason} ({})", status.message()));
        }
    }
}

/// The last error of cryopod's in a runtime's log, from an offset on.
fn reason(log: &Path, from: u64) -> Option<String> {
    #[derive(serde::Deserialize)]
    struct Line {
        level: String,
        msg: String,
    }
    let mut file = File::open(log).ok()?;
    file.seek(SeekFrom::Start(from)).ok()?;
    let mut text = Vec::new();
    file.take(MAX_LOG_BYTES).read_to_end(&mut text).ok()?;
    let lines = text.split(|b| *b == b'\n').rev();
    let mut lines = lines.filter_map(|l| serde_json::from_slice::<Line>(l).ok());
    lines
        .find(|l| l.level == "error" && l.msg.starts_with("cryopod: "))
        .map(|l| l.msg)
}

/// An answer with a pid.
trait Pid: Message {
    fn pid(&mut self) -> &mut u32;
}
impl Pid for CreateTaskResponse {
    fn pid(&mut self) -> &mut u32 {
        &mut self.pid
    }
}
impl Pid for StateResponse {
    fn pid(&mut self) -> &mut u32 {
        &mut self.pid
    }
}
impl Pid for ConnectResponse {
    fn pid(&mut self) -> &mut u32 {
        &mut self.task_pid
    }
}

/// Is the container to end with a checkpoint whose engine does not say?
fn exits(bundle: &Path) -> bool {
    #[derive(serde::Deserialize)]
    struct Spec {
        #[serde(default)]
        annotations: HashMap<String, String>,
    }
    std::fs::read(bundle.join("config.json"))
        .ok()
        .and_then(|bytes| serde_json::from_slice::<Spec>(&bytes).ok())
        .is_some_and(|spec| {
            spec.annotations
                .get(EXIT_ANNOTATION)
                .is_some_and(|v| v == "on")
        })
}

/// Is the container's cgroup written as systemd's (`SLICE:PREFIX:NAME`)? docker tells its cgroup driver only to
/// runtimes that it knows by name.
fn names_a_slice(bundle: &Path) -> bool {
    #[derive(serde::Deserialize)]
    struct Spec {
        linux: Option<Linux>,
    }
    #[derive(serde::Deserialize)]
    struct Linux {
        #[serde(rename = "cgroupsPath")]
        cgroups_path: Option<String>,
    }
    let path = std::fs::read(bundle.join("config.json"))
        .ok()
        .and_then(|bytes| serde_json::from_slice::<Spec>(&bytes).ok())
        .and_then(|spec| spec.linux?.cgroups_path);
    path.is_some_and(|path| {
        let mut parts = path.split(':');
        parts.next().is_some_and(|slice| slice.ends_with(".slice")) && parts.count() == 2
    })
}

#[cfg(test)]
#[path = "task_tests.rs"]
mod tests;
