//! What a thread stands on while it makes others' system calls.
//!
//! Whoever traces it may be killed at any moment, and the thread then runs on from where it was set to. So it stands on a
//! frame as the kernel leaves one for a signal's handler (`struct rt_sigframe`): the `syscall` instruction is followed by
//! `ret`, that goes to the C library's rt_sigreturn(2), and the kernel gives the thread back its registers, its floating
//! point state and its signal mask. A call of its own that the stop had cut short is made again.

use super::arch::{self, Registers};
use super::code::Code;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes below the stack pointer that are left alone: the red zone, and what [`super::Injection`] writes itself.
const ABOVE: u64 = 512;

pub(super) struct Frame {
    address: u64,
    extended: Vec<u8>,
    signal_return: u64,
}

impl Frame {
    /// Returns none where the process has no code for it, or its stack no room.
    pub(super) fn new(tid: i32, code: &Code, regs: &Registers) -> Option<Self> {
        let signal_return = code.signal_return?;
        let extended = arch::extended_state(tid)?;
        let bytes = (arch::FRAME + extended.len()) as u64;
        let address = arch::stack(regs).checked_sub(ABOVE + bytes)? & !63;
        code.stack.contains(&address).then_some(Self {
            address,
            extended,
            signal_return,
        })
    }

    /// Where the stack pointer belongs meanwhile.
    pub(super) fn address(&self) -> u64 {
        self.address
    }

    /// Writes it, for these registers.
    pub(super) fn write(&self, memory: &File, regs: &Registers, mask: u64) -> io::Result<()> {
        let mut bytes = arch::signal_frame(self.address, self.signal_return, regs, mask);
        bytes.extend(&self.extended);
        memory.write_all_at(&bytes, self.address)
    }
}
