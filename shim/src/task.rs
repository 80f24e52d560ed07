//! Changes calls of the task service.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use containerd_shim::api::{
    CheckpointTaskRequest, ConnectRequest, ConnectResponse, CreateTaskRequest, CreateTaskResponse,
    DeleteRequest, KillRequest, PidsRequest, ResumeRequest, ShutdownRequest, StartRequest,
    StateRequest, StateResponse, WaitRequest,
};
use containerd_shim::protos::protobuf::well_known_types::any::Any;
use containerd_shim::protos::protobuf::well_known_types::timestamp::Timestamp;
use containerd_shim::protos::protobuf::{Message, MessageField};
use containerd_shim::protos::ttrpc::{Code, Request, Response};

use crate::cleanup::StatePlace;
use crate::container::{HeldCall, KnownContainer, PackedCheckpoint};
use crate::criu::{self, WrittenImages};
use crate::options::{DEFAULT_LOW_LEVEL, DEFAULT_ROOT};
use crate::record::{self, Record};
use crate::restore::{self, Restoring, WantedRestore};
use crate::ttrpc::address::Address;
use crate::ttrpc::responses::{self, KILLED, Pid, done, ended, names_a_process, reason};
use crate::{options, stock, ttrpc::rpc};
use cryopod_archive::format::names;
use cryopod_host::cgroups::Cgroups;
use cryopod_host::files::Host;
use cryopod_host::limited;
use cryopod_host::processes::stat::Stat;
use cryopod_host::spec::Spec;

/// The log that the stock shim makes the runtime write, in the bundle.
const LOG: &str = "log.json";
/// A file that no unpacked tar has: to containerd the name means that `cryopod` is to be removed. It makes a
/// checkpoint's tar differ from the one that docker packs of the same checkpoint at a restore. docker 26 refuses
/// identical ones.
const NOT_THE_SAME: &str = ".wh.cryopod";

/// The annotation of a container that exits after each checkpoint, unless the engine states otherwise.
const EXIT_ANNOTATION: &str = "dev.cryopod.checkpoint.exit";
/// runc's options of a checkpoint; field 1 is `exit`.
const EXIT_TYPE: &str = "containerd.runc.v1.CheckpointOptions";
const EXIT: [u8; 2] = [1 << 3, 1];

/// Time limit for the stock shim to resume a container, and for cryopod-runtime to pause one.
const RESUME: Duration = Duration::from_secs(30);
/// Time limit for the stock shim to report the state of a container whose restore it is giving up.
const STATE: Duration = Duration::from_secs(30);
/// Time for a container's processes to end when CRIU has, and the interval between two looks.
const EXIT_NOTICE: Duration = Duration::from_secs(1);
const EXIT_PAUSE: Duration = Duration::from_millis(20);
/// Interval between two looks for a CRIU that works.
const CRIU_PAUSE: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub enum Fate {
    /// Forward it unchanged.
    Pass,
    /// Forward this instead.
    Changed(Request),
    /// Send this response without forwarding.
    Answered(Response),
    /// Hold it until the container with this id runs or is given up.
    Held(String),
}

/// A call whose response is decoded.
#[derive(Debug)]
pub struct Watched {
    call: TaskCall,
    pub id: String,
    /// The length of the runtime's log before the call.
    log_bytes: u64,
    _readers: Vec<File>,
    /// containerd, started again, decides whether the task stays: it asks first on a connection that did not create it.
    pub loads: bool,
}

impl Watched {
    /// Notes which containers containerd has by a connection, and [`Self::loads`].
    pub fn note(&mut self, taken: &mut HashSet<String>) {
        if matches!(self.call, TaskCall::Create | TaskCall::Pids) {
            let is_new = taken.insert(self.id.clone());
            self.loads = is_new && matches!(self.call, TaskCall::Pids);
        }
    }

