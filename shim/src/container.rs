//! Describes a container of this shim.

use std::path::PathBuf;

use containerd_shim::protos::ttrpc::Response;

use crate::cleanup::StatePlace;
use crate::restore::Restoring;
use crate::ttrpc::responses::ended;

/// A held call. If dropped, it never gets an answer.
pub trait HeldCall: Send {
    /// Forwards the call unchanged.
    fn pass(self: Box<Self>);
    /// Answers the call without forwarding it.
    fn answer(self: Box<Self>, response: Response);
}

pub struct KnownContainer {
    pub bundle: PathBuf,
    pub place: StatePlace,
    /// The engine has mounted its root file system, as docker does.
    pub mounted: bool,
    /// Set while it comes from a checkpoint and does not run yet.
    pub restoring: Option<Restoring>,
    /// The engine has given it up before it ran.
    pub given_up: bool,
    /// Calls that wait for its end.
    pub waiting: Vec<Box<dyn HeldCall>>,
}

impl KnownContainer {
    /// Returns true if the engine has a pid that the stock shim does not know.
    pub fn pretended(&self) -> bool {
        self.restoring.as_ref().is_some_and(|r| r.pid().is_some())
    }

    /// Ends the container before it ran. containerd waits for the exit of anything with a pid, but here nothing exits.
    pub fn give_up(&mut self) {
        self.given_up = true;
        for held in self.waiting.drain(..) {
            held.answer(ended());
        }
    }
}
