//! Denies render nodes to a container while it is being restored.
//!
//! crun applies the container's device rules on cgroup v2 only when CRIU has restored the container
//! (`libcrun_container_restore`). CRIU's amdgpu plugin is done by then: it has seen all GPUs of the host, and wants as many as
//! the checkpoint has; so does the kernel of the process that has opened the KFD. So the render nodes that the spec
//! denies are denied here, by a program of the kind with which crun and runc do it. It denies nothing else, and stays:
//! the runtime's own program denies the same.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::PathBuf;

use cryopod_host::files::Host;
use cryopod_host::nodes::DRM_MAJOR;

/// CRIU's stage at which the container's first process is in its cgroup, and no file is open yet.
pub const STAGE: &str = "post-setup-namespaces";
const ROOTS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];

/// Denies these render minors to the cgroup of the container's first process. Nothing is done where that is no cgroup v2 of
/// the container's own.
pub fn deny(host: &Host, init: i32, minors: &[u32]) -> io::Result<()> {
    if minors.is_empty() {
        return Ok(());
    }
    let Some(cgroup) = cgroup(host, init) else {
        tracing::debug!("process {init} is in no cgroup v2 of its own");
        return Ok(());
    };
    attach(&File::open(cgroup)?, &program(minors))
}

/// The cgroup of the process, unless this process is in it or below it.
fn cgroup(host: &Host, init: i32) -> Option<PathBuf> {
    let of = |process: &str| {
        let text = host.text(format!("/proc/{process}/cgroup")).ok()?;
        let line = text.lines().find_map(|l| l.strip_prefix("0::"))?;
        Some(line.to_owned())
    };
    let (its, ours) = (of(&init.to_string())?, of("self")?);
    let shared = its == "/" || its == ours || ours.starts_with(&format!("{its}/"));
    if shared || its.split('/').any(|name| name == "..") {
        return None;
    }
    let at = |root: &&str| {
        let path = host.path(format!("{root}{its}"));
        path.join("cgroup.procs").exists().then_some(path)
    };
    ROOTS.iter().find_map(at)
}

/// `struct bpf_insn` of linux/bpf.h.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Instruction {
    code: u8,
    /// Destination in the low half, source in the high one.
    registers: u8,
    offset: i16,
    immediate: i32,
}

/// Loads a 32-bit word from where the source points; copies; masks, shifts to the right; jumps if equal, if not; moves a number;
/// returns.
const LOAD: u8 = 0x61;
const COPY: u8 = 0xbf;
const AND: u8 = 0x57;
const SHIFT: u8 = 0x77;
const JUMP_EQUAL: u8 = 0x15;
const JUMP_OTHER: u8 = 0x55;
const MOVE: u8 = 0xb7;
const EXIT: u8 = 0x95;
/// `BPF_DEVCG_DEV_CHAR`.
const CHARACTER: i32 = 2;
/// `BPF_DEVCG_ACC_READ` and `_WRITE`. To make a node is no use of it, and runtimes allow it.
const READ_OR_WRITE: i32 = 6;

/// The program, over `struct bpf_cgroup_dev_ctx { access_type, major, minor }` in register 1. The access is in the upper
/// half of `access_type`, the kind of the device in the lower.
fn program(minors: &[u32]) -> Vec<Instruction> {
    let of = |code, registers, offset, immediate| Instruction {
        code,
        registers,
        offset,
        immediate,
    };
    let count = i16::try_from(minors.len()).unwrap_or(i16::MAX - 8);
    let minors = &minors[..minors.len().min(count as usize)];
    let mut all = vec![
        of(LOAD, 0x12, 0, 0),
        of(COPY, 0x23, 0, 0),
        of(AND, 0x02, 0, 0xffff),
        of(JUMP_OTHER, 0x02, count + 6, CHARACTER),
        of(SHIFT, 0x03, 0, 16),
        of(AND, 0x03, 0, READ_OR_WRITE),
        of(JUMP_EQUAL, 0x03, count + 3, 0),
        of(LOAD, 0x12, 4, 0),
        of(JUMP_OTHER, 0x02, count + 1, DRM_MAJOR as i32),
        of(LOAD, 0x12, 8, 0),
    ];
    for (at, minor) in (0..).zip(minors) {
        all.push(of(JUMP_EQUAL, 0x02, count - at + 1, *minor as i32));
    }
    all.extend([
        of(MOVE, 0x00, 0, 1),
        of(EXIT, 0x00, 0, 0),
        of(MOVE, 0x00, 0, 0),
        of(EXIT, 0x00, 0, 0),
    ]);
    all
}

