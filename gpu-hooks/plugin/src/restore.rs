//! Runs `criu restore`: the driver's restore of every process at once, then unlock.
//!
//! CRIU calls RESUME_DEVICES_LATE for each process when the whole tree is rebuilt and stopped. The first call finds
//! every recorded process in the restored tree and restores all at once.
//!
//! CRIU ignores what this hook returns (4.1 and 4.2 alike) and would run a container whose GPU state is lost. So on an
//! error the restored processes are killed: CRIU then fails to resume them, and reports the restore as failed.

use crate::criu::{self, Level};
use crate::preload_steps::library_thread;
use crate::session::{
    CudaThread, Failed, Session, failure, failure_with, record_of, reply_failure,
};
use cryopod_cuda::gpus::gpu::{GpuUuid, mapped};
use cryopod_cuda::messages::image::{FILE_NAME, MAX_BYTES, NvidiaImage, Step, StepTiming};
use cryopod_cuda::messages::protocol::{Op, Outcome, ProcessState};
use cryopod_cuda::procfs;
use cryopod_cuda::vram::{SharedBuffer, WantedRegion};
use std::collections::HashMap;
use std::time::{Duration, Instant};

use cryopod_host::cgroups;
use cryopod_host::files::{Host, if_there, read_bounded_from};
use cryopod_host::limited::wait_until;

const KILL_LIMIT: Duration = Duration::from_secs(20);

pub struct Restore {
    pub session: Session,
    done: bool,
    killed: bool,
    /// The agent's memory for each region of the VRAM files.
    vram: HashMap<String, SharedBuffer>,
}

/// Reads the image from CRIU's image directory; `None` when there is none.
pub fn read_image() -> Result<Option<NvidiaImage>, Failed> {
    let failed = |cause: String| failure("image", None, cause);
    let path = criu::image_path(FILE_NAME)
        .ok_or_else(|| failed("CRIU does not tell its image directory".into()))?;
    let opened = if_there(std::fs::File::open(&path));
    let opened = opened.map_err(|error| failed(format!("cannot open {FILE_NAME}: {error}")))?;
    let Some(file) = opened else {
        return Ok(None);
    };
    let bytes = read_bounded_from(file, MAX_BYTES)
        .map_err(|error| failed(format!("cannot read {FILE_NAME}: {error}")))?;
    NvidiaImage::parse(&bytes)
        .map(Some)
        .map_err(|error| failed(error.to_string()))
}

impl Restore {
    /// Fails early when the agent cannot be reached.
    pub fn new(mut session: Session) -> Result<Self, Failed> {
        for record in &mut session.image.processes {
            // The times and the host pid were the dump's.
            record.steps.clear();
            record.host_pid = 0;
        }
        let mut vram = HashMap::new();
        if !session.image.processes.is_empty() {
            session.connect()?;
            prepare_gpus(&mut session)?;
            vram = load_vram(&mut session)?;
            // Not kept: CRIU's children would inherit it.
            session.disconnect();
        }
        Ok(Self {
            session,
            done: false,
            killed: false,
            vram,
        })
    }

    /// RESUME_DEVICES_LATE.
    pub fn resume(&mut self, pid: i32) -> Result<(), Failed> {
        if let Some(failed) = self.session.failed() {
            return Err(Box::new(failed.clone()));
        }
        if self.done || self.session.image.processes.is_empty() {
            return Ok(());
        }
        self.done = true;
        let tree = ProcessTree::of(pid)?;
        self.resume_all(&tree)
    }

    /// Kills the processes after a failure, whatever its cause: nothing of the container may run.
    pub fn kill(&mut self, root: i32) -> Result<(), Failed> {
        if std::mem::replace(&mut self.killed, true) {
            return Ok(());
        }
        kill_tree(root)
    }

