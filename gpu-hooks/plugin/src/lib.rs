//! Implements the CRIU plugin that checkpoints and restores CUDA processes through NVIDIA's driver.
//!
//! This file is the C boundary: the descriptor that CRIU reads and the hooks it calls. CRIU calls them one at a time on
//! its main thread, which also traces the processes. The only state behind the boundary is the current operation; no
//! panic crosses it.
//!
//! * [`session`]: configuration, connection to the driver agent, overlapping driver calls, report
//! * [`dump`], [`restore`]: the two operations
//! * [`files`]: leftover device files
//! * [`maps`]: leftover mappings of device files
//! * [`vram`]: GPU memory that does not go through CRIU
//! * [`criu`]: what CRIU offers, looked up at run time

mod criu;
mod dump;
mod files;
mod maps;
mod preload_steps;
mod restore;
mod session;
mod vram;
mod vram_steps;

use criu::Level;
use cryopod_cuda::messages::config::Operation;
use cryopod_cuda::messages::image::NvidiaImage;
use dump::Dump;
use restore::Restore;
use session::{Failed, Session, failure, failure_with, read_config};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

/// The version of the plugin interface in CRIU 4.0 to 4.2, which 4.3 takes too, and as many hooks as the oldest knows.
const INTERFACE_VERSION: u32 = 0x200;
const HOOKS: usize = 12;

const STAGE_DUMP: c_int = 0;
const STAGE_PRE_DUMP: c_int = 1;
const STAGE_RESTORE: c_int = 2;

const FAILED: c_int = -1;
/// "Not mine": CRIU asks the next plugin, and takes it for success where no plugin has to answer.
const NOT_MINE: c_int = -libc::ENOTSUP;

/// `cr_plugin_desc_t`.
#[repr(C)]
pub struct PluginDescriptor {
    name: *const c_char,
    init: extern "C" fn(c_int) -> c_int,
    exit: extern "C" fn(c_int, c_int),
    version: u32,
    max_hooks: u32,
    hooks: [*const c_void; HOOKS],
}

// SAFETY: pointers to static strings and functions, never changed.
unsafe impl Sync for PluginDescriptor {}

/// The symbol that CRIU looks for in a plugin.
#[unsafe(no_mangle)]
pub static CR_PLUGIN_DESC: PluginDescriptor = PluginDescriptor {
    name: criu::NAME.as_ptr(),
    init,
    exit,
    version: INTERFACE_VERSION,
    max_hooks: HOOKS as u32,
    hooks: {
        let mut hooks = [std::ptr::null(); HOOKS];
        hooks[2] = dump_file as *const c_void;
        hooks[3] = restore_file as *const c_void;
        hooks[7] = device_map as *const c_void;
        hooks[8] = update_map as *const c_void;
        hooks[9] = resume_late as *const c_void;
        hooks[10] = pause as *const c_void;
        hooks[11] = checkpoint as *const c_void;
        hooks
    },
};

enum Work {
    /// Nothing that concerns us.
    Idle,
    Dump(Box<Dump>),
    Restore(Box<Restore>),
}

static WORK: Mutex<Work> = Mutex::new(Work::Idle);

/// Runs a hook: takes the state, catches panics, records a failure.
fn hook(name: &str, run: impl FnOnce(&mut Work) -> Result<c_int, Failed>) -> c_int {
    let run = AssertUnwindSafe(|| {
        let mut work = WORK.lock().unwrap_or_else(PoisonError::into_inner);
        test_panic(name, &work);
        match run(&mut work) {
            Ok(result) => result,
            Err(failed) => {
                record(&mut work, failed);
                FAILED
            }
        }
    });
    catch_unwind(run).unwrap_or_else(|_| {
        // The state is whole: every change to it is one assignment. The exit does what it owes the processes.
        let after = AssertUnwindSafe(|| {
            let mut work = WORK.lock().unwrap_or_else(PoisonError::into_inner);
            let failed = failure_with(
                name,
                None,
                "internal error",
                "please report it with CRIU's log and standard error",
            );
            record(&mut work, failed);
        });
        let _ = catch_unwind(after);
        FAILED
    })
}

fn record(work: &mut Work, failed: Failed) {
    match work {
        Work::Dump(dump) => dump.session.fail(failed),
        Work::Restore(restore) => restore.session.fail(failed),
        Work::Idle => criu::log(Level::Error, &failed.to_string()),
    }
}

#[cfg(feature = "test-hooks")]
#[allow(clippy::panic)]
fn test_panic(name: &str, work: &Work) {
    let config = match work {
        Work::Dump(dump) => &dump.session.config,
        Work::Restore(restore) => &restore.session.config,
        Work::Idle => return,
    };
    if config.test_panic_in.as_deref() == Some(name) {
        panic!("test: {name} was told to panic");
    }
}

#[cfg(not(feature = "test-hooks"))]
fn test_panic(_name: &str, _work: &Work) {}

extern "C" fn init(stage: c_int) -> c_int {
    hook("init", |work| {
        *work = match stage {
            STAGE_DUMP => start_dump()?,
            STAGE_RESTORE => start_restore()?,
            STAGE_PRE_DUMP => {
                read_config((&raw const CR_PLUGIN_DESC).cast(), Operation::PreDump)?;
                criu::log(Level::Info, "pre-dump: GPU memory is left to the dump");
                Work::Idle
            }
            other => return Err(failure("init", None, format!("unknown stage {other}"))),
        };
        Ok(0)
    })
}