    /// Returns the checkpoint that this call asks for, if containerd packs its images. Those in a directory that the user
    /// names (`ctr tasks checkpoint --image-path`) stay there.
    pub fn checkpoint(&self) -> Option<PackedCheckpoint> {
        match &self.call {
            TaskCall::Checkpoint(images) if restore::is_containerds(&images.path) => {
                Some(PackedCheckpoint {
                    id: self.id.clone(),
                    images: images.path.clone(),
                    succeeded: false,
                })
            }
            _ => None,
        }
    }
}

#[derive(Debug)]
enum TaskCall {
    Create,
    Start,
    State,
    Connect,
    Pids,
    Checkpoint(WrittenImages),
    Delete,
    /// The request, for a second try.
    Resume(Vec<u8>),
}

pub struct Tasks {
    /// cryopod-runtime; `None`: containers keep the runtime that their engine names.
    runtime: Option<PathBuf>,
    upstream: Address,
    /// containerd's namespace. A shim has containers of only one; containerd 1.7 does not state it in its calls.
    namespace: String,
    /// The one with which the stock shim was started. `start` passes it to this process too.
    low_level: String,
    /// This program's standard error leads nowhere.
    log: PathBuf,
    containers: Mutex<HashMap<String, KnownContainer>>,
}

impl Tasks {
    /// `runtime`: cryopod-runtime; `None`: containers keep the runtime that their engine names. `namespace`:
    /// containerd's.
    pub fn new(runtime: Option<PathBuf>, upstream: Address, namespace: &str) -> Self {
        Self {
            runtime,
            upstream,
            namespace: namespace.into(),
            low_level: stock::inherited_low_level().to_string_lossy().into_owned(),
            log: names::DETACHED_LOG.into(),
            containers: Mutex::default(),
        }
    }

