//! Runs the process between containerd and the stock shim.
//!
//! Each connection from containerd has one to the stock shim, and a thread in each direction. Frames pass unchanged.
//! Only requests are decoded, and the responses that [`crate::task`] asks for. One more, silent connection to the stock
//! shim shows when that shim exits; then this process exits too.

use std::collections::{HashMap, HashSet};
use std::io::{self, Read};
use std::net::Shutdown;
use std::os::fd::{FromRawFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use cryopod_host::limited::wait_until;

use containerd_shim::protos::protobuf::Message;
use containerd_shim::protos::ttrpc::proto::{MESSAGE_TYPE_RESPONSE, MessageHeader};
use containerd_shim::protos::ttrpc::{Code, Request, Response};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};

use crate::container::{HeldCall, PackedCheckpoint};
use crate::peer::{self, PeerProcess};
use crate::restore::ImageWork;
use crate::task::{Fate, Tasks, Watched};
use crate::threads::spawn;
use crate::ttrpc::address::Address;
use crate::ttrpc::frame::{Frame, Oversized};
use crate::{Error, restore, stock, ttrpc::rpc};

/// The descriptor in which `start` hands over the listening socket.
pub const LISTENER: RawFd = 3;
/// Set if this program is installed in place of the stock shim.
pub const IN_PLACE: &str = "CRYOPOD_SHIM_IN_PLACE";
/// How long the stock shim tries to tell an exit (five tries, 1 to 5 s apart), and a while.
const EXIT_TOLD: Duration = Duration::from_secs(20);
/// Time for the last responses of an exiting stock shim to reach containerd, should the machine be busy.
const LAST_WORDS: Duration = Duration::from_secs(10);

/// Serves until the stock shim exits. `namespace` is containerd's. Fails if the stock shim cannot be reached.
pub fn main(upstream: &str, namespace: &str) -> Result<ExitCode, Error> {
    let upstream = Address(upstream.to_owned());
    let ours = Address::for_upstream(&upstream);
    let runtime = match std::env::var_os(IN_PLACE) {
        Some(_) => None,
        None => Some(stock::runtime()?),
    };
    // SAFETY: `start`, the only caller of this action, put the listening socket there, and nothing else owns it.
    let listener = unsafe { UnixListener::from_raw_fd(LISTENER) };
    // Child processes must not inherit it: it would accept connections after our exit.
    fcntl(&listener, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))
        .map_err(|e| Error::io("the listening socket")(e.into()))?;
    let watched = upstream.connect().map_err(|source| {
        ours.remove();
        Error::Io {
            what: format!("{}: the stock shim does not answer", upstream.0),
            source,
        }
    })?;
    let stock = peer::pid(&watched).ok();
    let ours = OwnSocket::new(ours);
    let open = Arc::new(AtomicUsize::new(0));
    let server = ProxyServer {
        stock,
        socket: ours.clone(),
        tasks: Arc::new(Tasks::new(runtime, upstream.clone(), namespace)),
        upstream,
        open: Arc::clone(&open),
    };
    spawn("accept", move || server.accept(&listener)).map_err(Error::io("threads"))?;
    wait_for_end(watched);
    ours.remove();
    let is_quiet = || open.load(Ordering::Acquire) == 0;
    wait_until(LAST_WORDS, Duration::from_millis(5), is_quiet);
    restore::wait_for_image_work();
    Ok(ExitCode::SUCCESS)
}

fn wait_for_end(mut stream: UnixStream) {
    let mut byte = [0u8; 64];
    loop {
        match stream.read(&mut byte) {
            Ok(0) => return,
            Err(e) if e.kind() != io::ErrorKind::Interrupted => return,
            _ => {}
        }
    }
}

/// Our socket, whose path a successor of this process may have taken over.
#[derive(Clone)]
struct OwnSocket {
    address: Address,
    file: Option<SocketFile>,
}

/// The device, inode and time of change: an inode may be used again.
type SocketFile = (u64, u64, i64, i64);

