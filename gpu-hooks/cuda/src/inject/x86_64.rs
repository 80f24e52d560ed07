use super::trace::{Call, ptrace};
use std::io;

pub type Registers = libc::user_regs_struct;

pub const SYSCALL: [u8; 2] = [0x0f, 0x05];

pub fn get(tid: i32) -> io::Result<Registers> {
    // SAFETY: all bits zero are a valid value of a structure of integers.
    let mut regs: Registers = unsafe { std::mem::zeroed() };
    ptrace(
        libc::PTRACE_GETREGS,
        tid,
        0,
        (&raw mut regs) as libc::c_ulong,
    )?;
    Ok(regs)
}

pub fn set(tid: i32, regs: &Registers) -> io::Result<()> {
    ptrace(
        libc::PTRACE_SETREGS,
        tid,
        0,
        std::ptr::from_ref(regs) as libc::c_ulong,
    )
}

/// At a syscall's entry: replaces the call.
pub fn replace_call(regs: &mut Registers, nr: u64, args: [u64; 6]) {
    regs.orig_rax = nr;
    [regs.rdi, regs.rsi, regs.rdx, regs.r10, regs.r8, regs.r9] = args;
}

/// Makes the thread do this call when it runs on.
pub fn prepare_call(regs: &mut Registers, site: u64, nr: u64, args: [u64; 6]) {
    replace_call(regs, nr, args);
    regs.rip = site;
    regs.rax = nr;
    regs.orig_rax = u64::MAX;
}

/// The address where a thread goes on after a call made there.
pub fn after(site: u64) -> u64 {
    site.wrapping_add(SYSCALL.len() as u64)
}

/// At a syscall's entry: cancels the call.
pub fn skip_call(regs: &mut Registers) {
    regs.orig_rax = u64::MAX;
}

pub fn result(regs: &Registers) -> u64 {
    regs.rax
}

/// At a syscall's exit: sets the registers as if the call had been this one and returned that.
pub fn pretend(regs: &mut Registers, call: &Call, result: u64) {
    replace_call(regs, u64::MAX, call.args);
    regs.rax = result;
}

/// At a syscall's exit: the thread makes this call now, from the same address.
pub fn again(regs: &mut Registers, call: &Call) {
    let site = regs.rip - SYSCALL.len() as u64;
    prepare_call(regs, site, call.nr, call.args);
}

pub fn stack(regs: &Registers) -> u64 {
    regs.rsp
}