/// What `BPF_PROG_LOAD` reads of `union bpf_attr`.
#[repr(C)]
struct Load {
    kind: u32,
    count: u32,
    instructions: u64,
    license: u64,
    /// The rest of what kernels have read since 4.14, zero.
    rest: [u64; 6],
}

/// What `BPF_PROG_ATTACH` reads of it.
#[repr(C)]
struct Attach {
    target: u32,
    program: u32,
    kind: u32,
    flags: u32,
}

const PROG_LOAD: libc::c_int = 5;
const PROG_ATTACH: libc::c_int = 8;
const CGROUP_DEVICE_PROGRAM: u32 = 15;
const CGROUP_DEVICE: u32 = 6;
const ALLOW_MULTI: u32 = 2;

fn attach(cgroup: &File, program: &[Instruction]) -> io::Result<()> {
    let load = Load {
        kind: CGROUP_DEVICE_PROGRAM,
        count: u32::try_from(program.len()).unwrap_or(u32::MAX),
        instructions: program.as_ptr() as u64,
        license: c"Apache-2.0".as_ptr() as u64,
        rest: [0; 6],
    };
    // SAFETY: the kernel reads the structure, and the instructions and the text that it points to; all outlive the call.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, PROG_LOAD, &raw const load, size_of::<Load>()) };
    let program = match i32::try_from(fd) {
        // SAFETY: a descriptor that was just made and belongs to nobody else.
        Ok(fd) if fd >= 0 => unsafe { OwnedFd::from_raw_fd(fd) },
        _ => return Err(io::Error::last_os_error()),
    };
    let number = |fd: i32| u32::try_from(fd).unwrap_or(u32::MAX);
    let attach = Attach {
        target: number(cgroup.as_raw_fd()),
        program: number(program.as_raw_fd()),
        kind: CGROUP_DEVICE,
        flags: ALLOW_MULTI,
    };
    // SAFETY: the kernel reads the structure, which outlives the call.
    let done = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            PROG_ATTACH,
            &raw const attach,
            size_of::<Attach>(),
        )
    };
    match done {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Runs the program as the kernel would.
    fn allows(program: &[Instruction], access: u32, kind: u32, major: u32, minor: u32) -> bool {
        let context = [access << 16 | kind, major, minor];
        let mut registers = [0u32; 4];
        let mut at = 0;
        loop {
            let i = program[at];
            at += 1;
            let (to, from) = (usize::from(i.registers & 15), usize::from(i.registers >> 4));
            let number = i.immediate as u32;
            match i.code {
                LOAD => registers[to] = context[i.offset as usize / 4],
                COPY => registers[to] = registers[from],
                AND => registers[to] &= number,
                SHIFT => registers[to] >>= number,
                JUMP_EQUAL if registers[to] == number => at += i.offset as usize,
                JUMP_OTHER if registers[to] != number => at += i.offset as usize,
                JUMP_EQUAL | JUMP_OTHER => {}
                MOVE => registers[to] = number,
                EXIT => return registers[0] == 1,
                other => panic!("{other:#x}"),
            }
        }
    }

    #[test]
    fn it_denies_these_render_nodes_and_nothing_else() {
        let program = program(&[129, 131]);
        let (make, read, write, all) = (1, 2, 4, 7);
        for (access, kind, major, minor, allowed) in [
            (all, 2, 226, 128, true),
            (all, 2, 226, 129, false),
            (read, 2, 226, 131, false),
            (write, 2, 226, 131, false),
            (make, 2, 226, 131, true),
            (all, 2, 226, 132, true),
            (all, 2, 1, 129, true),
            (all, 1, 226, 129, true),
        ] {
            let found = allows(&program, access, kind, major, minor);
            assert_eq!(found, allowed, "{access} {kind} {major}:{minor}");
        }
    }

    #[test]
    fn only_a_cgroup_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::at(dir.path());
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("proc/self/cgroup", "0::/engine/conmon\n");
        for (its, own) in [
            ("/engine/container", true),
            ("/engine/conmon", false),
            ("/engine", false),
            ("/", false),
            ("/../other", false),
            ("/engine/gone", false),
        ] {
            write("proc/7/cgroup", &format!("4:cpu:/x\n0::{its}\n"));
            write("sys/fs/cgroup/engine/container/cgroup.procs", "7\n");
            assert_eq!(cgroup(&host, 7).is_some(), own, "{its}");
        }
    }
}
