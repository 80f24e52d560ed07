//! A container of this shim, as far as it matters here.

use std::path::PathBuf;

use containerd_shim::protos::ttrpc::Response;

use crate::cleanup::Place;
use crate::responses::ended;
use crate::restore::Restoring;

/// A call that is held; dropped, nobody answers it.
pub trait Held: Send {
    /// It goes on as it came.
    fn pass(self: Box<Self>);
    /// It does not go on; this is the answer.
    fn answer(self: Box<Self>, response: Response);
}

/// A container of this shim.
pub struct Container {
    /// Its bundle.
    pub bundle: PathBuf,
    /// Where the runtime keeps it.
    pub place: Place,
    /// The engine has mounted its root file system, as docker does.
    pub mounted: bool,
    /// It comes from a checkpoint, and does not run yet.
    pub restoring: Option<Restoring>,
    /// The engine has given it up before it ran.
    pub given_up: bool,
    /// Who waits for its end.
    pub waiting: Vec<Box<dyn Held>>,
}

impl Container {
    /// Has the engine been told of a process that the stock shim does not know?
    pub fn pretended(&self) -> bool {
        self.restoring.as_ref().is_some_and(|r| r.pid().is_some())
    }

    /// It ends before it ran. containerd waits for the end of whatever has a pid, and here nothing ends.
    pub fn give_up(&mut self) {
        self.given_up = true;
        for held in self.waiting.drain(..) {
            held.answer(ended());
        }
    }
}
