//! Lock, checkpoint, restore, unlock, as the restore thread does them.
//!
//! From checkpoint to unlock this may be the only thread that runs, so nothing here takes a lock
//! that another thread could hold outside the closed gate, or uses the heap.

use std::ffi::CStr;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::{Duration, Instant};

use super::mailbox::Word;
use super::process::{self, Fill, Gpu, Image, Inner, Process, checked, gpu_info};
use super::thread::Request;
use crate::abi::*;
use crate::uuid::GpuUuid;
use crate::wire::{self, ALLOC_CONTEXT, Step, directive, op};

const HEADER: usize = 4096;
const HEADER_MAGIC: u64 = u64::from_le_bytes(*b"CUSIMIMG");
/// The real driver's mapping is not a multiple of a page either.
const TAIL: usize = 16;
/// How much of the memory is copied at a time.
const PART: usize = 16 << 20;
/// A driver that fills memory twice waits in between until this file is there.
const SECOND_FILL: &CStr = c"/tmp/cusim-second-fill";
/// How often a hanging step looks whether it still has to.
const HANG_POLL: Duration = Duration::from_millis(5);

/// What the server said about a step, and when it began.
pub struct Begun {
    step: Step,
    start: Instant,
}

/// A step that is to go no further, and whether the process is broken by it.
pub struct Stop {
    pub code: CuResult,
    broken: bool,
}

impl From<CuResult> for Stop {
    fn from(code: CuResult) -> Self {
        Self {
            code,
            broken: false,
        }
    }
}

impl Stop {
    /// The result of the step; a broken process ends in the failed state.
    fn settle(self, p: &Process) -> CuResult {
        if self.broken {
            p.mailbox.set(Word::State, u64::from(STATE_FAILED));
        }
        self.code
    }
}

fn need(p: &Process, state: u32) -> Result<(), CuResult> {
    if p.mailbox.get(Word::State) == u64::from(state) {
        Ok(())
    } else {
        Err(CUDA_ERROR_ILLEGAL_STATE)
    }
}

/// Tells the server that a step begins, and obeys the switches.
pub fn begin(
    inner: &Inner,
    step: Step,
    deadline: Option<Instant>,
    bytes: u64,
) -> Result<Begun, Stop> {
    let start = Instant::now();
    let f = inner.ask(op::STEP_BEGIN, &[step as u64, 0, bytes])?;
    let code = CuResult::try_from(f[2]).unwrap_or(CUDA_ERROR_UNKNOWN);
    thread::sleep(Duration::from_millis(f[3]));
    match f[1] {
        directive::FAIL => {
            return Err(Stop {
                code,
                broken: false,
            });
        }
        directive::BREAK => return Err(Stop { code, broken: true }),
        directive::HANG | directive::HANG_FOREVER => {
            while inner.ask(op::STILL_HANGING, &[step as u64])?[1] == 1 {
                if f[1] == directive::HANG && deadline.is_some_and(|d| Instant::now() >= d) {
                    return Err(CUDA_ERROR_NOT_READY.into());
                }
                thread::sleep(HANG_POLL);
            }
        }
        _ => {}
    }
    Ok(Begun { step, start })
}

/// Begins a call that other threads do not wait for.
pub fn begin_alone(step: Step) -> Result<(), CuResult> {
    let f = process::api(|inner| inner.ask(op::STEP_BEGIN, &[step as u64, 0, 0]))?;
    thread::sleep(Duration::from_millis(f[3]));
    match f[1] {
        directive::PROCEED => Ok(()),
        directive::FAIL | directive::BREAK => {
            Err(CuResult::try_from(f[2]).unwrap_or(CUDA_ERROR_UNKNOWN))
        }
        _ => {
            while process::api(|inner| inner.ask(op::STILL_HANGING, &[step as u64]))?[1] == 1 {
                thread::sleep(HANG_POLL);
            }
            Ok(())
        }
    }
}

/// Tells the server that a step ended.
fn end(inner: &Inner, b: &Begun, bytes: u64) {
    let us = u64::try_from(b.start.elapsed().as_micros()).unwrap_or(u64::MAX);
    let _ = inner.ask(op::STEP_END, &[b.step as u64, 0, bytes, us]);
}

/// Closes the gate once no call is inside.
pub fn lock(p: &Process, request: &Request) -> Result<(), CuResult> {
    need(p, STATE_RUNNING)?;
    let deadline = request.timeout.map(|t| Instant::now() + t);
    if !p.gate.close(deadline) {
        return Err(CUDA_ERROR_NOT_READY);
    }
    let inner = p.inner();
    match begin(&inner, Step::Lock, deadline, 0) {
        Ok(begun) => {
            p.mailbox.set(Word::State, u64::from(STATE_LOCKED));
            end(&inner, &begun, 0);
            Ok(())
        }
        Err(stop) => {
            let broken = stop.broken;
            let code = stop.settle(p);
            drop(inner);
            if !broken {
                p.gate.open();
            }
            Err(code)
        }
    }
}

