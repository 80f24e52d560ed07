//! Renews a container's lease as long as the container exists, so that no other host takes the name of a running one over.
//!
//! A process of its own does so ([`NAME`]): the low-level runtime ends when the container is made. If that process is killed
//! or its host is lost, the lease runs out.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, ExitCode};
use std::time::{Duration, Instant, SystemTime};

use super::Place;
use super::lease::{self, LeaseHolder, NameLease};
use crate::run::{child, log};

/// The name under which this program renews a lease.
pub const NAME: &str = "cryopod-lease";
/// How often it looks whether the container's note is there.
const LOOK: Duration = Duration::from_secs(1);
/// The low-level runtime may take so long to make the container.
const MAKING: Duration = Duration::from_secs(120);

/// Starts the process for a container whose lease is noted, and that exists or is going to. It keeps the lease's lock until
/// the container exists.
pub fn start(id: &str, limit: Duration, lease: &NameLease) -> io::Result<Child> {
    let mut command = child::detached(NAME);
    let (limit, maker) = (limit.as_secs().to_string(), std::process::id().to_string());
    command.args([id, &limit, &maker]).current_dir("/");
    command.stdin(lease.share()?).spawn()
}

/// Runs the process.
pub fn main(args: &[OsString]) -> ExitCode {
    log::init_at(Path::new(log::DETACHED));
    let [_, id, seconds, maker] = args else {
        return ExitCode::FAILURE;
    };
    let number = |text: &OsString| text.to_str().and_then(|s| s.parse().ok());
    let (Some(path), Some(seconds), Some(maker)) =
        (lease::note_of(id), number(seconds), number(maker))
    else {
        return ExitCode::FAILURE;
    };
    match keep(&path, Duration::from_secs(seconds), maker) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            tracing::error!("{}: its lease is not renewed any more: {e}", path.display());
            ExitCode::FAILURE
        }
    }
}

/// Renews the lease of this note until the note is gone, or the container. `maker`: the process that makes the container, or
/// becomes the low-level runtime that does.
fn keep(path: &Path, limit: Duration, maker: u64) -> Result<(), String> {
    let note = match File::open(path) {
        // No container was made.
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        note => note.map_err(|e| e.to_string())?,
    };
    let note = note.metadata().map_err(|e| e.to_string())?.ino();
    let (place, me) = lease::read_note(path).ok_or("the note cannot be read")?;
    let (mut made, mut renewed) = (Instant::now(), RenewalTime::now());
    let lock = io::stdin().as_fd().try_clone_to_owned().ok();
    let mut lock = lock.map(File::from);
    let null = File::open("/dev/null").map_err(|e| e.to_string())?;
    nix::unistd::dup2_stdin(&null).map_err(|e| e.to_string())?;
    loop {
        std::thread::sleep(LOOK.min(lease::period(limit)));
        // A later container of this id has another one.
        if !fs::symlink_metadata(path).is_ok_and(|found| found.ino() == note) {
            return Ok(());
        }
        if me.is_here() {
            drop(lock.take());
        } else if u64::from(std::os::unix::process::parent_id()) == maker {
            made = Instant::now();
        } else if made.elapsed() > MAKING {
            return Ok(());
        }
        if renewed.elapsed() >= lease::period(limit) {
            let lease = renew(&place, &me)?;
            // Until the container exists, its maker has the lock of the lease that counts.
            if lock.is_some() {
                lock = lease.and_then(|lease| lease.share().ok()).or(lock);
            }
            renewed = RenewalTime::now();
        }
    }
}

/// When the lease was renewed, by two clocks: one does not count the time for which the host sleeps, the other may be set back.
struct RenewalTime(Instant, SystemTime);

impl RenewalTime {
    fn now() -> Self {
        Self(Instant::now(), SystemTime::now())
    }

    /// How long ago it was by the clock that says more.
    fn elapsed(&self) -> Duration {
        self.0.elapsed().max(self.1.elapsed().unwrap_or_default())
    }
}

fn renew(place: &Place, me: &LeaseHolder) -> Result<Option<NameLease>, String> {
    match place.taken_over(me, true) {
        Ok(None) => {}
        Ok(Some(other)) => return Err(format!("{other} has it")),
        Err(e) => {
            tracing::warn!("{e}");
            return Ok(None);
        }
    }
    let renewed = place.renew(me);
    Ok(renewed.unwrap_or_else(|e| {
        tracing::warn!("the lease is not renewed: {e}");
        None
    }))
}
