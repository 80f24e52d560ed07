//! The restore thread: polls the mailbox and does what is asked.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::thread::{self, Builder};
use std::time::Duration;

use super::mailbox::{MAX_PAIRS, Word};
use super::process::Process;
use super::steps;
use crate::abi::{CUDA_ERROR_INVALID_VALUE, CuResult};
use crate::uuid::GpuUuid;
use crate::wire::Step;

const POLL: Duration = Duration::from_millis(1);

/// A request, copied out of the mailbox: a caller that died may be followed by another while the
/// first one's request is still being worked on.
pub struct Request {
    pub timeout: Option<Duration>,
    pub pairs: [(GpuUuid, GpuUuid); MAX_PAIRS],
    pub count: usize,
}

/// Starts the restore thread, and the idle one that the driver also has.
pub fn start(p: &'static Process) -> io::Result<()> {
    static TID: AtomicU64 = AtomicU64::new(0);
    // The driver's threads take no signals meant for the program: they inherit a full mask.
    let old = block_signals();
    let started = Builder::new()
        .name("cuda-EvtHandlr".into())
        .spawn(|| {
            loop {
                thread::park();
            }
        })
        .and_then(|_| {
            // The real driver calls this thread "cuda" and hexadecimal digits.
            Builder::new()
                .name("cuda00c0da51300".into())
                .spawn(move || {
                    // SAFETY: gettid has no preconditions.
                    let tid = unsafe { libc::gettid() };
                    TID.store(u64::from(tid.unsigned_abs()), SeqCst);
                    serve(p);
                })
        });
    restore_signals(&old);
    started?;
    while TID.load(SeqCst) == 0 {
        thread::yield_now();
    }
    p.mailbox
        .publish(u64::from(std::process::id()), TID.load(SeqCst));
    Ok(())
}

fn serve(p: &'static Process) -> ! {
    let mailbox = p.mailbox;
    loop {
        let number = mailbox.get(Word::Request);
        if number != mailbox.get(Word::Taken) && number != mailbox.get(Word::Withdrawn) {
            mailbox.set(Word::Taken, number);
            let mut request = Request {
                timeout: match mailbox.get(Word::TimeoutMs) {
                    0 => None,
                    ms => Some(Duration::from_millis(ms)),
                },
                pairs: [(GpuUuid([0; 16]), GpuUuid([0; 16])); MAX_PAIRS],
                count: 0,
            };
            for (to, from) in request.pairs.iter_mut().zip(mailbox.pairs()) {
                *to = from;
                request.count += 1;
            }
            let code = work(p, mailbox.get(Word::Step), &request);
            mailbox.set(Word::Code, u64::from(code.unsigned_abs()));
            mailbox.set(Word::Value, mailbox.get(Word::State));
            mailbox.set(Word::Done, number);
        }
        thread::sleep(POLL);
    }
}

fn work(p: &'static Process, step: u64, request: &Request) -> CuResult {
    let done = match Step::from_repr(step) {
        Some(Step::GetState) => Ok(()),
        Some(Step::Lock) => steps::lock(p, request),
        Some(Step::Checkpoint) => steps::checkpoint(p),
        Some(Step::Restore) => steps::restore(p, request),
        Some(Step::Unlock) => steps::unlock(p),
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    };
    done.err().unwrap_or(0)
}

fn block_signals() -> libc::sigset_t {
    // SAFETY: all-zero signal sets are valid values, filled before they are read.
    unsafe {
        let (mut all, mut old) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut old);
        old
    }
}

fn restore_signals(old: &libc::sigset_t) {
    // SAFETY: `old` was filled by pthread_sigmask.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, old, std::ptr::null_mut()) };
}
