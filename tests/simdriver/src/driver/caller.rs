//! The calling side of the checkpoint API: hands a request to another process's restore thread.

use std::io;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use super::mailbox::{MAX_PAIRS, Remote, Word};
use super::process::{checked, process};
use crate::abi::*;
use crate::uuid::GpuUuid;
use crate::wire::{self, Step, op};

const POLL: Duration = Duration::from_micros(200);

/// Asks the process for a step and waits for the answer. As with the real driver there is no
/// limit but the one of a lock: a process whose restore thread does not run never answers.
pub fn call(
    pid: i32,
    step: Step,
    timeout_ms: u32,
    pairs: &[(GpuUuid, GpuUuid)],
) -> Result<u64, CuResult> {
    let here = process()?;
    if here.driver_major < 570 {
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    }
    if pairs.len() > MAX_PAIRS {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let remote = Remote::open(pid)?;
    let start = Instant::now();
    // One call at a time on a process: the server keeps the queue, and forgets a caller that died.
    let server = UnixStream::connect(&here.socket).map_err(|_| CUDA_ERROR_UNKNOWN)?;
    checked(wire::ask(
        &server,
        op::CALL_BEGIN,
        &[u64::from(pid.unsigned_abs()), step as u64],
    ))?;
    let answer = ask(&remote, step, timeout_ms, pairs).unwrap_or(Err(CUDA_ERROR_OPERATING_SYSTEM));
    let code = answer.err().unwrap_or(0);
    let us = u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX);
    let _ = wire::ask(&server, op::CALL_END, &[u64::from(code.unsigned_abs()), us]);
    answer
}

/// The exchange through the mailbox. The outer error means that the process is gone.
fn ask(
    remote: &Remote,
    step: Step,
    timeout_ms: u32,
    pairs: &[(GpuUuid, GpuUuid)],
) -> io::Result<Result<u64, CuResult>> {
    let number = remote.get(Word::Request)? + 1;
    remote.set(Word::Step, step as u64)?;
    remote.set(Word::TimeoutMs, u64::from(timeout_ms))?;
    remote.set_pairs(pairs)?;
    remote.set(Word::Request, number)?;
    let mut deadline = match timeout_ms {
        0 => None,
        ms => Some(Instant::now() + Duration::from_millis(u64::from(ms))),
    };
    while remote.get(Word::Done)? != number {
        // A process that does not even take the request up is given up at the timeout; one that
        // did keeps the time itself.
        if deadline.is_some_and(|d| Instant::now() >= d) {
            remote.set(Word::Withdrawn, number)?;
            thread::sleep(Duration::from_millis(5));
            if remote.get(Word::Taken)? != number {
                return Ok(Err(CUDA_ERROR_NOT_READY));
            }
            deadline = None;
        }
        thread::sleep(POLL);
    }
    Ok(match i32::try_from(remote.get(Word::Code)?) {
        Ok(0) => Ok(remote.get(Word::Value)?),
        Ok(code) => Err(code),
        Err(_) => Err(CUDA_ERROR_UNKNOWN),
    })
}

/// The restore thread of a process, as this process sees it. Needs no answer from the process.
pub fn restore_thread(pid: i32) -> Result<i32, CuResult> {
    if process()?.driver_major < 570 {
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    }
    Remote::open(pid)?.thread().ok_or(CUDA_ERROR_INVALID_VALUE)
}