impl OwnSocket {
    fn new(address: Address) -> Self {
        let file = Self::file(&address);
        Self { address, file }
    }

    fn file(address: &Address) -> Option<SocketFile> {
        let meta = address.path().symlink_metadata().ok()?;
        Some((meta.dev(), meta.ino(), meta.ctime(), meta.ctime_nsec()))
    }

    fn remove(&self) {
        if Self::file(&self.address) == self.file {
            self.address.remove();
        }
    }
}

struct ProxyServer {
    /// The process that began to listen on the stock shim's socket.
    stock: Option<i32>,
    socket: OwnSocket,
    upstream: Address,
    tasks: Arc<Tasks>,
    open: Arc<AtomicUsize>,
}

impl ProxyServer {
    /// Accepts connections, until the stock shim's socket is a successor's: the same container was started again while its
    /// stock shim exits, with which this process does. Then `start` finds no socket of ours, and starts another process.
    fn accept(&self, listener: &UnixListener) {
        for client in listener.incoming() {
            // At worst there are too many open files: containerd tries again.
            let Ok(client) = client else {
                thread::sleep(Duration::from_millis(20));
                continue;
            };
            let containerd = PeerProcess::of(&client);
            let stock = self.upstream.connect();
            if let Ok(stock) = &stock
                && peer::pid(stock).ok() != self.stock
            {
                self.socket.remove();
                return;
            }
            if let Err(e) = stock.and_then(|stock| self.serve(client, containerd, stock)) {
                eprintln!("cryopod: a connection of containerd's: {e}");
            }
        }
    }

    fn serve(
        &self,
        client: UnixStream,
        containerd: PeerProcess,
        stock: UnixStream,
    ) -> io::Result<()> {
        let link = Arc::new(ProxyLink {
            tasks: Arc::clone(&self.tasks),
            client: Mutex::new(client.try_clone()?),
            stock: Mutex::new(stock.try_clone()?),
            watched: Mutex::default(),
            checkpoints: Mutex::default(),
            taken: Mutex::default(),
        });
        let mut answers = stock.try_clone()?;
        let back = Arc::clone(&link);
        let open = Arc::clone(&self.open);
        open.fetch_add(1, Ordering::AcqRel);
        spawn("answers", move || {
            let _ = back.pump_answers(&mut answers);
            // The stock shim is gone; to containerd, so are we.
            let _ = lock(&back.client).shutdown(Shutdown::Both);
            // This process must not exit in the middle of what follows.
            let _work = ImageWork::begin();
            open.fetch_sub(1, Ordering::AcqRel);
            let unanswered: Vec<_> = lock(&back.watched).drain().collect();
            for (_, watched) in unanswered {
                back.tasks.lost(&watched);
            }
            let checkpoints: Vec<_> = lock(&back.checkpoints).drain(..).collect();
            for checkpoint in checkpoints {
                if restore::are_left(&checkpoint.images, &containerd, checkpoint.succeeded) {
                    back.tasks.abandoned(&checkpoint);
                }
            }
        })
        .inspect_err(|_| {
            self.open.fetch_sub(1, Ordering::AcqRel);
        })?;
        spawn("requests", move || {
            let mut from = client;
            let _ = link.pump_requests(&mut from);
            // After the last request the stock shim cancels its pending calls, and answers nothing more.
            let _ = stock.shutdown(Shutdown::Write);
        })
    }
}

/// A connection from containerd, and ours to the stock shim.
struct ProxyLink {
    tasks: Arc<Tasks>,
    client: Mutex<UnixStream>,
    stock: Mutex<UnixStream>,
    /// Calls whose responses are decoded, by stream.
    watched: Mutex<HashMap<u32, Watched>>,
    /// Those whose images containerd has not removed yet.
    checkpoints: Mutex<Vec<PackedCheckpoint>>,
    /// The containers that containerd has by this connection.
    taken: Mutex<HashSet<String>>,
}