    fn resume_all(&mut self, tree: &ProcessTree) -> Result<(), Failed> {
        let mut work = Vec::new();
        for record in &mut self.session.image.processes {
            let pid = *tree.pids.get(&record.ns_pids).ok_or_else(|| {
                let what = format!(
                    "process {:?} ({}) is not among the restored ones",
                    record.ns_pids, record.comm
                );
                failure_with("restore", None, what, "the images do not belong together")
            })?;
            record.host_pid = pid;
            if record.initial_state != ProcessState::Checkpointed {
                work.push(pid);
            }
        }
        if work.is_empty() {
            return Ok(());
        }
        self.session.connect()?;
        let threads = self.session.find(&work)?;
        if let Some(pid) = work
            .iter()
            .find(|pid| !threads.iter().any(|t| t.pid == **pid))
        {
            let what = "the driver does not recognise the restored process";
            let remedy = "this host's driver must be able to restore that of the checkpoint";
            return Err(failure_with("restore", Some(*pid), what, remedy));
        }
        self.preloads_are_there()?;
        self.vram_in(&threads)?;
        let limit_ms = self.session.config.step_timeout_ms;
        let gpu_map = self.session.config.gpu_map.clone();
        self.step(Step::Restore, &threads, |pid| Op::Restore {
            pid,
            gpu_map: gpu_map.clone(),
            limit_ms,
        })?;
        let running: Vec<i32> = self
            .session
            .image
            .processes
            .iter()
            .filter(|record| record.initial_state == ProcessState::Running)
            .map(|record| record.host_pid)
            .collect();
        let unlock: Vec<CudaThread> = threads
            .into_iter()
            .filter(|thread| running.contains(&thread.pid))
            .collect();
        self.step(Step::Unlock, &unlock, |pid| Op::Unlock { pid, limit_ms })?;
        self.preload_in(&running)?;
        self.all_is_read()?;
        // It is on the GPU, and the driver has unmapped its part.
        for buffer in std::mem::take(&mut self.vram).into_values() {
            self.session.vram_drop(buffer.id);
        }
        Ok(())
    }

    /// Fails if a process lacks the preload library to which its GPU memory belongs: the driver does not have it.
    fn preloads_are_there(&self) -> Result<(), Failed> {
        let processes = &self.session.image.processes;
        let mut with = processes
            .iter()
            .filter(|r| r.vram.iter().any(|b| b.preload));
        with.try_for_each(|record| library_thread(record.host_pid).map(drop))
    }

    /// Gives the preload libraries of running processes their GPU memory.
    fn preload_in(&mut self, running: &[i32]) -> Result<(), Failed> {
        let mut memory = Vec::new();
        for record in &self.session.image.processes {
            let pid = record.host_pid;
            for buffer in record.vram.iter().filter(|buffer| buffer.preload) {
                let what = "its GPU memory was not read, or it was not running";
                let shared = self.vram.get(&buffer.region);
                let shared = shared.filter(|_| running.contains(&pid));
                let shared = shared.ok_or_else(|| failure("preload", Some(pid), what))?;
                memory.push((pid, shared.id));
            }
        }
        if memory.is_empty() {
            return Ok(());
        }
        let times = self.session.preload_in(&memory)?;
        for (pid, micros) in times {
            if let Some(record) = record_of(&mut self.session.image.processes, pid) {
                let step = Step::Preload;
                record.steps.push(StepTiming { step, micros });
            }
            let what = format!(
                "process {pid}: GPU memory copied back in {} ms",
                micros / 1000
            );
            criu::log(Level::Info, &what);
        }
        Ok(())
    }

    /// Maps the memory of the VRAM files into the processes. The driver may then begin: what it touches too early is
    /// waited for, or all has been read.
    fn vram_in(&mut self, threads: &[CudaThread]) -> Result<(), Failed> {
        if self.vram.is_empty() {
            return Ok(());
        }
        let (mut all_wait, mut drivers) = (true, Vec::new());
        for CudaThread { pid, tid } in threads {
            let start = Instant::now();
            let Some(record) = record_of(&mut self.session.image.processes, *pid) else {
                continue;
            };
            for buffer in record.vram.clone().into_iter().filter(|b| !b.preload) {
                let missing = || failure("vram", Some(*pid), "its memory was not read");
                let shared = self.vram.get(&buffer.region).ok_or_else(missing)?.clone();
                all_wait &=
                    self.session
                        .vram_in(*pid, *tid, &shared, buffer.address, buffer.bytes)?;
                drivers.push(shared.id);
                let what = format!("process {pid}: vram in {} ms", start.elapsed().as_millis());
                criu::log(Level::Info, &what);
            }
        }
        // Memory that the preload library takes is waited for while it is copied.
        if all_wait {
            self.session.vram.reading = drivers;
            return Ok(());
        }
        let limit_ms = self.session.config.step_timeout_ms;
        let buffers = drivers;
        self.session
            .ask(Op::VramRead { buffers, limit_ms })
            .map(drop)
    }

