//! Calls what CRIU offers its plugins: the log, the image directory, the inventory.
//!
//! Every symbol is looked up at run time and may be absent: CRIU's versions differ, and a plugin with an unresolved
//! symbol does not load at all.

use cryopod_archive::format::text::printable;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::path::PathBuf;

pub const NAME: &CStr = c"cryopod_nvidia";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Level {
    Error = 1,
    Warn = 2,
    Info = 3,
    Debug = 4,
}

type Print = unsafe extern "C" fn(c_uint, *const c_char, ...);

fn symbol<T: Copy>(name: &CStr) -> Option<T> {
    const { assert!(size_of::<T>() == size_of::<*mut c_void>()) };
    // SAFETY: a NUL-terminated name.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    if found.is_null() {
        return None;
    }
    // SAFETY: T is pointer-sized and the caller names the symbol's C type.
    Some(unsafe { std::mem::transmute_copy::<*mut c_void, T>(&found) })
}

pub fn log(level: Level, message: &str) {
    let prefix = match level {
        Level::Error => "cryopod: Error: ",
        Level::Warn => "cryopod: Warning: ",
        Level::Info | Level::Debug => "cryopod: ",
    };
    let message = message.replace(['\0', '\n'], " ");
    let text = format!("{prefix}{}\n", printable(&message));
    match (symbol::<Print>(c"print_on_level"), CString::new(text)) {
        // SAFETY: CRIU's printf-like function; the format takes one string, which lives on.
        (Some(print), Ok(text)) => unsafe { print(level as c_uint, c"%s".as_ptr(), text.as_ptr()) },
        (None, Ok(text)) => eprint!("{}", text.to_string_lossy()),
        (_, Err(_)) => {}
    }
}

/// Keeps CRIU's lines for debugging out of its log from here on. A server's pages are tens of thousands of them, each a
/// write(2) while its processes stand still.
pub fn log_no_details() {
    let level = symbol::<unsafe extern "C" fn() -> c_uint>(c"log_get_loglevel");
    let set = symbol::<unsafe extern "C" fn(c_uint)>(c"log_set_loglevel");
    if let (Some(level), Some(set)) = (level, set) {
        // SAFETY: one takes nothing and returns a number, the other takes one and keeps it.
        unsafe {
            if level() > Level::Info as c_uint {
                set(Level::Info as c_uint);
            }
        }
    }
}

pub fn image_dir() -> Option<BorrowedFd<'static>> {
    let get = symbol::<unsafe extern "C" fn() -> c_int>(c"criu_get_image_dir")?;
    // SAFETY: takes nothing, returns a descriptor or a negative number.
    let fd: RawFd = unsafe { get() };
    // SAFETY: CRIU keeps this descriptor open from before the plugins' start until after their end.
    (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) })
}

/// Names this plugin in the inventory, so that a restore without it fails. Returns true on success.
pub fn add_to_inventory() -> bool {
    type Add = unsafe extern "C" fn(*const c_char) -> c_int;
    let Some(add) = symbol::<Add>(c"add_inventory_plugin") else {
        log(
            Level::Warn,
            "this CRIU keeps no list of plugins in its images",
        );
        return true;
    };
    // SAFETY: a static NUL-terminated string.
    unsafe { add(NAME.as_ptr()) == 0 }
}

/// Returns true if the images name this plugin; `None` when this CRIU cannot tell.
pub fn take_from_inventory() -> Option<bool> {
    type Check = unsafe extern "C" fn(*const c_char, usize) -> bool;
    let check = symbol::<Check>(c"check_and_remove_inventory_plugin")?;
    // SAFETY: a static string and its length.
    Some(unsafe { check(NAME.as_ptr(), NAME.to_bytes().len()) })
}

/// Keeps CRIU from freezing by cgroup: the driver's thread in the process must be able to run.
pub fn interrupt_only() {
    match symbol::<unsafe extern "C" fn()>(c"set_compel_interrupt_only_mode") {
        // SAFETY: takes nothing, sets a flag.
        Some(set) => unsafe { set() },
        None => log(
            Level::Warn,
            "this CRIU may freeze by cgroup, which the driver cannot work with",
        ),
    }
}

/// Returns true if this CRIU passes `bool *retry` to RESTORE_EXT_FILE, as from 4.3 on. It reads the value without
/// having set it.
pub fn wants_retry() -> bool {
    // New in the same version of the plugin interface.
    symbol::<*const c_void>(c"criu_plugin_get_options").is_some()
}

/// Returns true if CRIU's timeout for stopping the processes has passed. CRIU aborts itself 5 s later.
pub fn alarm_passed() -> bool {
    symbol::<unsafe extern "C" fn() -> bool>(c"alarm_timeouted")
        // SAFETY: takes nothing, reads a counter.
        .is_some_and(|passed| unsafe { passed() })
}

/// The directory this plugin was loaded from, links not resolved.
pub fn own_directory(own_symbol: *const c_void) -> Option<PathBuf> {
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: any address may be asked for; the structure is filled on success.
    if unsafe { libc::dladdr(own_symbol, &mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: a NUL-terminated path that lives as long as this library is loaded.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    let path = PathBuf::from(std::ffi::OsStr::from_bytes(name.to_bytes()));
    path.parent().map(ToOwned::to_owned)
}

use std::os::unix::ffi::OsStrExt;

/// A path below the image directory, for a message or a file operation of the standard library.
pub fn image_path(name: &str) -> Option<PathBuf> {
    let fd = image_dir()?;
    Some(PathBuf::from(format!(
        "/proc/self/fd/{}/{name}",
        fd.as_raw_fd()
    )))
}
