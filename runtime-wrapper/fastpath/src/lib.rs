//! The pass-through of `cryopod-runtime`, taken before the C library starts.
//!
//! An engine calls its runtime several times for each container, and all but two verbs only have to become the
//! low-level runtime. glibc's start-up alone costs a few tenths of a millisecond on a virtual machine (it asks the
//! processor for its features, and each such question leaves the guest), as much as everything else the wrapper does.
//! So the statically linked release build starts here ([`cryopod_start`], the ELF entry point): if it is certain that
//! the call is only to be passed on, it is, with system calls alone; in any other case, and whatever looks unusual, the
//! ordinary start-up follows as if nothing had been, and the ordinary code decides. The two must agree, and the
//! pass-through tests run with this build.
//!
//! Nothing here may call into the C library, not even for a memcpy: its functions are not relocated yet. Hence
//! `no_builtins`, raw pointers, and buffers that are not cleared.
#![no_std]
#![no_builtins]
#![cfg(all(target_arch = "x86_64", target_os = "linux"))]

use core::arch::{asm, global_asm};
use core::mem::MaybeUninit;

global_asm!(
    ".globl cryopod_start",
    ".type cryopod_start,@function",
    "cryopod_start:",
    "mov rdi, rsp", // argc, argv, environment
    "push rdx",     // the kernel's word for _start
    "sub rsp, 8",
    "call {try_pass}",
    "add rsp, 8",
    "pop rdx",
    "jmp _start",
    try_pass = sym try_pass,
);

unsafe extern "C" {
    /// The entry point: never to be called.
    pub fn cryopod_start();
}

const CONFIG: &[u8] = b"/etc/cryopod/config.toml\0";
const SELF: &[u8] = b"/proc/self/exe\0";
/// The working folder's spec, for a `create` without `--bundle`.
const SPEC: &[u8] = b"config.json\0";
const SPEC_NAME: &[u8] = b"/config.json\0";
/// Annotations that the ordinary code must see at a `create` begin like this, in JSON.
const ANNOTATION: &[u8] = b"\"dev.cryopod.env.";
const SPEC_BUFFER: usize = 64 << 10;
/// A larger configuration is left to the ordinary code.
const CONFIG_MAX: usize = 4096;
const PATH_MAX: usize = 1024;

const SYS_READ: usize = 0;
const SYS_OPEN: usize = 2;
const SYS_CLOSE: usize = 3;
const SYS_STAT: usize = 4;
const SYS_EXECVE: usize = 59;
const ENOENT: isize = -2;
const O_CLOEXEC: usize = 0o2_000_000;

