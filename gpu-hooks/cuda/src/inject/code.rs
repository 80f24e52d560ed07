//! Finds the code of a process that its thread is made to run.

use super::arch::{self, Registers};
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
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
        let mut places: Vec<(u8, Range<u64>)> = Vec::new();
        let mut stack_area = stack..stack;
        for line in maps.lines() {
            let mut words = line.split_whitespace();
            let number = |text| u64::from_str_radix(text, 16).ok();
            let range = words.next().and_then(|range| range.split_once('-'));
            let Some((Some(start), Some(end))) = range.map(|(a, b)| (number(a), number(b))) else {
                continue;
            };
            let executable = words.next().is_some_and(|mode| mode.contains('x'));
            let path = words.nth(3).unwrap_or_default();
            let own = path == "[stack]" || (stack..end).contains(&thread);
            if own && (start..end).contains(&stack) {
                stack_area = start..end;
            }
            match path {
                "[vsyscall]" => {}
                _ if !executable => {}
                "[vdso]" => places.push((0, start..end)),
                path if path.contains("/libc") || path.contains("/ld-") => {
                    places.push((1, start..end))
                }
                _ => places.push((2, start..end)),
            }
        }
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
