//! Renews a container's lease as long as the container exists, so that no other host takes the name of a running one over.
//!
//! A process of its own does so ([`NAME`]): the low-level runtime ends when the container is made. If that process is killed
//! or its host is lost, the lease runs out.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use super::Place;
use super::lease::{self, LeaseHolder};
use crate::run::{child, log};

/// The name under which this program renews a lease.
pub const NAME: &str = "cryopod-lease";
/// How often it looks whether the container's note is there.
const LOOK: Duration = Duration::from_secs(1);
/// The low-level runtime may take so long to make the container.
const MAKING: Duration = Duration::from_secs(120);
/// A lease may miss all renewals but one.
const RENEWALS: u32 = 3;

/// Starts the process for a container whose lease is noted.
pub fn start(id: &str, limit: Duration) -> io::Result<()> {
    let mut command = child::detached(NAME);
    command
        .args([id, &limit.as_secs().to_string()])
        .current_dir("/");
    command.spawn().map(drop)
}

/// Runs the process.
pub fn main(args: &[OsString]) -> ExitCode {
    log::init_at(Path::new(log::DETACHED));
    let [_, id, seconds] = args else {
        return ExitCode::FAILURE;
    };
    let seconds = seconds.to_str().and_then(|s| s.parse().ok());
    let (Some(path), Some(seconds)) = (lease::note_of(id), seconds) else {
        return ExitCode::FAILURE;
    };
    match keep(&path, Duration::from_secs(seconds)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            tracing::error!("{}: its lease is not renewed any more: {e}", path.display());
            ExitCode::FAILURE
        }
    }
}

/// Renews the lease of this note until the note is gone, or the container.
fn keep(path: &Path, limit: Duration) -> Result<(), String> {
    let note = File::open(path).map_err(|e| e.to_string())?;
    let note = note.metadata().map_err(|e| e.to_string())?.ino();
    let (place, me) = lease::read_note(path).ok_or("the note cannot be read")?;
    let (made, mut renewed) = (Instant::now(), Instant::now());
    loop {
        std::thread::sleep(LOOK.min(limit / RENEWALS));
        // A later container of this id has another one.
        if !fs::symlink_metadata(path).is_ok_and(|found| found.ino() == note) {
            return Ok(());
        }
        if !me.is_here() && made.elapsed() > MAKING {
            return Ok(());
        }
        if renewed.elapsed() >= limit / RENEWALS {
            renew(&place, &me)?;
            renewed = Instant::now();
        }
    }
}

fn renew(place: &Place, me: &LeaseHolder) -> Result<(), String> {
    match place.taken_over(me, true) {
        Ok(None) => {}
        Ok(Some(other)) => return Err(format!("{other} has it")),
        Err(e) => {
            tracing::warn!("{e}");
            return Ok(());
        }
    }
    if let Err(e) = place.renew(me) {
        tracing::warn!("the lease is not renewed: {e}");
    }
    Ok(())
}