fn lock<T>(of: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ProxyLink {
    fn pump_answers(self: &Arc<Self>, from: &mut UnixStream) -> io::Result<()> {
        loop {
            let frame = match Frame::read(from) {
                Ok(Some(frame)) => frame,
                Ok(None) => return Ok(()),
                Err(e) => refusal(&e.downcast()?)?,
            };
            let watched = match frame.header.type_ {
                MESSAGE_TYPE_RESPONSE => lock(&self.watched).remove(&frame.header.stream_id),
                _ => None,
            };
            let response = Response::parse_from_bytes(&frame.body);
            match (watched, response) {
                (Some(watched), Ok(response)) if rpc::succeeded(&response) && !watched.loads => {
                    self.finish(&frame, watched, response)?;
                }
                // What helps a failed call takes time, which the answers of the pod's other containers do not wait for.
                (Some(watched), Ok(response)) => {
                    let (link, unchanged) = (Arc::clone(self), frame.clone());
                    let spawned = spawn("failed call", move || {
                        let id = watched.id.clone();
                        let _ = link.finish(&frame, watched, response);
                        link.tasks.tell_end(&id, EXIT_TOLD);
                    });
                    // Without a connection containerd would delete all containers.
                    if spawned.is_err() {
                        unchanged.write(&mut *lock(&self.client))?;
                    }
                }
                _ => frame.write(&mut *lock(&self.client))?,
            }
        }
    }

    /// Sends the response to a watched call.
    fn finish(&self, to: &Frame, watched: Watched, response: Response) -> io::Result<()> {
        let checkpoint = watched.checkpoint();
        let response = self.tasks.response(watched, response);
        if let Some(checkpoint) = checkpoint
            && rpc::succeeded(&response)
        {
            let mut all = lock(&self.checkpoints);
            for known in all.iter_mut().filter(|c| c.images == checkpoint.images) {
                known.succeeded = true;
            }
        }
        self.answer(to, &response)
    }

    fn pump_requests(self: &Arc<Self>, from: &mut UnixStream) -> io::Result<()> {
        loop {
            let mut frame = match Frame::read(from) {
                Ok(Some(frame)) => frame,
                Ok(None) => return Ok(()),
                // The stock shim would refuse it and go on. Without a connection containerd would delete all containers.
                Err(e) => {
                    refusal(&e.downcast()?)?.write(&mut *lock(&self.client))?;
                    continue;
                }
            };
            if frame.is_request() {
                let (fate, watched) = match Request::parse_from_bytes(&frame.body) {
                    Ok(request) => self.tasks.request(&request),
                    // The stock shim judges this.
                    Err(_) => (Fate::Pass, None),
                };
                if let Some(mut watched) = watched {
                    watched.note(&mut lock(&self.taken));
                    if let Some(checkpoint) = watched.checkpoint() {
                        let mut all = lock(&self.checkpoints);
                        all.retain(|c| c.images.exists());
                        all.push(checkpoint);
                    }
                    lock(&self.watched).insert(frame.header.stream_id, watched);
                }
                match fate {
                    Fate::Pass => {}
                    Fate::Changed(request) => {
                        frame.body = request.write_to_bytes().map_err(io::Error::other)?;
                    }
                    Fate::Answered(response) => {
                        self.answer(&frame, &response)?;
                        continue;
                    }
                    Fate::Held(id) => {
                        let link = Arc::clone(self);
                        self.tasks.hold(&id, Box::new(HeldFrame { link, frame }));
                        continue;
                    }
                }
            }
            frame.write(&mut *lock(&self.stock))?;
        }
    }

    fn answer(&self, to: &Frame, response: &Response) -> io::Result<()> {
        answer_frame(to.header, response)?.write(&mut *lock(&self.client))
    }
}

fn answer_frame(mut header: MessageHeader, response: &Response) -> io::Result<Frame> {
    header.type_ = MESSAGE_TYPE_RESPONSE;
    header.flags = 0;
    let body = response
        .write_to_bytes()
        .or_else(|e| rpc::failure(Code::INTERNAL, e.to_string()).write_to_bytes())
        .map_err(io::Error::other)?;
    Ok(Frame { header, body })
}

/// Returns ttrpc's own answer to a message that is too long; its client takes a response that is too long for the same.
fn refusal(oversized: &Oversized) -> io::Result<Frame> {
    let failure = rpc::failure(Code::RESOURCE_EXHAUSTED, oversized.to_string());
    answer_frame(oversized.header, &failure)
}

struct HeldFrame {
    link: Arc<ProxyLink>,
    frame: Frame,
}

impl HeldCall for HeldFrame {
    fn pass(self: Box<Self>) {
        let _ = self.frame.write(&mut *lock(&self.link.stock));
    }

    fn answer(self: Box<Self>, response: Response) {
        let _ = self.link.answer(&self.frame, &response);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use containerd_shim::api::{CheckpointTaskRequest, CreateTaskRequest, ResumeRequest};
    use containerd_shim::protos::protobuf::MessageDyn;
    use containerd_shim::protos::ttrpc::proto::{MESSAGE_LENGTH_MAX, MESSAGE_TYPE_REQUEST};
    use std::fs;
    use std::os::unix::fs::DirBuilderExt;
    use std::path::{Path, PathBuf};
    use std::process::{Child, Command};

    /// A stock shim that does not answer, our server in front of it, and a connection of containerd's to that.
    struct Bed {
        stock: UnixListener,
        server: ProxyServer,
        containerd: UnixStream,
        /// Our end of the connection to the stock shim.
        link: UnixStream,
        /// The process that counts as containerd.
        process: Child,
        dir: tempfile::TempDir,
    }

    impl Bed {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("stock");
            let stock = UnixListener::bind(&path).unwrap();
            let upstream = Address(path.to_str().unwrap().to_owned());
            let server = ProxyServer {
                stock: i32::try_from(std::process::id()).ok(),
                socket: OwnSocket::new(Address(dir.path().join("ours").display().to_string())),
                tasks: Arc::new(Tasks::new(None, upstream.clone(), "default")),
                upstream,
                open: Arc::default(),
            };
            let process = Command::new("sleep").arg("600").spawn().unwrap();
            let peer = PeerProcess::with_pid(i32::try_from(process.id()).unwrap());
            let (containerd, client) = UnixStream::pair().unwrap();
            let limit = Some(Duration::from_secs(60));
            containerd.set_read_timeout(limit).unwrap();
            containerd.set_write_timeout(limit).unwrap();
            let to_stock = server.upstream.connect().unwrap();
            server.serve(client, peer, to_stock).unwrap();
            let (link, _) = stock.accept().unwrap();
            Self {
                stock,
                server,
                containerd,
                link,
                process,
                dir,
            }
        }

        /// Makes a call of containerd's, which the stock shim gets.
        fn call(&mut self, stream: u32, method: &str, message: &dyn MessageDyn) {
            let mut request = Request::new();
            request.service = "containerd.task.v2.Task".into();
            request.method = method.into();
            request.payload = message.write_to_bytes_dyn().unwrap();
            let header = MessageHeader {
                stream_id: stream,
                type_: MESSAGE_TYPE_REQUEST,
                ..MessageHeader::default()
            };
            let body = request.write_to_bytes().unwrap();
            let frame = Frame { header, body };
            frame.write(&mut self.containerd).unwrap();
            let got = Frame::read(&mut self.link).unwrap().unwrap();
            assert_eq!(got.header.stream_id, stream);
        }

        fn create_and_checkpoint(&mut self, images: &Path) {
            let mut create = CreateTaskRequest::new();
            create.id = "c1".into();
            create.bundle = self.dir.path().to_str().unwrap().to_owned();
            self.call(1, "Create", &create);
            let mut checkpoint = CheckpointTaskRequest::new();
            checkpoint.id = "c1".into();
            checkpoint.path = images.to_str().unwrap().to_owned();
            self.call(3, "Checkpoint", &checkpoint);
        }

        /// The stock shim answers with a success, which containerd gets.
        fn succeed(&mut self, stream: u32) {
            let header = MessageHeader {
                stream_id: stream,
                ..MessageHeader::default()
            };
            let answer = answer_frame(header, &rpc::failure(Code::OK, "")).unwrap();
            answer.write(&mut self.link).unwrap();
            let got = Frame::read(&mut self.containerd).unwrap().unwrap();
            assert_eq!(got.header.stream_id, stream);
        }

        fn asked_within(&self, limit: Duration) -> bool {
            self.stock.set_nonblocking(true).unwrap();
            wait_until(limit, Duration::from_millis(10), || {
                self.stock.accept().is_ok()
            })
        }
    }

    impl Drop for Bed {
        fn drop(&mut self) {
            let _ = self.process.kill();
            let _ = self.process.wait();
        }
    }

    /// An image directory of containerd's.
    struct Images(PathBuf);

    impl Images {
        fn new(number: u32) -> Self {
            let name = format!("ctrd-checkpoint{}{number}", std::process::id());
            let path = restore::temporary().join(name);
            fs::DirBuilder::new().mode(0o700).create(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Images {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// A shim that exits meanwhile would cut the judgement off.
    #[test]
    fn an_abandoned_checkpoint_is_judged_before_the_exit() {
        let images = Images::new(2);
        let mut bed = Bed::new();
        bed.create_and_checkpoint(&images.0);
        bed.process.kill().unwrap();
        bed.containerd.shutdown(Shutdown::Both).unwrap();
        bed.link.shutdown(Shutdown::Both).unwrap();
        // It asks whether the container lives, and waits for the answer as long as this is open.
        let _asked = bed.stock.accept().unwrap();
        assert_eq!(bed.server.open.load(Ordering::Acquire), 0);
        assert!(restore::has_image_work());
    }

    /// docker deletes a container as soon as it has ended: containerd then closes the connection, and packs on.
    #[test]
    fn a_checkpoint_is_not_judged_while_containerd_lives() {
        let images = Images::new(3);
        let mut bed = Bed::new();
        bed.create_and_checkpoint(&images.0);
        bed.succeed(3);
        bed.containerd.shutdown(Shutdown::Both).unwrap();
        bed.link.shutdown(Shutdown::Both).unwrap();
        assert!(!bed.asked_within(Duration::from_millis(500)));
        assert!(restore::has_image_work());
        bed.process.kill().unwrap();
        assert!(bed.asked_within(Duration::from_secs(60)));
    }

    #[test]
    fn a_checkpoint_that_containerd_has_packed_is_not_judged() {
        let images = Images::new(4);
        let mut bed = Bed::new();
        bed.create_and_checkpoint(&images.0);
        bed.succeed(3);
        bed.containerd.shutdown(Shutdown::Both).unwrap();
        bed.link.shutdown(Shutdown::Both).unwrap();
        drop(images);
        assert!(!bed.asked_within(Duration::from_millis(500)));
        bed.process.kill().unwrap();
        assert!(!bed.asked_within(Duration::from_millis(500)));
    }

    /// `ctr tasks checkpoint --image-path`.
    #[test]
    fn a_directory_of_the_users_is_not_judged() {
        let images = tempfile::tempdir().unwrap();
        let mut bed = Bed::new();
        bed.create_and_checkpoint(images.path());
        bed.succeed(3);
        bed.process.kill().unwrap();
        bed.containerd.shutdown(Shutdown::Both).unwrap();
        bed.link.shutdown(Shutdown::Both).unwrap();
        assert!(!bed.asked_within(Duration::from_millis(500)));
    }

    /// `docker restart` while the old stock shim exits.
    #[test]
    fn a_successor_of_the_stock_shim_gets_another_process() {
        let mut bed = Bed::new();
        let address = bed.server.socket.address.clone();
        let listener = address.listen().unwrap().unwrap();
        bed.server.socket = OwnSocket::new(address.clone());
        let first = address.connect().unwrap();
        let _second = address.connect().unwrap();
        bed.server.stock = Some(1);
        bed.server.accept(&listener);
        assert!(!address.path().exists());
        assert_eq!((&first).read(&mut [0]).unwrap(), 0, "refused");
        // The file system's clock is coarse.
        thread::sleep(Duration::from_millis(50));
        let _successor = address.listen().unwrap().unwrap();
        bed.server.socket.remove();
        assert!(address.connect().is_ok());
        assert!(address.path().exists());
    }

    #[test]
    fn a_message_that_is_too_long_is_refused_and_the_connection_goes_on() {
        let mut bed = Bed::new();
        let too_long = |stream: u32, type_: u8| Frame {
            header: MessageHeader {
                stream_id: stream,
                type_,
                ..MessageHeader::default()
            },
            body: vec![0; MESSAGE_LENGTH_MAX + 1],
        };
        let refused = |answer: Frame| {
            assert_eq!(answer.header.type_, MESSAGE_TYPE_RESPONSE);
            let response = Response::parse_from_bytes(&answer.body).unwrap();
            assert_eq!(response.status().code(), Code::RESOURCE_EXHAUSTED);
            assert_eq!(
                response.status().message(),
                "message length 4194305 exceed maximum message size of 4194304"
            );
            answer.header.stream_id
        };
        let request = too_long(1, MESSAGE_TYPE_REQUEST);
        request.write(&mut bed.containerd).unwrap();
        let answer = Frame::read(&mut bed.containerd).unwrap().unwrap();
        assert_eq!(refused(answer), 1);
        bed.call(3, "Connect", &ResumeRequest::new());
        let response = too_long(3, MESSAGE_TYPE_RESPONSE);
        response.write(&mut bed.link).unwrap();
        let answer = Frame::read(&mut bed.containerd).unwrap().unwrap();
        assert_eq!(refused(answer), 3);
        bed.call(5, "Connect", &ResumeRequest::new());
        bed.succeed(5);
    }

    #[test]
    fn a_failed_resume_does_not_hold_back_other_answers() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("stock");
        // It accepts the question for the container's state, and does not answer it.
        let silent = UnixListener::bind(&path).unwrap();
        let upstream = Address(path.to_str().unwrap().to_owned());
        let tasks = Tasks::new(None, upstream, "default");
        let call = |method: &str, message: &dyn MessageDyn| {
            let mut request = Request::new();
            request.service = "containerd.task.v2.Task".into();
            request.method = method.into();
            request.payload = message.write_to_bytes_dyn().unwrap();
            tasks.request(&request).1.unwrap()
        };
        let mut create = CreateTaskRequest::new();
        create.id = "c1".into();
        create.bundle = dir.path().to_str().unwrap().to_owned();
        call("Create", &create);
        let mut resume = ResumeRequest::new();
        resume.id = "c1".into();
        let watched = call("Resume", &resume);
        let (client, mut containerd) = UnixStream::pair().unwrap();
        let (mut stock, mut answers) = UnixStream::pair().unwrap();
        let link = Arc::new(ProxyLink {
            tasks: Arc::new(tasks),
            client: Mutex::new(client),
            stock: Mutex::new(UnixStream::pair().unwrap().0),
            watched: Mutex::new(HashMap::from([(1, watched)])),
            checkpoints: Mutex::default(),
            taken: Mutex::default(),
        });
        let pump = thread::spawn(move || link.pump_answers(&mut answers));
        for (stream, code) in [(1, Code::UNKNOWN), (3, Code::OK)] {
            let header = MessageHeader {
                stream_id: stream,
                type_: MESSAGE_TYPE_RESPONSE,
                ..MessageHeader::default()
            };
            let body = rpc::failure(code, "").write_to_bytes().unwrap();
            Frame { header, body }.write(&mut stock).unwrap();
        }
        let mut next = || Frame::read(&mut containerd).unwrap().unwrap();
        assert_eq!(next().header.stream_id, 3);
        drop(silent);
        assert_eq!(next().header.stream_id, 1);
        drop(stock);
        pump.join().unwrap().unwrap();
    }
}
