use super::*;
use crate::gpus::gpu::GpuPair;
use crate::messages::report::AgentOutcome;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicUsize, Ordering};

/// A driver that accepts any process as a CUDA process; it holds their states.
#[derive(Default)]
pub(crate) struct FakeDriver {
    pub states: Mutex<HashMap<i32, ProcessState>>,
    /// Fails the next lock with "illegal state".
    pub racing: AtomicUsize,
    pub checkpoint_takes: Duration,
    pub refuse_restore: bool,
    pub running: AtomicUsize,
    pub most_running: Arc<AtomicUsize>,
}

fn refusal(code: i32) -> CallError {
    CallError {
        code,
        text: format!("error {code}"),
    }
}

impl FakeDriver {
    pub fn with(pids: &[i32]) -> Self {
        let states = pids
            .iter()
            .map(|pid| (*pid, ProcessState::Running))
            .collect();
        Self {
            states: Mutex::new(states),
            ..Self::default()
        }
    }

    fn set(&self, pid: i32, state: ProcessState) {
        self.states.lock().unwrap().insert(pid, state);
    }

    fn step(&self, pid: i32, from: ProcessState, to: ProcessState) -> Result<(), CallError> {
        let mut states = self.states.lock().unwrap();
        let state = states.get_mut(&pid).ok_or_else(|| refusal(1))?;
        if *state != from {
            return Err(refusal(401));
        }
        *state = to;
        Ok(())
    }
}

impl Driver for FakeDriver {
    fn restore_tid(&self, pid: i32) -> Result<i32, CallError> {
        self.state(pid).map(|_| pid)
    }
    fn state(&self, pid: i32) -> Result<ProcessState, CallError> {
        self.states
            .lock()
            .unwrap()
            .get(&pid)
            .copied()
            .ok_or_else(|| refusal(1))
    }
    fn lock(&self, pid: i32, timeout_ms: u32) -> Result<(), CallError> {
        if self
            .racing
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1))
            .is_ok()
        {
            return Err(refusal(401));
        }
        if timeout_ms == 1 {
            return Err(refusal(600));
        }
        self.step(pid, ProcessState::Running, ProcessState::Locked)
    }
    fn checkpoint(&self, pid: i32) -> Result<(), CallError> {
        let now = self.running.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_running.fetch_max(now, Ordering::SeqCst);
        std::thread::sleep(self.checkpoint_takes);
        self.running.fetch_sub(1, Ordering::SeqCst);
        self.step(pid, ProcessState::Locked, ProcessState::Checkpointed)
    }
    fn restore(&self, pid: i32, _map: &[GpuPair]) -> Result<(), CallError> {
        if self.refuse_restore {
            return Err(refusal(2));
        }
        self.step(pid, ProcessState::Checkpointed, ProcessState::Locked)
    }
    fn unlock(&self, pid: i32) -> Result<(), CallError> {
        self.step(pid, ProcessState::Locked, ProcessState::Running)
    }
}

pub(crate) struct Victim(Child);