fn start_dump() -> Result<Work, Failed> {
    let config = read_config((&raw const CR_PLUGIN_DESC).cast(), Operation::Checkpoint)?;
    let mut session = Session::new(config, NvidiaImage::default());
    let ready = session.check_abort("init").and_then(|()| session.connect());
    if let Err(failed) = ready {
        // CRIU does not call the exit of a plugin whose init failed.
        session.note(failed.clone());
        return Err(failed);
    }
    // CRIU takes over a cgroup that is frozen already, and thaws it when it has stopped all processes.
    if session.config.locked.is_empty() {
        criu::interrupt_only();
    }
    Ok(Work::Dump(Box::new(Dump::new(session))))
}

fn start_restore() -> Result<Work, Failed> {
    let config = read_config((&raw const CR_PLUGIN_DESC).cast(), Operation::Restore)?;
    let named = criu::take_from_inventory();
    let mut session = Session::new(config, NvidiaImage::default());
    let begin = || -> Result<Option<NvidiaImage>, Failed> {
        let image = restore::read_image()?;
        if image.is_none() && named == Some(true) {
            let what = "the images name this plugin but its own image is missing";
            return Err(failure_with(
                "image",
                None,
                what,
                "the checkpoint is incomplete",
            ));
        }
        Ok(image)
    };
    let image = match begin() {
        Ok(Some(image)) => image,
        Ok(None) => {
            criu::log(Level::Info, "the checkpoint has no CUDA process");
            return Ok(Work::Idle);
        }
        Err(failed) => {
            session.note(failed.clone());
            return Err(failed);
        }
    };
    criu::interrupt_only();
    let config = session.config.clone();
    session.image = image;
    match Restore::new(session) {
        Ok(restore) => Ok(Work::Restore(Box::new(restore))),
        Err(failed) => {
            Session::new(config, NvidiaImage::default()).note(failed.clone());
            Err(failed)
        }
    }
}

extern "C" fn exit(_stage: c_int, result: c_int) {
    hook("exit", |work| {
        match std::mem::replace(work, Work::Idle) {
            Work::Dump(mut dump) => dump.finish(result == 0),
            Work::Restore(mut restore) => restore.finish(result == 0),
            Work::Idle => {}
        }
        Ok(0)
    });
}

extern "C" fn pause(pid: c_int) -> c_int {
    hook("pause", |work| match work {
        Work::Dump(dump) => dump.pause(pid).map(|()| NOT_MINE),
        _ => Ok(NOT_MINE),
    })
}

extern "C" fn checkpoint(_pid: c_int) -> c_int {
    hook("checkpoint", |work| match work {
        Work::Dump(dump) => {
            dump.checkpoint()?;
            criu::log_no_details();
            Ok(NOT_MINE)
        }
        _ => Ok(NOT_MINE),
    })
}

extern "C" fn resume_late(pid: c_int) -> c_int {
    let result = hook("resume", |work| match work {
        Work::Restore(restore) => restore.resume(pid).map(|()| NOT_MINE),
        _ => Ok(NOT_MINE),
    });
    if result == FAILED {
        hook("kill", |work| {
            if let Work::Restore(restore) = work {
                restore.kill(pid)?;
            }
            Ok(0)
        });
    }
    result
}

extern "C" fn dump_file(fd: c_int, id: c_int) -> c_int {
    hook("dump file", |work| {
        let Work::Dump(dump) = work else {
            return Ok(NOT_MINE);
        };
        dump.session.check_abort("device file")?;
        if fd < 0 {
            return Ok(NOT_MINE);
        }
        // SAFETY: CRIU's descriptor of the file, open during the call.
        let file = unsafe { BorrowedFd::borrow_raw(fd) };
        let Some(record) = files::describe(file, id)? else {
            return Ok(NOT_MINE);
        };
        criu::log(
            Level::Info,
            &format!("device file {} recorded as {id:#x}", record.path),
        );
        dump.session.image.files.push(record);
        dump.write_image()?;
        Ok(0)
    })
}

/// `retry`: whether CRIU should ask again later. Before CRIU 4.3 there is no such argument, and it holds anything.
extern "C" fn restore_file(id: c_int, retry: *mut bool) -> c_int {
    hook("restore file", |work| {
        if criu::wants_retry() && !retry.is_null() {
            // SAFETY: CRIU's variable, alive during the call.
            unsafe { retry.write(false) };
        }
        let Work::Restore(restore) = work else {
            return Ok(NOT_MINE);
        };
        match restore
            .session
            .image
            .files
            .iter()
            .find(|record| record.id == id)
        {
            Some(record) => files::reopen(record).map(files::into_criu),
            None => Ok(NOT_MINE),
        }
    })
}

/// Accepts the mappings of a file: [`Dump::checkpoint`] has recorded them.
extern "C" fn device_map(fd: c_int, _stat: *const libc::stat) -> c_int {
    hook("device mapping", |work| match work {
        Work::Dump(dump) if dump.session.image.inherited_maps > 0 && maps::is_ours(fd) => Ok(0),
        _ => Ok(NOT_MINE),
    })
}

/// Gives a restored mapping something to map. Returns 1 if it did.
extern "C" fn update_map(
    path: *const c_char,
    _address: u64,
    _old_offset: u64,
    new_offset: *mut u64,
    new_fd: *mut c_int,
) -> c_int {
    hook("update mapping", |work| {
        let Work::Restore(restore) = work else {
            return Ok(NOT_MINE);
        };
        if path.is_null() || new_offset.is_null() || new_fd.is_null() {
            return Ok(NOT_MINE);
        }
        // SAFETY: CRIU's string, valid during the call.
        let path = unsafe { CStr::from_ptr(path) };
        if restore.session.image.inherited_maps == 0 || !maps::names_ours(path) {
            return Ok(NOT_MINE);
        }
        let fd = maps::empty()?;
        // SAFETY: not null, and CRIU's to be written.
        unsafe {
            *new_offset = 0;
            *new_fd = fd;
        }
        Ok(1)
    })
}
