//! Finds the code of a process that its thread is made to run.

use super::arch::{self, Registers};
use cryopod_host::files::Host;
use cryopod_host::processes::maps;
use memchr::memmem;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// Most that is read of one mapping, in bytes.
const READ: usize = 4 << 20;

/// Addresses in a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Code {
    /// A `syscall` instruction.
    pub(super) call: u64,
    /// Code that returns from a signal, if the call is followed by a `ret` that leads there.
    pub(super) signal_return: Option<u64>,
    /// The mapping that the stack pointer is in, if it is the thread's own down to its end: the first thread's stack, or
    /// one that ends with what the C library keeps of the thread. What lies below a coroutine's stack is another's.
    pub(super) stack: Range<u64>,
}

impl Code {
    /// Finds it in the vDSO and in the C library, else in any other code.
    ///
    /// # Errors
    /// The process has no code that makes a system call.
    pub(super) fn find(pid: i32, memory: &File, regs: &Registers) -> io::Result<Self> {
        let (stack, thread) = (arch::stack(regs), arch::thread(regs));
        let mut places: Vec<(u8, Range<u64>)> = Vec::new();
        let mut stack_area = stack..stack;
        maps::for_each(&Host::system(), pid, |mapping| {
            let (range, path) = (mapping.addresses, mapping.name);
            let own = path == "[stack]" || (stack..range.end).contains(&thread);
            if own && range.contains(&stack) {
                stack_area = range.clone();
            }
            match path {
                "[vsyscall]" => {}
                _ if !mapping.executable => {}
                "[vdso]" => places.push((0, range)),
                path if path.contains("/libc") || path.contains("/ld-") => places.push((1, range)),
                _ => places.push((2, range)),
            }
        })?;
        places.sort_by_key(|(order, _)| *order);
        let (mut any, mut returning, mut signal_return) = (None, None, None);
        let mut bytes = vec![0; READ];
        for (_, place) in places {
            let len = usize::try_from(place.end - place.start)
                .unwrap_or(READ)
                .min(READ);
            let Ok(read) = memory.read_at(&mut bytes[..len], place.start) else {
                continue;
            };
            let find = |code: &[u8]| Some(place.start + memmem::find(&bytes[..read], code)? as u64);
            any = any.or_else(|| find(&arch::SYSCALL));
            returning = returning.or_else(|| find(&arch::SYSCALL_AND_RETURN));
            signal_return =
                signal_return.or_else(|| arch::SIGNAL_RETURNS.iter().find_map(|code| find(code)));
            if returning.is_some() && signal_return.is_some() {
                break;
            }
        }
        let call = returning.or(any);
        Ok(Self {
            call: call.ok_or_else(|| {
                io::Error::other("the process has no code that makes a system call")
            })?,
            signal_return: signal_return.filter(|_| returning.is_some()),
            stack: stack_area,
        })
    }
}