pub fn unlock(p: &Process) -> Result<(), CuResult> {
    need(p, STATE_LOCKED)?;
    let inner = p.inner();
    let begun = begin(&inner, Step::Unlock, None, 0).map_err(|s| s.settle(p))?;
    p.mailbox.set(Word::State, u64::from(STATE_RUNNING));
    end(&inner, &begun, 0);
    drop(inner);
    p.gate.open();
    Ok(())
}

/// Moves device memory into one mapping of this process and lets go of the devices.
pub fn checkpoint(p: &Process) -> Result<(), CuResult> {
    need(p, STATE_LOCKED)?;
    let inner = &mut *p.inner();
    let bytes: u64 = inner.blocks.iter().map(|b| b.bytes).sum();
    let begun = begin(inner, Step::Checkpoint, None, bytes).map_err(|s| s.settle(p))?;
    let payload = usize::try_from(bytes).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
    let image = map_image(HEADER + payload + TAIL).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    if let Err(code) = save(inner, image, bytes) {
        unmap_image(image);
        return Err(code);
    }
    inner.image = Some(image);
    let _ = inner.ask(op::RELEASE_ALL, &[]);
    end(inner, &begun, bytes);
    inner.nodes.park();
    inner.nodes.close();
    inner.set_server(None);
    p.mailbox.set(Word::State, u64::from(STATE_CHECKPOINTED));
    Ok(())
}

fn save(inner: &Inner, image: Image, bytes: u64) -> Result<(), CuResult> {
    // SAFETY: the image was just mapped by this thread, readable and writable over its length,
    // and nothing else refers to it.
    let memory = unsafe { slice(image) };
    let head = [HEADER_MAGIC, inner.blocks.len() as u64, bytes];
    for (to, w) in memory.chunks_exact_mut(8).zip(head) {
        to.copy_from_slice(&w.to_le_bytes());
    }
    if inner.fill == Fill::Twice {
        memory[HEADER..].fill(0xa5);
        // SAFETY: a string that ends.
        while unsafe { libc::access(SECOND_FILL.as_ptr(), libc::F_OK) } != 0 {
            thread::sleep(HANG_POLL);
        }
    }
    let mut rest = &mut memory[HEADER..];
    for b in &inner.blocks {
        let len = usize::try_from(b.bytes).map_err(|_| CUDA_ERROR_UNKNOWN)?;
        let (piece, after) = rest.split_at_mut(len);
        rest = after;
        if len == 0 {
            continue;
        }
        let file = device_memory(inner, b.address)?;
        let parts = piece.chunks_mut(PART).enumerate();
        let copy = |(i, part): (usize, &mut [u8])| {
            file.read_exact_at(part, (i * PART) as u64)
                .map_err(|_| CUDA_ERROR_UNKNOWN)
        };
        match inner.fill {
            Fill::Down => parts.rev().try_for_each(copy)?,
            Fill::Up | Fill::Twice => { parts }.try_for_each(copy)?,
        }
    }
    rest.fill(0);
    Ok(())
}

/// Takes the devices again, puts memory back, and frees the image.
pub fn restore(p: &Process, request: &Request) -> Result<(), CuResult> {
    need(p, STATE_CHECKPOINTED)?;
    let inner = &mut *p.inner();
    if inner.poisoned {
        return Err(CUDA_ERROR_OPERATING_SYSTEM);
    }
    // As the real driver: the checkpoint has succeeded, and the process stays checkpointed.
    if let Some(import) = inner.imports.first() {
        return Err(import.refusal);
    }
    if inner.vmm.has_foreign() {
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    }
    let image = inner.image.ok_or(CUDA_ERROR_UNKNOWN)?;
    let server = process::connect(&p.socket).map_err(|_| CUDA_ERROR_OPERATING_SYSTEM)?;
    let hello = checked(wire::ask(
        &server,
        op::HELLO,
        &[1, u64::from(std::process::id())],
    ))?;
    inner.set_server(Some(server));
    let done = take_back(inner, image, request, hello[1], hello[2]);
    match done {
        Ok(()) => {
            unmap_image(image);
            inner.image = None;
            p.mailbox.set(Word::State, u64::from(STATE_LOCKED));
            Ok(())
        }
        Err(stop) => {
            inner.nodes.park();
            inner.nodes.close();
            // The server frees what the process got so far.
            inner.set_server(None);
            inner.poisoned |= stop.code == CUDA_ERROR_OUT_OF_MEMORY;
            Err(stop.settle(p))
        }
    }
}