    /// Waits until all has been read and checked, where the VRAM files are used.
    fn all_is_read(&mut self) -> Result<(), Failed> {
        if self.vram.is_empty() || self.session.vram_done.is_some() {
            return Ok(());
        }
        self.session.vram_done = self.session.vram_wait()?;
        if let Some(done) = &self.session.vram_done {
            let (mib, ms) = (done.facts.bytes >> 20, done.work_us / 1000);
            let what = format!("{mib} MiB of GPU memory read in {ms} ms");
            criu::log(Level::Info, &what);
        }
        Ok(())
    }

    /// Does one step of several processes at once, with their driver threads released.
    fn step(
        &mut self,
        step: Step,
        threads: &[CudaThread],
        op: impl Fn(i32) -> Op,
    ) -> Result<(), Failed> {
        if threads.is_empty() {
            return Ok(());
        }
        let name = step.to_string();
        let (replies, not_stopped) = self.session.released_batch(&name, threads, op)?;
        let mut first = None;
        for (CudaThread { pid, .. }, reply) in threads.iter().zip(replies) {
            if let Some(failed) = reply_failure(&name, *pid, &reply.outcome) {
                first.get_or_insert(failed);
                continue;
            }
            if let Some(record) = record_of(&mut self.session.image.processes, *pid) {
                record.steps.push(StepTiming {
                    step,
                    micros: reply.micros,
                });
            }
            let what = format!("process {pid}: {step} in {} ms", reply.micros / 1000);
            criu::log(Level::Info, &what);
        }
        match (first, not_stopped) {
            (Some(failed), _) => Err(failed),
            (None, Some(what)) => Err(failure(&name, None, what)),
            (None, None) => Ok(()),
        }
    }

    pub fn finish(&mut self, succeeded: bool) {
        if succeeded && self.done && self.session.failed().is_none() {
            // CRIU has let go of the processes, which run. Those of a container that waits for its start do not: the start
            // makes their communicators again.
            let host = Host::system();
            let images = self.session.image.processes.iter();
            let running = images.filter(|r| r.initial_state == ProcessState::Running);
            let running = running.map(|record| record.host_pid);
            let running: Vec<i32> = running
                .filter(|pid| !cgroups::is_frozen(&host, *pid))
                .collect();
            if let Err(failed) = self.session.nccl_up(&running) {
                self.session.fail(failed);
            }
        }
        self.session.disconnect();
        if succeeded && !self.done && !self.session.image.processes.is_empty() {
            self.session
                .fail(failure("restore", None, "CRIU never came to the GPU part"));
        }
        self.session.write_last_report(succeeded);
    }
}

/// Has the agent make the GPUs ready to which the preload library's memory comes back.
fn prepare_gpus(session: &mut Session) -> Result<(), Failed> {
    let processes = session.image.processes.iter();
    let with = processes.filter(|record| record.vram.iter().any(|buffer| buffer.preload));
    let map = &session.config.gpu_map;
    let gpus = with.flat_map(|record| &record.gpus);
    let gpus: Vec<GpuUuid> = gpus.map(|gpu| mapped(*gpu, map)).collect();
    if gpus.is_empty() {
        return Ok(());
    }
    let prepare = Op::PreloadPrepare {
        pids: Vec::new(),
        gpus,
        in_bulk: true,
        wait: false,
    };
    session.ask(prepare).map(drop)
}

