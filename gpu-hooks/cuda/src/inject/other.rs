//! Stands in on machines whose registers are not known: does nothing.

use super::trace::Call;
use std::io;

#[derive(Debug, Clone, Copy)]
pub struct Registers;

pub const SYSCALL: [u8; 2] = [0, 0];
pub const SYSCALL_AND_RETURN: [u8; 3] = [0, 0, 0];
pub const SIGNAL_RETURNS: [&[u8]; 0] = [];
pub const FRAME: usize = 0;

pub fn get(_tid: i32) -> io::Result<Registers> {
    Err(io::ErrorKind::Unsupported.into())
}
pub fn set(_tid: i32, _regs: &Registers) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}
pub fn replace_call(_regs: &mut Registers, _nr: u64, _args: [u64; 6]) {}
pub fn prepare_call(_regs: &mut Registers, _site: u64, _nr: u64, _args: [u64; 6]) {}
pub fn after(site: u64) -> u64 {
    site
}
pub fn skip_call(_regs: &mut Registers) {}
pub fn result(_regs: &Registers) -> u64 {
    0
}
pub fn pretend(_regs: &mut Registers, _call: &Call, _result: u64) {}
pub fn again(_regs: &mut Registers, _call: &Call) {}
pub fn stack(_regs: &Registers) -> u64 {
    0
}
pub fn thread(_regs: &Registers) -> u64 {
    0
}
pub fn set_stack(_regs: &mut Registers, _to: u64) {}
pub fn extended_state(_tid: i32) -> Option<Vec<u8>> {
    None
}
pub fn signal_frame(_at: u64, _signal_return: u64, _regs: &Registers, _mask: u64) -> Vec<u8> {
    Vec::new()
}
