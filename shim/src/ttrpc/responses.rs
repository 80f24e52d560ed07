//! Builds and rewrites task service responses.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use containerd_shim::api::{
    ConnectResponse, CreateTaskResponse, PidsResponse, StateResponse, WaitResponse,
};
use containerd_shim::protos::protobuf::well_known_types::timestamp::Timestamp;
use containerd_shim::protos::protobuf::{Message, MessageField};
use containerd_shim::protos::ttrpc::{Response, Status};
use containerd_shim::protos::types::task::ProcessInfo;

/// Most bytes of a runtime's log that one call writes.
const MAX_LOG_BYTES: u64 = 256 << 10;
/// Exit code after SIGKILL.
pub const KILLED: u32 = 137;

/// The response to a call that answers nothing.
pub fn done() -> Response {
    let mut response = Response::new();
    response.set_status(Status::new());
    response
}

/// The response to Wait for a container that never ran.
pub fn ended() -> Response {
    let mut wait = WaitResponse::new();
    wait.exit_status = KILLED;
    wait.exited_at = MessageField::some(Timestamp::now());
    let mut response = done();
    response.payload = wait.write_to_bytes().unwrap_or_default();
    response
}

/// The response to Pids for a container of one process.
pub fn process(pid: u32) -> Response {
    let mut process = ProcessInfo::new();
    process.pid = pid;
    let mut pids = PidsResponse::new();
    pids.processes.push(process);
    let mut response = done();
    response.payload = pids.write_to_bytes().unwrap_or_default();
    response
}

/// Returns true for a response to Pids that names a process: `runc ps` of a container that has ended succeeds, and names none.
pub fn names_a_process(response: &Response) -> bool {
    let pids = PidsResponse::parse_from_bytes(&response.payload);
    pids.is_ok_and(|pids| !pids.processes.is_empty())
}

/// Returns cryopod's last error in a runtime's log, from an offset on.
pub fn reason(log: &Path, from: u64) -> Option<String> {
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

pub trait Pid: Message {
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
