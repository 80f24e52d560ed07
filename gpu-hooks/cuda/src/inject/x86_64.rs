use super::trace::{Call, ptrace};
use std::io;

pub type Registers = libc::user_regs_struct;

pub const SYSCALL: [u8; 2] = [0x0f, 0x05];
pub const SYSCALL_AND_RETURN: [u8; 3] = [0x0f, 0x05, 0xc3];
/// `mov $15, %rax; syscall`, as glibc, musl and Go have it, and its shorter form.
pub const SIGNAL_RETURNS: [&[u8]; 2] = [
    &[0x48, 0xc7, 0xc0, 15, 0, 0, 0, 0x0f, 0x05],
    &[0xb8, 15, 0, 0, 0, 0x0f, 0x05],
];
/// Bytes of a frame up to its floating point state, which is aligned to 64: the address that the handler returns to,
/// `struct ucontext` (304 bytes), `struct siginfo` (128).
pub const FRAME: usize = 448;
/// uapi/asm/sigcontext.h: says that more than the state of fxsave(7) follows, and where it ends.
const FP_XSTATE_MAGIC1: u32 = 0x4650_5853;
const FP_XSTATE_MAGIC2: u32 = 0x4650_5845;
const NT_X86_XSTATE: libc::c_ulong = 0x202;
/// The kernel gives a process the tiles of AMX when it asks for them, and only then takes them from a frame.
const TILES: u64 = 1 << 18;

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

/// Returns the address of what the C library keeps of the thread.
pub fn thread(regs: &Registers) -> u64 {
    regs.fs_base
}

pub fn set_stack(regs: &mut Registers, to: u64) {
    regs.rsp = to;
}

/// Returns a thread's floating point and vector state as a signal's frame has it.
pub fn extended_state(tid: i32) -> Option<Vec<u8>> {
    let mut state = vec![0u8; 32 << 10];
    let mut iov = libc::iovec {
        iov_base: state.as_mut_ptr().cast(),
        iov_len: state.len(),
    };
    let to = (&raw mut iov) as libc::c_ulong;
    ptrace(libc::PTRACE_GETREGSET, tid, NT_X86_XSTATE, to).ok()?;
    state.truncate(iov.iov_len);
    let word = |at: usize| Some(u64::from_ne_bytes(state.get(at..at + 8)?.try_into().ok()?));
    // The kernel tells the enabled features in the bytes that fxsave leaves free; behind its 512, those in use.
    let (mut features, used) = (word(464)?, word(512)?);
    if used & TILES == 0 {
        features &= !TILES;
    }
    let ends = (2..63).filter(|feature| features & (1 << feature) != 0);
    let ends = ends.map(|feature| {
        let leaf = std::arch::x86_64::__cpuid_count(0xd, feature);
        (leaf.eax + leaf.ebx) as usize
    });
    let size = ends.max().unwrap_or_default().max(512 + 64);
    if size > state.len() {
        return None;
    }
    state.truncate(size);
    let bytes = u32::try_from(size).ok()?;
    let mut said = [0u8; 48];
    said[..4].copy_from_slice(&FP_XSTATE_MAGIC1.to_ne_bytes());
    said[4..8].copy_from_slice(&(bytes + 4).to_ne_bytes());
    said[8..16].copy_from_slice(&features.to_ne_bytes());
    said[16..20].copy_from_slice(&bytes.to_ne_bytes());
    state[464..512].copy_from_slice(&said);
    state.extend(FP_XSTATE_MAGIC2.to_ne_bytes());
    Some(state)
}

/// Returns the first [`FRAME`] bytes of a signal's frame at this address, which gives a thread these registers.
pub fn signal_frame(at: u64, signal_return: u64, regs: &Registers, mask: u64) -> Vec<u8> {
    let (mut rax, mut rip) = (regs.rax, regs.rip);
    // A call that the stop cut short: the kernel would make it again, but not when it comes back this way.
    if regs.orig_rax as i64 >= 0 {
        let again = match -(rax as i64) {
            512..=514 => Some(regs.orig_rax),
            516 => Some(libc::SYS_restart_syscall as u64),
            _ => None,
        };
        if let Some(call) = again {
            (rax, rip) = (call, rip - SYSCALL.len() as u64);
        }
    }
    // The stack for signals stays as it is: the kernel ignores a mode that there is not.
    const NO_MODE: u64 = 4;
    // UC_FP_XSTATE, UC_SIGCONTEXT_SS, UC_STRICT_RESTORE_SS.
    const FLAGS: u64 = 7;
    let selectors = regs.cs & 0xffff | (regs.ss & 0xffff) << 48;
    let mut words = vec![signal_return, FLAGS, 0, 0, NO_MODE, 0];
    words.extend([
        regs.r8, regs.r9, regs.r10, regs.r11, regs.r12, regs.r13, regs.r14, regs.r15,
    ]);
    words.extend([
        regs.rdi, regs.rsi, regs.rbp, regs.rbx, regs.rdx, rax, regs.rcx, regs.rsp, rip,
    ]);
    words.extend([regs.eflags, selectors, 0, 0, 0, 0, at + FRAME as u64]);
    words.extend([0; 8]);
    words.push(mask);
    words.resize(FRAME / 8, 0);
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}
