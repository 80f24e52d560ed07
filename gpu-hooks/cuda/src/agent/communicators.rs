//! Which processes' NCCL communicators are down, and whether they need to be.

use super::error;
use crate::messages::protocol::{DriverError, ErrorKind, NcclDone, Op, Outcome};
use crate::preload::nccl::{Group, UP};
use crate::sharing;
use cryopod_host::files::Host;
use cryopod_host::processes::Scan;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

#[derive(Default)]
pub struct Communicators {
    /// Processes whose communicators are down.
    down: Mutex<Vec<i32>>,
}

fn unsupported(what: String) -> DriverError {
    error(ErrorKind::NotSupported, what)
}

impl Communicators {
    /// Carries out a request about communicators; `None` for any other.
    pub fn perform(&self, op: &Op) -> Option<Outcome> {
        let done = match op {
            Op::NcclDown {
                pids,
                quiesce_ms,
                refuse_shared,
            } => self.take(pids, Duration::from_millis(*quiesce_ms), *refuse_shared),
            Op::NcclUp { pids } => up(pids),
            _ => return None,
        };
        Some(done.map_or_else(Outcome::Error, Outcome::Nccl))
    }

    /// Takes the processes' communicators down. Those over a transport that the driver brings back go, too: a rank whose
    /// kernel waits for another one, whose call waits at the gate, would never be idle.
    fn take(
        &self,
        pids: &[i32],
        quiesce: Duration,
        refuse_shared: bool,
    ) -> Result<NcclDone, DriverError> {
        let host = Host::system();
        let shared = || sharing::preflight(&host, &Scan::of(&host, pids), pids);
        let mut group = Group::settled(pids).map_err(unsupported)?;
        if group.is_down() {
            // The agent that took them down has died, and no other one has come yet.
            up(pids)?;
            group = Group::settled(pids).map_err(unsupported)?;
        }
        if let Some((pid, why)) = group.multicast() {
            return Err(unsupported(format!("process {pid}: {why}")));
        }
        if !group.has_comms() {
            return Ok(NcclDone::default());
        }
        let shares = !group.is_alone() && !shared().is_empty();
        if let Some((pid, why)) = group.obstacles().first() {
            return match refuse_shared && shares {
                true => Err(unsupported(format!("NCCL in process {pid}: {why}"))),
                false => Ok(NcclDone::default()),
            };
        }
        // Held until all is done: who undoes it waits so long.
        let mut down = self.down.lock().unwrap_or_else(PoisonError::into_inner);
        let mut done = group.down(quiesce).map_err(unsupported);
        if let (Ok(_), true, Some(left)) = (&done, refuse_shared, shared().first()) {
            let what = format!(
                "{}, also when its NCCL communicators are down",
                left.cause()
            );
            done = Err(unsupported(what));
            if let Err(error) = group.up(UP) {
                tracing::error!("NCCL's communicators are lost: {error}");
            }
        }
        if done.is_ok() {
            *down = pids.to_vec();
        }
        done
    }

    /// The processes whose communicators have been taken down and not been made again; they are forgotten here.
    pub fn take_down(&self) -> Vec<i32> {
        std::mem::take(&mut *self.down.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// [`Group::bring_up`] for a reply.
pub fn up(pids: &[i32]) -> Result<NcclDone, DriverError> {
    Group::bring_up(pids).map_err(unsupported)
}