/// The part of a restore that is undone as a whole.
fn take_back(
    inner: &mut Inner,
    image: Image,
    request: &Request,
    gpus: u64,
    driver: u64,
) -> Result<(), Stop> {
    let bytes: u64 = inner.blocks.iter().map(|b| b.bytes).sum();
    let begun = begin(inner, Step::Restore, None, bytes)?;
    // SAFETY: the image was mapped at the checkpoint with this length and is private to this
    // thread; if it was saved and restored with the process it is at the same address.
    let memory = unsafe { slice(image) };
    let expected = [HEADER_MAGIC, inner.blocks.len() as u64, bytes];
    if memory
        .chunks_exact(8)
        .zip(expected)
        .any(|(have, want)| have != want.to_le_bytes())
    {
        return Err(Stop {
            code: CUDA_ERROR_UNKNOWN,
            broken: true,
        });
    }
    let mut minors = [0u32; 64];
    let count = inner.gpus.len().min(minors.len());
    let mut now: [Option<Gpu>; 64] = [const { None }; 64];
    for (i, slot) in now[..count].iter_mut().enumerate() {
        let gpu = target(inner, i, request, gpus, driver)?;
        minors[i] = gpu.minor;
        *slot = Some(gpu);
    }
    // A node that is missing, or is no device, is how a GPU is not there.
    inner
        .nodes
        .reopen(&minors[..count])
        .map_err(|_| CUDA_ERROR_NOT_SUPPORTED)?;
    inner
        .nodes
        .unpark()
        .map_err(|_| CUDA_ERROR_OPERATING_SYSTEM)?;
    let mut rest = &memory[HEADER..];
    for b in &inner.blocks {
        let gpu = now[b.gpu].as_ref().ok_or(CUDA_ERROR_UNKNOWN)?;
        let [hi, lo] = gpu.uuid.words();
        let flags = if b.context { ALLOC_CONTEXT } else { 0 };
        let len = usize::try_from(b.bytes).map_err(|_| CUDA_ERROR_UNKNOWN)?;
        let (piece, after) = rest.split_at(len);
        inner.ask(op::ALLOC, &[hi, lo, b.address, b.bytes, flags])?;
        if len > 0 {
            let file = device_memory(inner, b.address)?;
            file.write_all_at(piece, 0)
                .map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
        }
        rest = after;
    }
    for (to, from) in inner.gpus.iter_mut().zip(now) {
        if let Some(gpu) = from {
            *to = gpu;
        }
    }
    end(inner, &begun, bytes);
    Ok(())
}

/// The GPU that the process's GPU number `index` becomes.
fn target(
    inner: &Inner,
    index: usize,
    request: &Request,
    gpus: u64,
    driver: u64,
) -> Result<Gpu, CuResult> {
    let pairs = &request.pairs[..request.count];
    let old = &inner.gpus[index];
    let new = if pairs.is_empty() {
        old.uuid
    } else {
        // Before 580 the argument was reserved.
        if driver < 580 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // Every GPU that the process had must be named, each target once.
        let to = lookup(pairs, old.uuid).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let twice = inner
            .gpus
            .iter()
            .enumerate()
            .any(|(i, g)| i != index && lookup(pairs, g.uuid) == Some(to));
        if twice {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        to
    };
    let server = inner.server.as_ref().ok_or(CUDA_ERROR_UNKNOWN)?;
    for i in 0..gpus {
        let gpu = gpu_info(server, i)?;
        if gpu.uuid == new {
            // The target must be of the same kind.
            return if gpu.name == old.name {
                Ok(gpu)
            } else {
                Err(CUDA_ERROR_NOT_SUPPORTED)
            };
        }
    }
    Err(if pairs.is_empty() {
        CUDA_ERROR_NOT_SUPPORTED
    } else {
        CUDA_ERROR_INVALID_VALUE
    })
}

/// What a list of pairs maps a GPU to.
fn lookup(pairs: &[(GpuUuid, GpuUuid)], old: GpuUuid) -> Option<GpuUuid> {
    pairs.iter().find(|(o, _)| *o == old).map(|(_, n)| *n)
}

/// The device memory of a block, as a file.
pub fn device_memory(inner: &Inner, address: u64) -> Result<File, CuResult> {
    let server = inner.server.as_ref().ok_or(CUDA_ERROR_UNKNOWN)?;
    let (frame, file) =
        wire::ask_fd(server, op::GET_FD, &[address]).map_err(|_| CUDA_ERROR_UNKNOWN)?;
    checked(Ok(frame))?;
    file.ok_or(CUDA_ERROR_UNKNOWN)
}

fn map_image(len: usize) -> Option<Image> {
    // SAFETY: a new anonymous mapping wherever the kernel puts it.
    let p = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE,
            -1,
            0,
        )
    };
    (p != libc::MAP_FAILED).then(|| Image {
        address: p.expose_provenance(),
        len,
    })
}

fn unmap_image(image: Image) {
    // SAFETY: the range is the image, which nothing refers to any more.
    unsafe {
        libc::munmap(
            std::ptr::with_exposed_provenance_mut(image.address),
            image.len,
        )
    };
}

/// The image's bytes.
///
/// # Safety
/// The image must be mapped, and no other reference into it may exist.
unsafe fn slice<'a>(image: Image) -> &'a mut [u8] {
    let p = std::ptr::with_exposed_provenance_mut::<u8>(image.address);
    // SAFETY: the caller vouches for it.
    unsafe { std::slice::from_raw_parts_mut(p, image.len) }
}
