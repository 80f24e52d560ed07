use super::*;
use crate::agent::tests::{FakeDriver, Victim, checkpoint, lock, quick};
use crate::exchange::client::{Client, ClientError};
use crate::messages::buffers::VramConfig;
use crate::messages::protocol::ProcessState;
use std::sync::atomic::Ordering;
use std::time::Duration;

struct Running {
    directory: tempfile::TempDir,
    stop: Option<io::PipeWriter>,
    thread: std::thread::JoinHandle<AgentOutcome>,
}

fn start(driver: FakeDriver) -> Running {
    let directory = tempfile::tempdir().unwrap();
    let listener = listen(&directory.path().join("driver.sock")).unwrap();
    let (reader, writer) = io::pipe().unwrap();
    let hello = Hello {
        driver_version: None,
        cuda_version: 13000,
        gpus: Vec::new(),
    };
    let server = Arc::new(Server {
        agent: Agent::new(driver),
        hello,
        report: Some(directory.path().join("report.json")),
        limits: quick(),
    });
    let thread = std::thread::spawn(move || server.run(&listener, reader.as_fd()).unwrap());
    Running {
        directory,
        stop: Some(writer),
        thread,
    }
}

impl Running {
    fn connect(&self) -> Client {
        Client::connect(&self.directory.path().join("driver.sock")).unwrap()
    }

    fn end(mut self) -> (AgentOutcome, Option<AgentReport>) {
        drop(self.stop.take());
        let outcome = self.thread.join().unwrap();
        let report = std::fs::read(self.directory.path().join("report.json")).ok();
        (
            outcome,
            report.map(|bytes| serde_json::from_slice(&bytes).unwrap()),
        )
    }
}

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn calls_of_several_processes_overlap() {
    let victims: Vec<Victim> = (0..4).map(|_| Victim::new()).collect();
    let pids: Vec<i32> = victims.iter().map(Victim::pid).collect();
    let mut driver = FakeDriver::with(&pids);
    driver.checkpoint_takes = Duration::from_secs(1);
    let most = Arc::clone(&driver.most_running);
    let server = start(driver);
    let mut client = server.connect();
    for pid in &pids {
        assert_eq!(
            client.call(lock(*pid), LIMIT).unwrap().outcome,
            Outcome::Done
        );
    }
    let mut waiting: Vec<u64> = pids
        .iter()
        .map(|pid| client.send(checkpoint(*pid)).unwrap())
        .collect();
    while !waiting.is_empty() {
        if let Some(reply) = client.receive(LIMIT).unwrap() {
            assert_eq!(reply.outcome, Outcome::Done);
            waiting.retain(|id| *id != reply.id);
        }
    }
    // Each takes a while, so that the others come meanwhile.
    assert!(most.load(Ordering::SeqCst) > 1);
    client.call(Op::Commit, LIMIT).unwrap();
    drop(victims);
    drop(client);
    let (outcome, report) = server.end();
    assert_eq!(
        (outcome, report.unwrap().processes.len()),
        (AgentOutcome::Clean, 0)
    );
}

#[test]
fn a_lost_connection_is_rolled_back() {
    let victim = Victim::new();
    let pid = victim.pid();
    let server = start(FakeDriver::with(&[pid]));
    let mut client = server.connect();
    client.call(lock(pid), LIMIT).unwrap();
    // Lost with the checkpoint in flight.
    client.send(checkpoint(pid)).unwrap();
    drop(client);
    let (outcome, report) = server.end();
    let report = report.unwrap();
    assert_eq!(
        (outcome, report.outcome),
        (AgentOutcome::RolledBack, AgentOutcome::RolledBack)
    );
    assert_eq!(report.processes[0].left, ProcessState::Running);
}