/// # Safety
/// The arguments must be what the system call wants.
unsafe fn syscall(number: usize, a: usize, b: usize, c: usize) -> isize {
    let result: isize;
    // SAFETY: the kernel clobbers rcx and r11 alone, and whatever the caller pointed it to.
    unsafe {
        asm!("syscall", inlateout("rax") number => result, in("rdi") a, in("rsi") b, in("rdx") c,
            lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result
}

/// A C string's bytes, one at a time.
type Text = *const u8;

/// Does `text` begin with `with`? Then what follows.
///
/// # Safety
/// `text` must end in NUL.
unsafe fn strip(text: Text, with: &[u8]) -> Option<Text> {
    let mut i = 0;
    while i < with.len() {
        // SAFETY: all bytes before were equal to bytes of `with`, which has no NUL before its end.
        if unsafe { *text.add(i) != *with.as_ptr().add(i) } {
            return None;
        }
        i += 1;
    }
    // SAFETY: within the string, or its NUL.
    Some(unsafe { text.add(i) })
}

/// # Safety
/// `text` must end in NUL.
unsafe fn is(text: Text, word: &[u8]) -> bool {
    // SAFETY: as the caller promises.
    unsafe { strip(text, word).is_some_and(|rest| *rest == 0) }
}

/// Passes the call on if that is certainly right; returns if not.
///
/// # Safety
/// `stack` must be the process's initial stack.
unsafe extern "C" fn try_pass(stack: *const usize) {
    // SAFETY: the kernel lays argc, argv, NULL, environment, NULL on the initial stack, all strings ending in NUL.
    unsafe {
        let argc = *stack;
        let argv = stack.add(1).cast::<Text>();
        let environment = argv.add(argc + 1);
        let mut i = 0;
        while i < argc {
            let arg = *argv.add(i);
            if i == 0 && ends_in_hook(arg) || is(arg, b"checkpoint") || is(arg, b"restore") {
                return;
            }
            if (is(arg, b"create") || is(arg, b"run")) && annotated(argv, argc) {
                return;
            }
            i += 1;
        }
        let (mut search, mut named): (Text, Text) = (core::ptr::null(), core::ptr::null());
        let mut entry = environment;
        while !(*entry).is_null() {
            if strip(*entry, b"CRYOPOD_CONFIG=").is_some() {
                return;
            } else if let Some(value) = strip(*entry, b"CRYOPOD_LOW_LEVEL_RUNTIME=") {
                if named.is_null() {
                    named = value;
                }
            } else if let Some(value) = strip(*entry, b"PATH=") {
                if search.is_null() {
                    search = value;
                }
            }
            entry = entry.add(1);
        }
        let mut config: MaybeUninit<[u8; CONFIG_MAX + 1]> = MaybeUninit::uninit();
        match configured(config.as_mut_ptr().cast()) {
            Configured::Nothing => {}
            Configured::Name(name) => named = name,
            Configured::Unclear => return,
        }
        if argc == 0 || search.is_null() {
            return;
        }
        let process = Process {
            argv: argv.cast_mut(),
            environment,
        };
        if !named.is_null() && *named != 0 {
            process.become_runtime(named, search);
        } else if process.become_runtime(c"crun".as_ptr().cast(), search) {
            process.become_runtime(c"runc".as_ptr().cast(), search);
        }
    }
}

/// Does the spec of the bundle on the command line have an annotation for the ordinary code, or might it?
///
/// # Safety
/// `argv` must be the process's own, of `argc` strings.
unsafe fn annotated(argv: *const Text, argc: usize) -> bool {
    // SAFETY: as the caller promises; the path is written within its buffer.
    unsafe {
        let mut folder: Text = core::ptr::null();
        let mut i = 1;
        while i < argc {
            let arg = *argv.add(i);
            if is(arg, b"--bundle") || is(arg, b"-bundle") || is(arg, b"-b") || is(arg, b"--b") {
                i += 1;
                if i == argc {
                    return true;
                }
                folder = *argv.add(i);
            } else if let Some(value) = strip(arg, b"--bundle=") {
                folder = value;
            } else if strip(arg, b"-b").is_some() || strip(arg, b"--b").is_some() {
                // Another spelling of it, perhaps.
                return true;
            }
            i += 1;
        }
        if folder.is_null() {
            return file_holds(SPEC.as_ptr());
        }
        let mut path: MaybeUninit<[u8; PATH_MAX]> = MaybeUninit::uninit();
        let path = path.as_mut_ptr().cast::<u8>();
        let mut length = 0;
        while *folder.add(length) != 0 {
            if length + SPEC_NAME.len() >= PATH_MAX {
                return true;
            }
            *path.add(length) = *folder.add(length);
            length += 1;
        }
        let mut i = 0;
        while i < SPEC_NAME.len() {
            *path.add(length + i) = *SPEC_NAME.as_ptr().add(i);
            i += 1;
        }
        file_holds(path)
    }
}

/// Is [`ANNOTATION`] in this file? A file that cannot be opened holds nothing; one that cannot be read might.
///
/// # Safety
/// `path` must end in NUL.
unsafe fn file_holds(path: Text) -> bool {
    let mut buffer: MaybeUninit<[u8; SPEC_BUFFER]> = MaybeUninit::uninit();
    let buffer = buffer.as_mut_ptr().cast::<u8>();
    // SAFETY: only as many bytes are looked at as the kernel has written.
    unsafe {
        let file = syscall(SYS_OPEN, path as usize, O_CLOEXEC, 0);
        let Ok(file) = usize::try_from(file) else {
            return false;
        };
        // How much of the annotation the bytes before have matched. Its first byte comes but once in it, so after a
        // mismatch the search begins anew at that very byte.
        let mut matched = 0;
        let mut found = false;
        loop {
            let read = syscall(SYS_READ, file, buffer as usize, SPEC_BUFFER);
            let Ok(read) = usize::try_from(read) else {
                found = true;
                break;
            };
            if read == 0 || found {
                break;
            }
            let mut i = 0;
            while i < read && !found {
                let byte = *buffer.add(i);
                if byte == *ANNOTATION.as_ptr().add(matched) {
                    matched += 1;
                    found = matched == ANNOTATION.len();
                } else {
                    matched = usize::from(byte == *ANNOTATION.as_ptr());
                }
                i += 1;
            }
        }
        syscall(SYS_CLOSE, file, 0, 0);
        found
    }
}

/// Is this program called as CRIU's hook? By its last letters, which is as much as has to be known.
///
/// # Safety
/// `name` must end in NUL.
unsafe fn ends_in_hook(name: Text) -> bool {
    let mut at = name;
    // SAFETY: goes on until the NUL.
    unsafe {
        while *at != 0 {
            if is(at, b"-hook") {
                return true;
            }
            at = at.add(1);
        }
    }
    false
}

enum Configured {
    /// No file, or none that names a runtime.
    Nothing,
    /// This one, ending in NUL.
    Name(Text),
    /// Not for this code to say.
    Unclear,
}

/// Reads the configuration as far as it must be known here: `low_level = "NAME"` on a line of its own below
/// `[runtime]`, once. Anything that might mean something else is unclear.
///
/// # Safety
/// `buffer` must have room for `CONFIG_MAX + 1` bytes and outlive the name.
unsafe fn configured(buffer: *mut u8) -> Configured {
    // SAFETY: the buffer is written by the kernel up to `length`, NUL included, and read up to there.
    unsafe {
        let file = syscall(SYS_OPEN, CONFIG.as_ptr() as usize, O_CLOEXEC, 0);
        if file == ENOENT {
            return Configured::Nothing;
        }
        let Ok(file) = usize::try_from(file) else {
            return Configured::Unclear;
        };
        let read = syscall(SYS_READ, file, buffer as usize, CONFIG_MAX);
        syscall(SYS_CLOSE, file, 0, 0);
        let Ok(length) = usize::try_from(read) else {
            return Configured::Unclear;
        };
        if length == CONFIG_MAX {
            return Configured::Unclear;
        }
        *buffer.add(length) = 0;
        let mut found: Text = core::ptr::null();
        let mut in_runtime = false;
        let mut line: Text = buffer;
        loop {
            let mut end = line;
            while *end != 0 && *end != b'\n' {
                // Strings over several lines, and inline tables, could hold anything.
                if is_three_quotes(end) || *end == b'{' {
                    return Configured::Unclear;
                }
                end = end.add(1);
            }
            if *line == b'[' {
                in_runtime = strip(line, b"[runtime]").is_some_and(|rest| rest == end);
            } else if *line != b'#' && holds(line, end, b"low_level") {
                let value = strip(line, b"low_level = \"");
                match value {
                    Some(value) if in_runtime && found.is_null() => {
                        let mut at = value;
                        while at != end && *at != b'"' && *at != b'\\' {
                            at = at.add(1);
                        }
                        if at == end || *at != b'"' || at.add(1) != end {
                            return Configured::Unclear;
                        }
                        *at.cast_mut() = 0;
                        found = value;
                    }
                    _ => return Configured::Unclear,
                }
            }
            if end.offset_from(buffer) as usize >= length {
                break;
            }
            line = end.add(1);
        }
        if found.is_null() {
            Configured::Nothing
        } else {
            Configured::Name(found)
        }
    }
}

/// # Safety
/// `at` must end in NUL.
unsafe fn is_three_quotes(at: Text) -> bool {
    // SAFETY: as the caller promises.
    unsafe { strip(at, b"\"\"\"").is_some() || strip(at, b"'''").is_some() }
}

/// Is `word` anywhere between `at` and `end`?
///
/// # Safety
/// `at` must end in NUL, not before `end`.
unsafe fn holds(mut at: Text, end: Text, word: &[u8]) -> bool {
    // SAFETY: as the caller promises.
    unsafe {
        while at != end {
            if strip(at, word).is_some() {
                return true;
            }
            at = at.add(1);
        }
    }
    false
}

struct Process {
    argv: *mut Text,
    environment: *const Text,
}

impl Process {
    /// Becomes the runtime `name`, searched in the folders of `search` if it has no slash. Returns `true` if that
    /// runtime is nowhere, `false` if this code is not to run it for whatever reason.
    ///
    /// # Safety
    /// Both must end in NUL.
    unsafe fn become_runtime(&self, name: Text, search: Text) -> bool {
        // SAFETY: as the caller promises.
        unsafe {
            let mut at = name;
            while *at != 0 {
                if *at == b'/' {
                    return self.exec(name, name);
                }
                at = at.add(1);
            }
            let mut path: MaybeUninit<[u8; PATH_MAX]> = MaybeUninit::uninit();
            let path = path.as_mut_ptr().cast::<u8>();
            let mut folder = search;
            loop {
                let mut length = 0;
                while *folder != 0 && *folder != b':' {
                    if length >= PATH_MAX / 2 {
                        return false;
                    }
                    *path.add(length) = *folder;
                    length += 1;
                    folder = folder.add(1);
                }
                *path.add(length) = b'/';
                let mut i = 0;
                while *name.add(i) != 0 {
                    if i >= PATH_MAX / 2 - 2 {
                        return false;
                    }
                    *path.add(length + 1 + i) = *name.add(i);
                    i += 1;
                }
                *path.add(length + 1 + i) = 0;
                // An empty entry means the working folder: unusual enough for the ordinary code.
                if length == 0 || !self.exec(path, name) {
                    return false;
                }
                if *folder == 0 {
                    return true;
                }
                folder = folder.add(1);
            }
        }
    }

    /// Becomes the program at `path`. Returns `true` if there is none, `false` if there is one but this code is not to
    /// run it.
    ///
    /// # Safety
    /// Both must end in NUL.
    unsafe fn exec(&self, path: Text, name: Text) -> bool {
        // The kernel's struct stat, of which device and inode come first.
        let mut found: MaybeUninit<[u64; 18]> = MaybeUninit::uninit();
        let mut own: MaybeUninit<[u64; 18]> = MaybeUninit::uninit();
        // SAFETY: both buffers are as large as the kernel's struct; they are read only after it has filled them.
        unsafe {
            let (found, own) = (
                found.as_mut_ptr().cast::<u64>(),
                own.as_mut_ptr().cast::<u64>(),
            );
            match syscall(SYS_STAT, path as usize, found as usize, 0) {
                0 => {}
                ENOENT => return true,
                _ => return false,
            }
            if syscall(SYS_STAT, SELF.as_ptr() as usize, own as usize, 0) != 0 {
                return false;
            }
            // This very program under the runtime's name: the ordinary code says so.
            if *found == *own && *found.add(1) == *own.add(1) {
                return false;
            }
            let before = *self.argv;
            *self.argv = name;
            syscall(
                SYS_EXECVE,
                path as usize,
                self.argv as usize,
                self.environment as usize,
            );
            *self.argv = before;
        }
        false
    }
}
