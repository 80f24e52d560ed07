//! One connection of the driver socket, from first frame to hang-up.

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::socket::{ControlMessage, MsgFlags, getsockopt, sendmsg};
use serde_json::json;

use super::Server;
use super::world::Alloc;
use crate::abi::*;
use crate::uuid::GpuUuid;
use crate::wire::{self, ALLOC_CONTEXT, Frame, Step, VRAM, WORDS, directive, op};

/// Bytes that a sum or a fill handles at once.
const BLOCK: usize = 1 << 20;

struct Connection {
    pid: i32,
    /// Set once the peer has said that it is a client process.
    session: Option<u64>,
    /// The call of the checkpoint API under way, for a caller.
    call: Option<(i32, Step)>,
    /// Bytes on each GPU when the step under way began.
    before: serde_json::Value,
}

/// Serves a connection until the peer hangs up; then frees what it held.
pub fn serve(server: &Arc<Server>, stream: UnixStream) {
    let pid = getsockopt(&stream, PeerCredentials)
        .map(|c| c.pid())
        .unwrap_or(0);
    let mut c = Connection {
        pid,
        session: None,
        call: None,
        before: json!({}),
    };
    while let Ok(frame) = wire::recv(&stream) {
        let mut reply = [0u64; WORDS];
        let mut file = None;
        reply[0] = match answer(server, &mut c, &frame, &mut reply, &mut file) {
            Ok(()) => 0,
            Err(code) => u64::from(code.unsigned_abs()),
        };
        if respond(&stream, &reply, file.as_deref()).is_err() {
            break;
        }
    }
    if let Some((target, _)) = c.call {
        server.call_end(target);
    }
    if let Some(id) = c.session {
        let gone = server.world().sessions.remove(&id);
        let held = gone.map(|s| s.by_gpu()).unwrap_or_default();
        server
            .events
            .write("leave", json!({ "pid": pid, "gpus": held }));
    }
}

/// Sends a reply, with a descriptor if there is one.
fn respond(stream: &UnixStream, reply: &Frame, file: Option<&File>) -> io::Result<()> {
    let Some(file) = file else {
        return wire::send(stream, reply);
    };
    let bytes: Vec<u8> = reply.iter().flat_map(|w| w.to_le_bytes()).collect();
    let fds = [file.as_raw_fd()];
    let sent = sendmsg::<()>(
        stream.as_raw_fd(),
        &[IoSlice::new(&bytes)],
        &[ControlMessage::ScmRights(&fds)],
        MsgFlags::MSG_NOSIGNAL,
        None,
    )?;
    if sent == bytes.len() {
        Ok(())
    } else {
        Err(io::ErrorKind::WriteZero.into())
    }
}

fn answer(
    server: &Arc<Server>,
    c: &mut Connection,
    f: &Frame,
    reply: &mut Frame,
    file: &mut Option<Arc<File>>,
) -> Result<(), CuResult> {
    match f[0] {
        op::HELLO => hello(server, c, f, reply),
        op::GPU_INFO => gpu_info(server, f, reply),
        op::CALL_BEGIN => {
            let step = Step::from_repr(f[2]).ok_or(CUDA_ERROR_INVALID_VALUE)?;
            let target = i32::try_from(f[1]).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
            server.call_begin(target);
            c.call = Some((target, step));
            if step == Step::GetState {
                asked_for_state(server, target)
            } else {
                Ok(())
            }
        }
        op::CALL_END => {
            if let Some((target, step)) = c.call.take() {
                server.call_end(target);
                let fields = json!({
                    "pid": target, "step": step.as_ref(), "code": f[1], "us": f[2], "caller": c.pid,
                });
                server.events.write("call", fields);
            }
            Ok(())
        }
        _ => {
            let id = c.session.ok_or(CUDA_ERROR_NOT_INITIALIZED)?;
            client(server, c, id, f, reply, file)
        }
    }
}

/// The switches of a question for the state, which the process answers without the server.
fn asked_for_state(server: &Arc<Server>, target: i32) -> Result<(), CuResult> {
    let (verdict, acted) = server.world().faults.decide(Step::GetState, target);
    std::thread::sleep(std::time::Duration::from_millis(verdict.delay_ms));
    if !acted.is_empty() {
        let fields =
            json!({ "pid": target, "step": "get-state", "switches": acted, "code": verdict.code });
        server.events.write("fault", fields);
    }
    if verdict.directive == directive::FAIL {
        Err(verdict.code)
    } else {
        Ok(())
    }
}

