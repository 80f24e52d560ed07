//! Describes a container of this shim, and a checkpoint of it that containerd packs.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use containerd_shim::protos::ttrpc::Response;

use crate::cleanup::StatePlace;
use crate::criu;
use crate::restore::Restoring;
use crate::ttrpc::responses::ended;
use cryopod_archive::format::names;
use cryopod_archive::format::text::printable;

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
    /// Where its standard output and error go: paths of FIFOs, among others.
    pub outputs: [String; 2],
    /// The engine has mounted its root file system, as docker does.
    pub mounted: bool,
    /// Set while it comes from a checkpoint and does not run yet.
    pub restoring: Option<Restoring>,
    /// The engine has given it up before it ran.
    pub given_up: bool,
    /// It ended, and its engine may not have learnt of it.
    pub ended_unseen: bool,
    /// Calls that wait for its end.
    pub waiting: Vec<Box<dyn HeldCall>>,
}

impl KnownContainer {
    /// Returns true if the engine has a pid that the stock shim does not know.
    pub fn pretended(&self) -> bool {
        self.restoring.as_ref().is_some_and(|r| r.pid().is_some())
    }

    /// Opens its output for reading. The stock shim opens each FIFO for writing with the lock that all its calls take, and
    /// waits until somebody reads it: for ever, if that was a client that has been killed, and the container could
    /// neither be ended nor deleted. Nothing is read.
    pub fn readers(&self) -> Vec<File> {
        let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW;
        let open = |path: &String| {
            let file = File::options().read(true).custom_flags(flags).open(path);
            file.ok()
        };
        let is_fifo = |path: &&String| {
            let meta = Path::new(path).symlink_metadata();
            meta.is_ok_and(|meta| meta.file_type().is_fifo())
        };
        self.outputs
            .iter()
            .filter(is_fifo)
            .filter_map(open)
            .collect()
    }

    /// Ends the container before it ran. containerd waits for the exit of anything with a pid, but here nothing exits.
    pub fn give_up(&mut self) {
        self.given_up = true;
        for held in self.waiting.drain(..) {
            held.answer(ended());
        }
    }
}

/// A checkpoint that containerd asked for, and where.
#[derive(Debug)]
pub struct PackedCheckpoint {
    pub id: String,
    pub images: PathBuf,
    /// containerd was told of a success, and packs the images.
    pub succeeded: bool,
}

impl PackedCheckpoint {
    /// Keeps the images of a container that has ended, or whose CRIU hangs: they may be all that is left of it. The log tells.
    pub fn keep(&self, hangs: bool, log: &Path) {
        let marked = File::create(self.images.join(names::ONLY_COPY));
        let images = self.images.display();
        let id = &self.id;
        let until = marked.map_or_else(|e| format!(" within a day ({e})"), |_| String::new());
        let verb = match self.images.join(names::STORE_REFERENCE).exists() {
            true => "bundle",
            false => "pack",
        };
        let what = match hangs {
            true => format!(
                "a checkpoint of {id}, whose CRIU has not ended within {} minutes, so that the container may still run",
                criu::ENDS.as_secs() / 60
            ),
            false => format!("the only checkpoint of {id}, which has ended"),
        };
        let said = format!(
            "cryopod: {images}: {what}: containerd did not pack it; `cryopod {verb} {images} -o oci:DIRECTORY` makes an archive of it{until}, then remove it"
        );
        let mut options = File::options();
        let options = options.append(true).create(true).mode(0o600);
        let log = options.open(log);
        let _ = log.and_then(|mut log| writeln!(log, "level=error msg={:?}", printable(&said)));
    }
}