impl Victim {
    pub fn new() -> Self {
        Self(Command::new("sleep").arg("600").spawn().unwrap())
    }
    pub fn pid(&self) -> i32 {
        self.0.id() as i32
    }
    pub fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(crate) fn quick() -> Limits {
    Limits {
        settle: Duration::from_secs(60),
        killed: Duration::from_millis(200),
        step: Duration::from_secs(60),
    }
}

pub(crate) fn lock(pid: i32) -> Op {
    Op::Lock {
        pid,
        timeout_ms: 60_000,
    }
}

pub(crate) fn checkpoint(pid: i32) -> Op {
    Op::Checkpoint {
        pid,
        limit_ms: 60_000,
    }
}

fn state(agent: &Arc<Agent<FakeDriver>>, pid: i32) -> ProcessState {
    agent.driver().state(pid).unwrap()
}

/// An agent of one process.
fn agent() -> (Victim, i32, Arc<Agent<FakeDriver>>) {
    agent_on(|_| ())
}

fn agent_on(change: impl Fn(&mut FakeDriver)) -> (Victim, i32, Arc<Agent<FakeDriver>>) {
    let victim = Victim::new();
    let pid = victim.pid();
    let mut driver = FakeDriver::with(&[pid]);
    change(&mut driver);
    (victim, pid, Agent::new(driver))
}

fn settled(agent: &Arc<Agent<FakeDriver>>) -> AgentOutcome {
    agent.settle(false, quick(), |_| {}).outcome
}

fn kind(outcome: Outcome) -> ErrorKind {
    match outcome {
        Outcome::Error(error) => error.kind,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_was_done_is_undone() {
    for checkpointed in [false, true] {
        let (_victim, pid, agent) = agent();
        assert_eq!(agent.perform(&lock(pid)), Outcome::Done);
        if checkpointed {
            assert_eq!(agent.perform(&checkpoint(pid)), Outcome::Done);
        }
        let report = agent.settle(false, quick(), |_| {});
        assert_eq!(report.outcome, AgentOutcome::RolledBack);
        assert_eq!(report.processes[0].left, ProcessState::Running);
        assert_eq!(state(&agent, pid), ProcessState::Running);
        assert_eq!(settled(&agent), AgentOutcome::Clean);
    }
}

#[test]
fn a_process_found_locked_or_checkpointed_stays_so() {
    let (_victim, pid, agent) = agent();
    agent.driver().set(pid, ProcessState::Locked);
    assert_eq!(agent.perform(&checkpoint(pid)), Outcome::Done);
    assert_eq!(settled(&agent), AgentOutcome::RolledBack);
    assert_eq!(state(&agent, pid), ProcessState::Locked);

    agent.driver().set(pid, ProcessState::Checkpointed);
    assert_eq!(kind(agent.perform(&lock(pid))), ErrorKind::WrongState);
    assert_eq!(settled(&agent), AgentOutcome::Clean);
    assert_eq!(state(&agent, pid), ProcessState::Checkpointed);
}

#[test]
fn after_a_commit_the_dead_are_left_alone_and_the_living_put_back() {
    let (mut dies, lives) = (Victim::new(), Victim::new());
    let pids = [dies.pid(), lives.pid()];
    let agent = Agent::new(FakeDriver::with(&pids));
    for pid in pids {
        assert_eq!(agent.perform(&lock(pid)), Outcome::Done);
        assert_eq!(agent.perform(&checkpoint(pid)), Outcome::Done);
    }
    dies.kill();
    let report = agent.settle(true, quick(), |_| {});
    assert_eq!(report.outcome, AgentOutcome::RolledBack);
    assert_eq!(
        report.processes.iter().map(|p| p.pid).collect::<Vec<_>>(),
        [lives.pid()]
    );
    assert_eq!(state(&agent, lives.pid()), ProcessState::Running);
}

#[test]
fn a_restore_is_not_undone() {
    let (_victim, pid, agent) = agent();
    agent.driver().set(pid, ProcessState::Checkpointed);
    let restore = Op::Restore {
        pid,
        gpu_map: Vec::new(),
        limit_ms: 10_000,
    };
    assert_eq!(agent.perform(&restore), Outcome::Done);
    assert_eq!(settled(&agent), AgentOutcome::Clean);
    assert_eq!(state(&agent, pid), ProcessState::Locked);
}

#[test]
fn the_race_with_cuinit_is_tried_once_more() {
    let (_victim, pid, agent) = agent();
    agent.driver().racing.store(1, Ordering::SeqCst);
    assert_eq!(agent.perform(&lock(pid)), Outcome::Done);
    agent.settle(false, quick(), |_| {});
    agent.driver().racing.store(2, Ordering::SeqCst);
    assert_eq!(kind(agent.perform(&lock(pid))), ErrorKind::WrongState);
}

#[test]
fn a_hanging_call_times_out_keeps_others_off_and_is_undone_when_it_returns() {
    let (_victim, pid, agent) = agent_on(|driver| driver.checkpoint_takes = Duration::from_secs(3));
    assert_eq!(agent.perform(&lock(pid)), Outcome::Done);
    let hanging = Op::Checkpoint { pid, limit_ms: 50 };
    assert_eq!(kind(agent.perform(&hanging)), ErrorKind::TimedOut);
    assert_eq!(kind(agent.perform(&checkpoint(pid))), ErrorKind::Busy);
    let patient = Limits {
        settle: Duration::from_secs(30),
        step: Duration::from_secs(30),
        ..quick()
    };
    assert_eq!(
        agent.settle(false, patient, |_| {}).outcome,
        AgentOutcome::RolledBack
    );
    assert_eq!(state(&agent, pid), ProcessState::Running);
}

#[test]
fn what_cannot_be_undone_is_reported() {
    let (_victim, pid, agent) = agent_on(|driver| driver.refuse_restore = true);
    assert_eq!(agent.perform(&lock(pid)), Outcome::Done);
    assert_eq!(agent.perform(&checkpoint(pid)), Outcome::Done);
    let report = agent.settle(false, quick(), |_| {});
    assert_eq!(report.outcome, AgentOutcome::RollbackFailed);
    assert_eq!(report.processes[0].left, ProcessState::Checkpointed);
    assert!(report.processes[0].error.is_some());
}

#[test]
fn errors_have_kinds() {
    let (_victim, pid, agent) = agent();
    let short = Op::Lock { pid, timeout_ms: 1 };
    assert_eq!(kind(agent.perform(&short)), ErrorKind::LockTimeout);
    assert_eq!(kind(agent.perform(&lock(-1))), ErrorKind::BadRequest);
    assert_eq!(kind(agent.perform(&lock(i32::MAX))), ErrorKind::NoProcess);
    let other = std::process::id() as i32;
    let find = Op::Find {
        pid: other,
        limit_ms: 10_000,
    };
    assert_eq!(agent.perform(&find), Outcome::Thread(None));
}