fn hello(
    server: &Arc<Server>,
    c: &mut Connection,
    f: &Frame,
    reply: &mut Frame,
) -> Result<(), CuResult> {
    let mut world = server.world();
    if f[1] == 0 {
        let (verdict, acted) = world.faults.decide(Step::Init, c.pid);
        if verdict.directive != directive::PROCEED {
            drop(world);
            let fields =
                json!({ "pid": c.pid, "step": "init", "switches": acted, "code": verdict.code });
            server.events.write("fault", fields);
            return Err(verdict.code);
        }
    }
    c.session = Some(world.enter(c.pid));
    let count = world.config.gpus.len() as u64;
    reply[1..5].copy_from_slice(&[
        count,
        world.config.driver_major(),
        world.config.cuda_version(),
        world.config.context_bytes,
    ]);
    drop(world);
    let kind = if f[1] == 0 { "init" } else { "return" };
    server.events.write(
        kind,
        json!({ "pid": c.pid, "ns_pid": f[2], "ns_tid": f[3] }),
    );
    Ok(())
}

fn gpu_info(server: &Arc<Server>, f: &Frame, reply: &mut Frame) -> Result<(), CuResult> {
    let world = server.world();
    let index = usize::try_from(f[1]).map_err(|_| CUDA_ERROR_INVALID_DEVICE)?;
    let g = world
        .config
        .gpus
        .get(index)
        .ok_or(CUDA_ERROR_INVALID_DEVICE)?;
    let [hi, lo] = g.uuid.words();
    reply[1..5].copy_from_slice(&[u64::from(g.minor), hi, lo, g.bytes]);
    let mut name = [0u8; 64];
    for (to, from) in name[..63].iter_mut().zip(g.name.bytes()) {
        *to = from;
    }
    for (w, chunk) in reply[5..13].iter_mut().zip(name.chunks_exact(8)) {
        for (i, b) in chunk.iter().enumerate() {
            *w |= u64::from(*b) << (8 * i);
        }
    }
    reply[13] = u64::from(g.compute.0) << 8 | u64::from(g.compute.1);
    Ok(())
}