/// Has the agent begin to read the VRAM files, while CRIU restores everything else.
fn load_vram(session: &mut Session) -> Result<HashMap<String, SharedBuffer>, Failed> {
    let records = session
        .image
        .processes
        .iter()
        .flat_map(|record| &record.vram);
    let regions: Vec<WantedRegion> = records
        .map(|buffer| WantedRegion {
            name: buffer.region.clone(),
            bytes: buffer.bytes,
        })
        .collect();
    if regions.is_empty() {
        return Ok(HashMap::new());
    }
    let names: Vec<String> = regions.iter().map(|region| region.name.clone()).collect();
    let config = session.config.vram.clone().unwrap_or_default();
    let dir = config
        .directory
        .clone()
        .or_else(crate::vram::image_directory);
    let dir =
        dir.ok_or_else(|| failure("image", None, "CRIU does not tell its image directory"))?;
    let op = Op::VramLoad {
        dir,
        regions,
        config,
    };
    let reply = session.batch(vec![op], &mut [])?.pop();
    match reply.map(|reply| reply.outcome) {
        Some(Outcome::Buffers(buffers)) if buffers.len() == names.len() => {
            Ok(names.into_iter().zip(buffers).collect())
        }
        Some(Outcome::Error(error)) => Err(failure("vram", None, error.message)),
        other => Err(failure(
            "vram",
            None,
            format!("unexpected answer {other:?}"),
        )),
    }
}

/// The processes that CRIU is restoring: those that it traces.
struct ProcessTree {
    /// By their pids from the root process's namespace inwards.
    pids: HashMap<Vec<i32>, i32>,
}

impl ProcessTree {
    fn of(root: i32) -> Result<Self, Failed> {
        let failed = |what: String| failure("restore", Some(root), what);
        let status = procfs::status(root).map_err(|error| failed(error.to_string()))?;
        if status.tracer == 0 {
            return Err(failed("CRIU does not trace it".into()));
        }
        let depth = status.ns_pids.len().saturating_sub(1);
        let pids = procfs::pids()
            .into_iter()
            .filter_map(|pid| {
                let other = procfs::status(pid).ok()?;
                let inner = other.ns_pids.get(depth..)?.to_vec();
                (other.tracer == status.tracer && !inner.is_empty()).then_some((inner, pid))
            })
            .collect();
        Ok(Self { pids })
    }
}

/// Kills the restored processes, so that CRIU cannot resume them.
///
/// Also reaps their threads. CRIU waits for the root process alone. If that is the init of a PID namespace it ends
/// last, after every traced thread in it has been reaped.
fn kill_tree(root: i32) -> Result<(), Failed> {
    let tree = ProcessTree::of(root)?;
    criu::log(
        Level::Error,
        "killing the restored processes: their GPU state is lost",
    );
    let pids = tree.pids.values();
    let mut threads: Vec<i32> = pids.flat_map(|pid| procfs::threads(*pid)).collect();
    threads.retain(|tid| *tid != root);
    for pid in tree.pids.values() {
        // SAFETY: a signal to a process that our own process traces.
        unsafe { libc::kill(*pid, libc::SIGKILL) };
    }
    let alive = |pid: i32| procfs::stat(pid).is_some_and(|stat| !stat.exiting);
    let gone = wait_until(KILL_LIMIT, Duration::from_millis(2), || {
        threads.retain(|tid| !reaped(*tid));
        threads.is_empty() && !alive(root)
    });
    if !gone {
        let what = format!("killed, but not gone: {root}, {threads:?}");
        return Err(failure("kill", Some(root), what));
    }
    Ok(())
}

fn reaped(tid: i32) -> bool {
    let mut status = 0;
    // SAFETY: writes one int; __WALL includes threads, WNOHANG never waits.
    match unsafe { libc::waitpid(tid, &mut status, libc::WNOHANG | libc::__WALL) } {
        0 => false,
        waited if waited < 0 => {
            std::io::Error::last_os_error().raw_os_error() == Some(libc::ECHILD)
        }
        _ => libc::WIFEXITED(status) || libc::WIFSIGNALED(status),
    }
}