#[test]
fn asking_alone_leaves_no_report() {
    let server = start(FakeDriver::default());
    let mut client = server.connect();
    let reply = client.call(Op::Hello, LIMIT).unwrap();
    assert!(matches!(reply.outcome, Outcome::Hello(hello) if hello.cuda_version == 13000));
    let pid = std::process::id() as i32;
    let reply = client
        .call(
            Op::Find {
                pid,
                limit_ms: 10_000,
            },
            LIMIT,
        )
        .unwrap();
    assert_eq!(reply.outcome, Outcome::Thread(None));
    drop(client);
    assert_eq!(server.end(), (AgentOutcome::Clean, None));
}

#[test]
fn nonsense_ends_the_connection_and_a_silent_agent_is_noticed() {
    let server = start(FakeDriver::default());
    let mut client = server.connect();
    let mut raw = UnixStream::connect(server.directory.path().join("driver.sock")).unwrap();
    raw.write_all(b"{\"id\":1,\"request\":\"no\"}\n").unwrap();
    assert_eq!(raw.read(&mut [0; 16]).unwrap(), 0);
    let silent = client.receive(Duration::from_millis(30)).unwrap();
    assert_eq!(silent, None);
    drop(client);
    server.end();
    let gone = Client::connect(Path::new("/nonexistent/driver.sock"));
    assert!(matches!(gone, Err(ClientError::Io(_))));
}

#[test]
fn a_suspend_whose_end_is_lost_is_not_taken_for_one_that_failed() {
    use crate::suspend::{How, SuspendError, resume, suspend};
    use crate::vram::VramConfig;
    let victim = Victim::new();
    let server = start(FakeDriver::with(&[victim.pid()]));
    let mut client = server.connect();
    let socket = client.fd().try_clone_to_owned().unwrap();
    let how = How {
        vram: VramConfig::default(),
        directory: None,
        lock_timeout_ms: 60_000,
        step_timeout_ms: 60_000,
        nccl_quiesce_ms: 60_000,
        refuse_shared: true,
        keep: 0,
        goes_on: false,
        meanwhile: Vec::new(),
    };
    let mut noted = None;
    let suspended = suspend(&mut client, &[victim.pid()], &how, &mut |done| {
        noted = Some(done.processes.clone());
        UnixStream::from(socket.try_clone().unwrap())
            .shutdown(std::net::Shutdown::Both)
            .map_err(|error| error.to_string())
    });
    assert!(
        matches!(suspended, Err(SuspendError::Unsettled(_))),
        "{suspended:?}"
    );
    drop(client);
    // Here the agent was not told, and brings it back unless a resume comes first; a later one reports that.
    let processes = noted.unwrap();
    let mut client = server.connect();
    let deadline = Instant::now() + LIMIT;
    let query = || Op::Query {
        pid: victim.pid(),
        limit_ms: 10_000,
    };
    loop {
        match client.call(query(), LIMIT).unwrap().outcome {
            Outcome::State(ProcessState::Running) => break,
            other => assert!(Instant::now() < deadline, "{other:?}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let resumed = resume(&mut client, &processes, &[], &how);
    assert!(matches!(resumed, Err(SuspendError::Running)), "{resumed:?}");
    drop(client);
    assert_eq!(server.end().0, AgentOutcome::RolledBack);
}

/// On a busy machine a thread that wrote ahead began after the writer that heard what is complete had ended; it removed
/// the files and waited for ever.
#[test]
fn what_is_written_ahead_has_begun_before_the_next_request_is_heard() {
    let server = start(FakeDriver::with(&[]));
    let mut client = server.connect();
    for _ in 0..50 {
        let ahead = client
            .send(Op::VramWriteAhead {
                dir: server.directory.path().to_owned(),
                buffers: vec![4_711],
                config: VramConfig::default(),
            })
            .unwrap();
        let next = client.send(Op::Hello).unwrap();
        let mut answered = Vec::new();
        while answered.len() < 2 {
            answered.extend(client.receive(LIMIT).unwrap().map(|reply| reply.id));
        }
        assert_eq!(answered, [ahead, next]);
    }
    drop(client);
    server.end();
}