    /// Decides what happens to a request, and what of its response must be decoded.
    pub fn request(&self, request: &Request) -> (Fate, Option<Watched>) {
        if !rpc::TASK_SERVICES.contains(&request.service.as_str()) {
            return (Fate::Pass, None);
        }
        if request.method == "Create" {
            return match self.create(request) {
                Ok((changed, id)) => (Fate::Changed(changed), self.watched(TaskCall::Create, id)),
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
            Some(w) if matches!(w.call, TaskCall::Checkpoint(_)) => {
                match self.checkpoint(request, w) {
                    answered @ Fate::Answered(_) => (answered, None),
                    fate => (fate, watched),
                }
            }
            _ => (Fate::Pass, watched),
        }
    }

    /// Changes a response that [`Self::request`] asked for.
    pub fn response(&self, watched: Watched, mut response: Response) -> Response {
        let mut failed = !rpc::succeeded(&response);
        if let (TaskCall::Checkpoint(images), true) = (&watched.call, failed)
            && self.has_ended_with(&watched.id, images)
        {
            response = done();
            failed = false;
        }
        match (&watched.call, failed) {
            (TaskCall::Start | TaskCall::Checkpoint(_), true) => {
                self.explain(&watched, &mut response)
            }
            (TaskCall::Create | TaskCall::Delete, failed) => {
                let removed = matches!(watched.call, TaskCall::Delete) != failed;
                if removed {
                    self.forget(&watched.id);
                } else if !failed {
                    self.answer_pid::<CreateTaskResponse>(&watched.id, &mut response);
                }
            }
            (TaskCall::State, false) => {
                self.answer_pid::<StateResponse>(&watched.id, &mut response);
                self.answer_given_up(&watched.id, &mut response);
            }
            (TaskCall::Connect, false) => {
                self.answer_pid::<ConnectResponse>(&watched.id, &mut response);
            }
            (TaskCall::Pids, failed)
                if watched.loads && (failed || !names_a_process(&response)) =>
            {
                if let Some(answer) = self.pids_of_stopped(&watched.id) {
                    return answer;
                }
            }
            (TaskCall::Resume(request), true) => {
                if let Some(second) = self.resume(&watched.id, request) {
                    return second;
                }
            }
            (TaskCall::Checkpoint(images), false) => {
                self.make_another(&watched.id, &images.path);
            }
            _ => {}
        }
        if matches!(watched.call, TaskCall::Start) {
            self.restored(&watched.id, failed);
        }
        response
    }

    /// Removes the images of a checkpoint that containerd packs no more, unless they may be all that is left.
    pub fn abandoned(&self, checkpoint: &PackedCheckpoint) {
        // It answers when the checkpoint has succeeded or failed.
        let lives = self.state(&checkpoint.id).is_some_and(|s| is_started(&s));
        let after = match lives {
            true => self.after_criu(&checkpoint.id),
            false => AfterCriu::Ended,
        };
        match after {
            AfterCriu::Lives => restore::discard(&checkpoint.images),
            // What a CRIU that hangs has written stays.
            AfterCriu::Ended | AfterCriu::Hangs | AfterCriu::Unanswered => {
                if checkpoint.images.join(names::METADATA).exists() {
                    checkpoint.keep(after == AfterCriu::Hangs, &self.log);
                }
            }
        }
    }

    /// Waits for a CRIU whose runtime was killed: it may complete the images and end the container, of which the stock
    /// shim learns later. Returns what has become of the container.
    fn after_criu(&self, id: &str) -> AfterCriu {
        let start = Instant::now();
        while self.criu_works(id) {
            if start.elapsed() >= criu::ENDS {
                return AfterCriu::Hangs;
            }
            thread::sleep(CRIU_PAUSE);
        }
        let ended = Instant::now();
        loop {
            match self.state(id) {
                None => return AfterCriu::Unanswered,
                // The engine deletes it as soon as it knows: whoever waits for an answer gets it now.
                Some(state) if !is_started(&state) || !has_process(&state) => {
                    return AfterCriu::Ended;
                }
                Some(_) if ended.elapsed() >= EXIT_NOTICE => return AfterCriu::Lives,
                Some(_) => thread::sleep(EXIT_PAUSE),
            }
        }
    }

    /// Returns true if a checkpoint that is said to have failed is complete, and has ended the container: the runtime was
    /// killed after CRIU's end. containerd and docker remove the images of one that failed.
    fn has_ended_with(&self, id: &str, images: &WrittenImages) -> bool {
        // Most failures leave neither, and are answered at once.
        let may_end = images.are_complete() || self.criu_works(id);
        may_end && self.after_criu(id) == AfterCriu::Ended && images.are_complete()
    }

    fn criu_works(&self, id: &str) -> bool {
        let known = self.lock().get(id).map(|c| c.place.criu.clone());
        criu::works(&known.unwrap_or_default())
    }

    /// Handles a call whose connection ended without a response: containerd is gone. The stock shim then ends a restore
    /// that is in progress.
    pub fn lost(&self, watched: &Watched) {
        if !matches!(watched.call, TaskCall::Start) {
            return;
        }
        let restoring = |c: &KnownContainer| c.restoring.is_some();
        if !self.lock().get(&watched.id).is_some_and(restoring) {
            return;
        }
        // It answers when the restore has succeeded or failed.
        let Some(state) = self.state(&watched.id) else {
            return;
        };
        let runs = state.status == containerd_shim::api::Status::RUNNING.into();
        self.restored(&watched.id, !runs);
        if runs {
            return;
        }
        // containerd does not know this container.
        self.delete(&watched.id);
    }

    /// Deletes a task. A shim without other containers exits; containerd notices, now or when it is back.
    fn delete(&self, id: &str) {
        let mut gone = DeleteRequest::new();
        gone.id = id.into();
        let deleted = rpc::task_call(&self.upstream, &self.namespace, "Delete", &gone, STATE);
        if deleted.is_ok_and(|answer| rpc::succeeded(&answer)) {
            self.forget(id);
        }
        let mut end = ShutdownRequest::new();
        end.id = id.into();
        let _ = rpc::task_call(&self.upstream, &self.namespace, "Shutdown", &end, STATE);
    }

    /// Deletes a task whose end containerd has not seen, unless its engine does so meanwhile: the stock shim has told the
    /// exit in vain then. containerd tells it when the shim is gone.
    pub fn tell_end(&self, id: &str, patience: Duration) {
        let unseen = || self.lock().get(id).is_some_and(|c| c.ended_unseen);
        if unseen() {
            thread::sleep(patience);
            if unseen() && self.state(id).is_some() {
                self.delete(id);
            }
        }
    }

    fn state(&self, id: &str) -> Option<StateResponse> {
        let mut request = StateRequest::new();
        request.id = id.into();
        let answer = rpc::task_call(&self.upstream, &self.namespace, "State", &request, STATE);
        StateResponse::parse_from_bytes(&answer.ok()?.payload).ok()
    }

    fn forget(&self, id: &str) {
        let gone = self.lock().remove(id);
        if let Some(mut gone) = gone {
            gone.give_up();
            restore::remove(&gone.bundle);
        }
    }

    /// Handles Wait and Kill of a container that has a pid for the engine, but no process in the stock shim.
    fn pretend(&self, request: &Request) -> Option<Fate> {
        let payload = &request.payload;
        let (id, exec) = match request.method.as_str() {
            "Wait" => {
                let r: WaitRequest = parsed(payload)?;
                (r.id, r.exec_id)
            }
            "Kill" => {
                let r: KillRequest = parsed(payload)?;
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
            return Some(Fate::Answered(done()));
        }
        Some(match container.given_up {
            true => Fate::Answered(ended()),
            false => Fate::Held(id),
        })
    }

    /// Keeps a call until the container runs or is given up.
    pub fn hold(&self, id: &str, held: Box<dyn HeldCall>) {
        match self.lock().get_mut(id) {
            Some(c) if c.given_up => held.answer(ended()),
            Some(c) if c.pretended() => c.waiting.push(held),
            _ => held.pass(),
        }
    }

    /// Handles the end of a restore. After a failure the engine may try again.
    fn restored(&self, id: &str, failed: bool) {
        let remains =
            |c: &KnownContainer| (c.restoring.is_some() && failed).then(|| c.place.clone());
        let place = self.lock().get(id).and_then(remains);
        if let Some(place) = place {
            place.end();
        }
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
        let restoring = container.restoring.take();
        drop(containers);
        if let Some(restoring) = restoring
            && !failed
        {
            restoring.succeeded();
        }
    }

    /// Handles Resume after a failed checkpoint. A checkpoint that was killed, as when containerd dies, may leave the
    /// container running while the stock shim believes it paused: it could neither resume nor exec. So this pauses it
    /// once more, and the stock shim can resume it.
    fn resume(&self, id: &str, request: &[u8]) -> Option<Response> {
        if self.state(id)?.status != containerd_shim::api::Status::PAUSED.into() {
            return None;
        }
        let root = self.lock().get(id)?.place.root.clone();
        let runtime = self.runtime.clone()?;
        let ask = |verb: &str| {
            let mut command = Command::new(&runtime);
            command.arg("--root").arg(&root);
            command.args([verb, id]).stderr(Stdio::null());
            limited::run(&mut command, Some(&[]), RESUME)
        };
        match ask("pause") {
            Ok(said) if said.status.success() => {}
            Ok(_) => return None,
            Err(e) => {
                let says = format!(
                    "cryopod: {id} cannot be resumed: {}: {e}; try again, or end it with SIGKILL",
                    runtime.display()
                );
                return Some(rpc::failure(Code::UNAVAILABLE, says));
            }
        }
        let request = ResumeRequest::parse_from_bytes(request).ok()?;
        let answer = rpc::task_call(&self.upstream, &self.namespace, "Resume", &request, RESUME);
        if !answer.as_ref().is_ok_and(rpc::succeeded) {
            let _ = ask("resume");
        }
        answer.ok()
    }

    /// Answers Pids of a container that has ended: containerd, when it is back, deletes a task without a pid, with the exit
    /// that it has not learnt of. To docker it would run, or be paused, for ever.
    fn pids_of_stopped(&self, id: &str) -> Option<Response> {
        let state = self
            .state(id)
            .filter(|s| s.pid != 0 && !(is_started(s) && has_process(s)))?;
        self.lock().get_mut(id)?.ended_unseen = true;
        Some(responses::process(state.pid))
    }

    /// For docker's checkpoints only.
    fn make_another(&self, id: &str, images: &Path) {
        if self.lock().get(id).is_some_and(|c| c.mounted) {
            let _ = File::create(images.join(NOT_THE_SAME));
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, KnownContainer>> {
        self.containers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes cryopod-runtime the container's OCI runtime.
    fn create(&self, request: &Request) -> Result<(Request, String), String> {
        let mut create = CreateTaskRequest::parse_from_bytes(&request.payload)
            .map_err(|e| format!("containerd's Create request: {e}"))?;
        let mut options = options::decode(create.options.as_ref()).map_err(|e| e.to_string())?;
        let bundle = PathBuf::from(&create.bundle);
        // The runtime reports errors of the spec.
        let spec = Spec::of_bundle(&bundle).unwrap_or_default();
        if let Some(runtime) = &self.runtime {
            options.binary_name = runtime.to_string_lossy().into_owned();
            options.systemd_cgroup |= spec.names_a_slice();
        }
        let or = |named: &str, default: &str| match named {
            "" => PathBuf::from(default),
            named => named.into(),
        };
        let mut place = StatePlace {
            runtime: or(&options.binary_name, DEFAULT_LOW_LEVEL),
            root: or(&options.root, DEFAULT_ROOT).join(&self.namespace),
            id: create.id.clone(),
            cgroups: Cgroups::default(),
            criu: criu::directories(&bundle, &options.criu_work_path),
        };
        create.options = MessageField::some(options::encode(&options).map_err(|e| e.to_string())?);
        // Since 2.0 containerd does not call `start`, which writes this too, for a further container of a pod.
        let record = Record {
            upstream: self.upstream.clone(),
            address: Address::for_upstream(&self.upstream),
            low_level: self.low_level.clone(),
            root: Some(options.root.clone()).filter(|r| !r.is_empty()),
        };
        record.write(&bundle).map_err(|e| {
            let file = bundle.join(record::FILE);
            format!("{}: cannot be written: {e}", file.display())
        })?;
        let named = !options.criu_image_path.is_empty();
        // Other engines connect networks with hooks, or have a namespace ready.
        let mounted = create.rootfs.is_empty();
        let mut restoring = None;
        if !create.checkpoint.is_empty() {
            if place.directory().exists() {
                return Err(format!(
                    "{} is there: the runtime has a container of this name already; delete that first",
                    place.directory().display()
                ));
            }
            let wanted = WantedRestore {
                bundle: &bundle,
                images: Path::new(&create.checkpoint),
                named,
                network: mounted,
            };
            place.cgroups = spec
                .cgroup(&create.id)
                .map(|path| Cgroups::vacant(&Host::system(), path))
                .unwrap_or_default();
            restoring = Some(Restoring::new(wanted).map_err(|e| e.to_string())?);
        }
        let mut changed = request.clone();
        changed.payload = create.write_to_bytes().map_err(|e| e.to_string())?;
        let container = KnownContainer {
            bundle,
            place,
            outputs: [create.stdout.clone(), create.stderr.clone()],
            mounted,
            restoring,
            given_up: false,
            ended_unseen: false,
            waiting: Vec::new(),
        };
        self.lock().insert(create.id.clone(), container);
        Ok((changed, create.id))
    }

    /// docker and ctr 1.7 send checkpoint options only to runtimes with containerd's own name. Without options the
    /// container continues to run, unless its annotation says otherwise.
    fn checkpoint(&self, request: &Request, watched: &Watched) -> Fate {
        let decided = || {
            let mut checkpoint = CheckpointTaskRequest::parse_from_bytes(&request.payload).ok()?;
            let bundle = self.lock().get(&watched.id)?.bundle.clone();
            if checkpoint.options.is_some() {
                return None;
            }
            match Spec::of_bundle(&bundle).ok()?.switch(EXIT_ANNOTATION) {
                Ok(Some(true)) => {}
                Ok(_) => return None,
                Err(e) => {
                    let said = format!("cryopod: {e}. Nothing was touched");
                    let answer = rpc::failure(Code::INVALID_ARGUMENT, said);
                    return Some(Fate::Answered(answer));
                }
            }
            let mut any = Any::new();
            any.type_url = EXIT_TYPE.into();
            any.value = EXIT.to_vec();
            checkpoint.options = MessageField::some(any);
            let mut changed = request.clone();
            changed.payload = checkpoint.write_to_bytes().ok()?;
            Some(Fate::Changed(changed))
        };
        decided().unwrap_or(Fate::Pass)
    }

    /// Returns what to remember of a call if its response must be decoded.
    fn watch(&self, request: &Request) -> Option<Watched> {
        let payload = &request.payload;
        let (call, id, exec) = match request.method.as_str() {
            "Start" => parsed(payload).map(|r: StartRequest| (TaskCall::Start, r.id, r.exec_id))?,
            "State" => parsed(payload).map(|r: StateRequest| (TaskCall::State, r.id, r.exec_id))?,
            "Delete" => {
                parsed(payload).map(|r: DeleteRequest| (TaskCall::Delete, r.id, r.exec_id))?
            }
            "Connect" => {
                let r: ConnectRequest = parsed(payload)?;
                (TaskCall::Connect, r.id, String::new())
            }
            "Pids" => {
                parsed(payload).map(|r: PidsRequest| (TaskCall::Pids, r.id, String::new()))?
            }
            "Checkpoint" => {
                let r: CheckpointTaskRequest = parsed(payload)?;
                (
                    TaskCall::Checkpoint(WrittenImages::new(r.path.into())),
                    r.id,
                    String::new(),
                )
            }
            "Resume" => {
                let r: ResumeRequest = parsed(payload)?;
                (TaskCall::Resume(payload.clone()), r.id, String::new())
            }
            _ => return None,
        };
        self.watched(call, id).filter(|_| exec.is_empty())
    }

    fn watched(&self, call: TaskCall, id: String) -> Option<Watched> {
        let containers = self.lock();
        let container = containers.get(&id)?;
        let log = container.bundle.join(LOG);
        let readers = match call {
            TaskCall::Create | TaskCall::Start => container.readers(),
            _ => Vec::new(),
        };
        Some(Watched {
            call,
            id,
            log_bytes: log.metadata().map_or(0, |m| m.len()),
            _readers: readers,
            loads: false,
        })
    }

    /// A container that is not restored yet has no process. Engines that need a pid get that of its network holder.
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

    /// Adds cryopod-runtime's error from the log. The stock shim passes on only the first line of a failed runtime,
    /// which is from the low-level runtime.
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

/// What has become of a container when its CRIU has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AfterCriu {
    Lives,
    Ended,
    /// CRIU works on.
    Hangs,
    /// The stock shim does not say.
    Unanswered,
}

fn is_started(state: &StateResponse) -> bool {
    use containerd_shim::api::Status::{PAUSED, RUNNING};
    state.status == RUNNING.into() || state.status == PAUSED.into()
}

/// Returns true if the container's first process is there, and not exiting.
fn has_process(state: &StateResponse) -> bool {
    let pid = i32::try_from(state.pid).ok();
    let process = pid.and_then(|pid| Stat::read(&Host::system(), pid));
    process.is_some_and(|process| !process.exiting)
}

fn parsed<M: Message>(payload: &[u8]) -> Option<M> {
    M::parse_from_bytes(payload).ok()
}

#[cfg(test)]
#[path = "task_tests.rs"]
mod tests;