fn client(
    server: &Arc<Server>,
    c: &mut Connection,
    id: u64,
    f: &Frame,
    reply: &mut Frame,
    file: &mut Option<Arc<File>>,
) -> Result<(), CuResult> {
    // Session 0 is the own one.
    let memory = |address: u64, of: u64| {
        let world = server.world();
        let session = world.sessions.get(if of == 0 { &id } else { &of });
        let alloc = session.and_then(|s| s.allocs.get(&address));
        alloc
            .map(|a| (Arc::clone(&a.memory), a.bytes))
            .ok_or(CUDA_ERROR_INVALID_VALUE)
    };
    match f[0] {
        op::ALLOC => {
            let gpu = GpuUuid::from_words([f[1], f[2]]);
            let (address, bytes, context) = (f[3], f[4], f[5] & ALLOC_CONTEXT != 0);
            let memory = Arc::new(vram(gpu, bytes).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?);
            let done = server.world().alloc(
                id,
                address,
                Alloc {
                    gpu,
                    bytes,
                    context,
                    memory,
                },
            );
            let fields = json!({
                "pid": c.pid, "gpu": gpu, "bytes": bytes, "address": address,
                "context": context, "code": done.err().unwrap_or(0),
            });
            server.events.write("alloc", fields);
            done
        }
        op::FREE => {
            let mut world = server.world();
            let session = world.session(id)?;
            let a = session
                .allocs
                .remove(&f[1])
                .ok_or(CUDA_ERROR_INVALID_VALUE)?;
            drop(world);
            let fields = json!({ "pid": c.pid, "gpu": a.gpu, "bytes": a.bytes, "address": f[1] });
            server.events.write("free", fields);
            Ok(())
        }
        op::RELEASE_ALL => {
            let mut world = server.world();
            let session = world.session(id)?;
            let held = session.by_gpu();
            session.allocs.clear();
            drop(world);
            server
                .events
                .write("release", json!({ "pid": c.pid, "gpus": held }));
            Ok(())
        }
        op::GET_FD => {
            let (m, bytes) = memory(f[1], f[2])?;
            reply[1] = bytes;
            *file = Some(m);
            Ok(())
        }
        op::SUM => {
            let (m, bytes) = memory(f[1], f[4])?;
            reply[1] = sum(&m, f[2], within(f[2], f[3], bytes)?).map_err(|_| CUDA_ERROR_UNKNOWN)?;
            Ok(())
        }
        op::MEMSET => {
            let (m, bytes) = memory(f[1], 0)?;
            let len = within(f[2], f[3], bytes)?;
            fill(&m, f[2], len, f[4].to_le_bytes()[0]).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)
        }
        op::MEM_INFO => {
            let world = server.world();
            let gpu = world
                .gpu(GpuUuid::from_words([f[1], f[2]]))
                .ok_or(CUDA_ERROR_INVALID_DEVICE)?;
            reply[1] = world.free_on(gpu);
            reply[2] = gpu.bytes;
            Ok(())
        }
        op::MARK => {
            let mut world = server.world();
            let session = world.session(id)?;
            session.managed |= f[1] == 1;
            session.ipc |= f[1] == 2;
            reply[1] = id;
            Ok(())
        }
        op::STEP_BEGIN => step_begin(server, c, id, f, reply),
        op::STEP_END => {
            let step = Step::from_repr(f[1]).ok_or(CUDA_ERROR_INVALID_VALUE)?;
            let now = server
                .world()
                .sessions
                .get(&id)
                .map(|s| s.by_gpu())
                .unwrap_or_default();
            let fields = json!({
                "pid": c.pid, "code": f[2], "bytes": f[3], "us": f[4], "gpus_before": c.before,
                "gpus": now,
            });
            server.events.write(step.as_ref(), fields);
            Ok(())
        }
        op::STILL_HANGING => {
            let step = Step::from_repr(f[1]).ok_or(CUDA_ERROR_INVALID_VALUE)?;
            reply[1] = u64::from(server.world().faults.hangs(step, c.pid));
            Ok(())
        }
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

/// A step of a checkpoint begins in a client: what is to happen to it?
fn step_begin(
    server: &Arc<Server>,
    c: &mut Connection,
    id: u64,
    f: &Frame,
    reply: &mut Frame,
) -> Result<(), CuResult> {
    let step = Step::from_repr(f[1]).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let mut world = server.world();
    let (mut verdict, acted) = world.faults.decide(step, c.pid);
    if let Some(s) = world.sessions.get(&id) {
        c.before = json!(s.by_gpu());
        if step == Step::Checkpoint && s.managed && verdict.directive == directive::PROCEED {
            verdict.directive = directive::FAIL;
            verdict.code = CUDA_ERROR_NOT_SUPPORTED;
        }
    }
    drop(world);
    if !acted.is_empty() {
        let fields =
            json!({ "pid": c.pid, "step": step.as_ref(), "switches": acted, "code": verdict.code });
        server.events.write("fault", fields);
    }
    reply[1..4].copy_from_slice(&[
        verdict.directive,
        u64::from(verdict.code.unsigned_abs()),
        verdict.delay_ms,
    ]);
    Ok(())
}

/// Memory of a GPU, whose name says which.
fn vram(gpu: GpuUuid, bytes: u64) -> io::Result<File> {
    let name = format!("{VRAM}{gpu}");
    let file = File::from(memfd_create(name.as_str(), MFdFlags::MFD_CLOEXEC)?);
    file.set_len(bytes)?;
    Ok(file)
}

fn within(offset: u64, len: u64, total: u64) -> Result<u64, CuResult> {
    match offset.checked_add(len) {
        Some(end) if end <= total => Ok(len),
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

/// The sum that `gpujob.cu` makes: word i times (i | 1), added up modulo 2^64.
fn sum(m: &File, offset: u64, len: u64) -> io::Result<u64> {
    let mut block = vec![0u8; BLOCK];
    let (mut total, mut at) = (0u64, 0u64);
    while at + 8 <= len {
        let n = usize::try_from((len - at).min(BLOCK as u64)).unwrap_or(BLOCK) & !7;
        m.read_exact_at(&mut block[..n], offset + at)?;
        for (i, chunk) in (at / 8..).zip(block[..n].chunks_exact(8)) {
            let mut w = [0u8; 8];
            w.copy_from_slice(chunk);
            total = total.wrapping_add(u64::from_le_bytes(w).wrapping_mul(i | 1));
        }
        at += n as u64;
    }
    Ok(total)
}

fn fill(m: &File, offset: u64, len: u64, value: u8) -> io::Result<()> {
    let block = vec![value; BLOCK];
    let mut at = 0;
    while at < len {
        let n = usize::try_from((len - at).min(BLOCK as u64)).unwrap_or(BLOCK);
        m.write_all_at(&block[..n], offset + at)?;
        at += n as u64;
    }
    Ok(())
}
