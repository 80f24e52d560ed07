//! Where the device server and the device nodes are: environment, a file beside the library,
//! defaults.
//!
//! A container engine passes almost no environment to CRIU, so a plugin that loads the library
//! finds the server through `cusim.conf` next to it: lines `socket=PATH` and `dev_root=PATH`.

use std::ffi::CStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::server::DEFAULT_SOCKET;

pub struct Places {
    pub socket: PathBuf,
    /// The directory of the device nodes, normally /dev.
    pub dev: PathBuf,
}

pub fn places() -> Places {
    let conf = library_directory()
        .and_then(|dir| fs::read_to_string(dir.join("cusim.conf")).ok())
        .unwrap_or_default();
    let from = |env: &str, key: &str, default: &str| {
        std::env::var_os(env)
            .filter(|v| !v.is_empty())
            .map(PathBuf::from)
            .or_else(|| {
                conf.lines()
                    .find_map(|l| l.trim().strip_prefix(key)?.strip_prefix('='))
                    .map(|v| PathBuf::from(v.trim()))
            })
            .unwrap_or_else(|| PathBuf::from(default))
    };
    Places {
        socket: from("CUSIM_SOCKET", "socket", DEFAULT_SOCKET),
        dev: from("CUSIM_DEV_ROOT", "dev_root", "/dev"),
    }
}

/// The directory that this library was loaded from.
fn library_directory() -> Option<PathBuf> {
    // SAFETY: an all-zero Dl_info is a valid value; dladdr fills it for an address of this
    // object, and the name it gives lives as long as the object.
    let name = unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        if libc::dladdr(library_directory as *const libc::c_void, &mut info) == 0
            || info.dli_fname.is_null()
        {
            return None;
        }
        CStr::from_ptr(info.dli_fname)
    };
    let path = Path::new(std::ffi::OsStr::from_bytes(name.to_bytes()));
    Some(path.parent()?.to_owned())
}
