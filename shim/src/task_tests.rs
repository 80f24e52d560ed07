use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use containerd_shim::api::PidsResponse;
use containerd_shim::protos::ttrpc::proto::MESSAGE_TYPE_RESPONSE;

use super::*;
use crate::ttrpc::frame::Frame;

fn made(method: &str, payload: Vec<u8>) -> Request {
    let mut request = Request::new();
    request.service = "containerd.task.v2.Task".into();
    request.method = method.into();
    request.payload = payload;
    request
}

fn tasks() -> Tasks {
    Tasks::new(Some("/r".into()), Address("/none".into()), "default")
}

fn create(bundle: &Path) -> CreateTaskRequest {
    let mut create = CreateTaskRequest::new();
    create.id = "c1".into();
    create.bundle = bundle.to_str().unwrap().into();
    create
}

/// Tasks that have the container `c1`, and what is remembered of its creation.
fn created(bundle: &Path) -> (Tasks, Option<Watched>) {
    let tasks = tasks();
    let (_, watched) = tasks.request(&made("Create", create(bundle).write_to_bytes().unwrap()));
    (tasks, watched)
}

fn changed(fate: Fate) -> Request {
    match fate {
        Fate::Changed(changed) => changed,
        other => panic!("{other:?}"),
    }
}

#[test]
fn create_gets_our_runtime_and_keeps_the_rest() {
    let bundle = tempfile::tempdir().unwrap();
    let create = create(bundle.path());
    for (cgroup, systemd) in [
        ("/a/b", false),
        ("system.slice:docker:c1", true),
        ("a:b:c", false),
    ] {
        std::fs::write(
            bundle.path().join("config.json"),
            format!(r#"{{"linux":{{"cgroupsPath":"{cgroup}"}}}}"#),
        )
        .unwrap();
        let tasks = tasks();
        let (fate, watched) = tasks.request(&made("Create", create.write_to_bytes().unwrap()));
        let changed = changed(fate);
        assert!(watched.is_some());
        assert_eq!(
            tasks.lock()["c1"].place.directory(),
            Path::new("/run/containerd/runc/default/c1")
        );
        let got = CreateTaskRequest::parse_from_bytes(&changed.payload).unwrap();
        let options = options::decode(got.options.as_ref()).unwrap();
        assert_eq!(
            (
                got.id.as_str(),
                options.binary_name.as_str(),
                options.systemd_cgroup
            ),
            ("c1", "/r", systemd)
        );
    }
}

/// containerd 2 calls `start` only for the first container of a pod.
#[test]
fn create_writes_the_record() {
    let bundle = tempfile::tempdir().unwrap();
    let mut create = create(bundle.path());
    let mut named = options::decode(None).unwrap();
    named.binary_name = "crun".into();
    named.root = "/other".into();
    create.options = MessageField::some(options::encode(&named).unwrap());
    let mut tasks = tasks();
    tasks.low_level = "crun".into();
    let request = made("Create", create.write_to_bytes().unwrap());
    assert!(matches!(tasks.request(&request).0, Fate::Changed(_)));
    let upstream = Address("/none".into());
    let want = Record {
        address: Address::for_upstream(&upstream),
        upstream,
        low_level: "crun".into(),
        root: Some("/other".into()),
    };
    assert_eq!(Record::read(bundle.path()), Some(want));
    create.bundle = bundle.path().join("none").to_str().unwrap().into();
    let request = made("Create", create.write_to_bytes().unwrap());
    let Fate::Answered(refused) = tasks.request(&request).0 else {
        panic!("without a record `delete` could not clean up");
    };
    let said = refused.status.message();
    assert!(said.contains("none/cryopod-shim.json"), "{said}");
}

#[test]
fn everything_else_passes() {
    let tasks = tasks();
    for method in ["Start", "Wait", "Kill"] {
        let (fate, watched) = tasks.request(&made(method, vec![0xff]));
        assert!(matches!(fate, Fate::Pass) && watched.is_none(), "{method}");
    }
    let mut other = made("Create", vec![0xff]);
    other.service = "x.y".into();
    assert!(matches!(tasks.request(&other).0, Fate::Pass));
    let (fate, _) = tasks.request(&made("Create", vec![0xff]));
    assert!(matches!(fate, Fate::Answered(_)));
}

#[test]
fn a_failed_checkpoint_says_why() {
    let bundle = tempfile::tempdir().unwrap();
    let log = bundle.path().join(LOG);
    std::fs::write(
        &log,
        "{\"level\":\"error\",\"msg\":\"cryopod: an old one\"}\n",
    )
    .unwrap();
    let (tasks, _) = created(bundle.path());
    let mut checkpoint = CheckpointTaskRequest::new();
    checkpoint.id = "c1".into();
    let request = made("Checkpoint", checkpoint.write_to_bytes().unwrap());
    let failure = || rpc::failure(Code::UNKNOWN, "criu failed");
    let watched = tasks.request(&request).1.unwrap();
    assert_eq!(tasks.response(watched, failure()), failure());
    let watched = tasks.request(&request).1.unwrap();
    let mut text = std::fs::read_to_string(&log).unwrap();
    text += "{\"level\":\"info\",\"msg\":\"x\"}\nnot json\n{\"level\":\"error\",\"msg\":\"cryopod: the new one\"}\n";
    std::fs::write(&log, text).unwrap();
    let said = tasks.response(watched, failure());
    assert_eq!(
        said.status().message(),
        "cryopod: the new one (criu failed)"
    );
}

#[test]
fn a_container_that_is_deleted_is_forgotten() {
    let bundle = tempfile::tempdir().unwrap();
    let (tasks, created) = created(bundle.path());
    tasks.response(created.unwrap(), Response::new());
    let mut delete = DeleteRequest::new();
    delete.id = "c1".into();
    let request = made("Delete", delete.write_to_bytes().unwrap());
    let watched = tasks.request(&request).1.unwrap();
    tasks.response(watched, rpc::failure(Code::UNKNOWN, "still running"));
    let watched = tasks.request(&request).1.unwrap();
    tasks.response(watched, Response::new());
    assert!(tasks.request(&request).1.is_none());
}

#[test]
fn in_place_of_the_stock_shim_a_container_keeps_its_runtime() {
    let bundle = tempfile::tempdir().unwrap();
    let mut create = create(bundle.path());
    let mut named = options::decode(None).unwrap();
    named.binary_name = "/usr/bin/runc".into();
    create.options = MessageField::some(options::encode(&named).unwrap());
    let request = made("Create", create.write_to_bytes().unwrap());
    let (fate, _) = Tasks::new(None, Address("/none".into()), "default").request(&request);
    let changed = changed(fate);
    let got = CreateTaskRequest::parse_from_bytes(&changed.payload).unwrap();
    assert_eq!(options::decode(got.options.as_ref()).unwrap(), named);
}

#[test]
fn an_annotation_ends_what_no_engine_ends() {
    let bundle = tempfile::tempdir().unwrap();
    let (tasks, _) = created(bundle.path());
    let mut checkpoint = CheckpointTaskRequest::new();
    checkpoint.id = "c1".into();
    let request = |c: &CheckpointTaskRequest| made("Checkpoint", c.write_to_bytes().unwrap());
    assert!(matches!(tasks.request(&request(&checkpoint)).0, Fate::Pass));
    let says = |word: &str| {
        let spec = format!(r#"{{"annotations":{{"dev.cryopod.checkpoint.exit":"{word}"}}}}"#);
        std::fs::write(bundle.path().join("config.json"), spec).unwrap();
    };
    says("off");
    assert!(matches!(tasks.request(&request(&checkpoint)).0, Fate::Pass));
    says("yes");
    let Fate::Answered(told) = tasks.request(&request(&checkpoint)).0 else {
        panic!("an unknown word is refused");
    };
    let told = told.status.message();
    assert!(
        told.contains("dev.cryopod.checkpoint.exit: \"yes\""),
        "{told}"
    );
    says("true");
    let (fate, watched) = tasks.request(&request(&checkpoint));
    let changed = changed(fate);
    assert!(watched.is_some());
    let got = CheckpointTaskRequest::parse_from_bytes(&changed.payload).unwrap();
    assert_eq!(got.options.value, [8, 1]);
    checkpoint.options = MessageField::some(Any::new());
    assert!(matches!(tasks.request(&request(&checkpoint)).0, Fate::Pass));
}

/// The stock shim says that the container runs until it has learned of its end.
#[test]
fn the_only_checkpoint_of_a_container_that_ends_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("stock");
    let stock = UnixListener::bind(&path).unwrap();
    let mut child = Command::new("true").spawn().unwrap();
    let mut of_child = StateResponse::new();
    of_child.pid = child.id();
    while has_process(&of_child) {
        thread::sleep(Duration::from_millis(10));
    }
    let pids = [std::process::id(), child.id()];
    let of = |kept: bool| {
        let number = format!("{}{}", std::process::id(), u8::from(kept));
        restore::temporary().join(format!("ctrd-checkpoint{number}"))
    };
    let asked_of = Arc::new(AtomicUsize::new(0));
    let which = Arc::clone(&asked_of);
    thread::spawn(move || {
        while let Ok((mut client, _)) = stock.accept() {
            let which = which.load(Ordering::Acquire);
            // The checkpoint may be complete only when the first answer comes.
            std::fs::write(of(which == 1).join(names::METADATA), "{}").unwrap();
            let mut frame = Frame::read(&mut client).unwrap().unwrap();
            let mut state = StateResponse::new();
            state.status = containerd_shim::api::Status::RUNNING.into();
            state.pid = pids[which];
            let mut response = rpc::failure(Code::OK, "");
            response.payload = state.write_to_bytes().unwrap();
            frame.header.type_ = MESSAGE_TYPE_RESPONSE;
            frame.body = response.write_to_bytes().unwrap();
            frame.write(&mut client).unwrap();
        }
    });
    let upstream = Address(path.to_str().unwrap().to_owned());
    let mut tasks = Tasks::new(None, upstream, "default");
    tasks.log = dir.path().join("log");
    for kept in [false, true] {
        asked_of.store(usize::from(kept), Ordering::Release);
        let images = of(kept);
        std::fs::DirBuilder::new()
            .mode(0o700)
            .create(&images)
            .unwrap();
        tasks.abandoned(&PackedCheckpoint {
            id: "c1".into(),
            images: images.clone(),
            succeeded: true,
        });
        assert_eq!(images.join(names::ONLY_COPY).exists(), kept);
        assert_eq!(images.exists(), kept);
        let said = std::fs::read_to_string(&tasks.log).unwrap_or_default();
        assert_eq!(said.contains(images.to_str().unwrap()), kept, "{said}");
        let _ = std::fs::remove_dir_all(images);
    }
    child.wait().unwrap();
}

/// containerd that was killed would delete the task, and docker never learn of the end.
#[test]
fn a_container_that_ended_without_containerd_has_a_pid() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("stock");
    let stock = UnixListener::bind(&path).unwrap();
    let mut child = Command::new("true").spawn().unwrap();
    let (ended, lives) = (child.id(), std::process::id());
    child.wait().unwrap();
    let calls = thread::spawn(move || {
        let mut pids = [ended, lives, ended, ended].into_iter();
        let mut others = Vec::new();
        while others.last().is_none_or(|last| last != "Shutdown") {
            let (mut client, _) = stock.accept().unwrap();
            let mut frame = Frame::read(&mut client).unwrap().unwrap();
            let method = Request::parse_from_bytes(&frame.body).unwrap().method;
            let mut response = done();
            if method == "State" {
                let mut state = StateResponse::new();
                state.status = containerd_shim::api::Status::PAUSED.into();
                state.pid = pids.next().unwrap();
                response.payload = state.write_to_bytes().unwrap();
            } else {
                others.push(method);
            }
            frame.header.type_ = MESSAGE_TYPE_RESPONSE;
            frame.body = response.write_to_bytes().unwrap();
            frame.write(&mut client).unwrap();
        }
        others
    });
    let (mut tasks, _) = created(dir.path());
    tasks.upstream = Address(path.to_str().unwrap().to_owned());
    let mut pids = PidsRequest::new();
    pids.id = "c1".into();
    let request = made("Pids", pids.write_to_bytes().unwrap());
    let failure = || rpc::failure(Code::UNKNOWN, "container does not exist");
    let loading = |tasks: &Tasks, response| {
        let mut watched = tasks.request(&request).1.unwrap();
        watched.note(&mut HashSet::new());
        tasks.response(watched, response)
    };
    let asked = || loading(&tasks, failure());
    let answer = PidsResponse::parse_from_bytes(&asked().payload).unwrap();
    assert_eq!(answer.processes.len(), 1);
    assert_eq!(answer.processes[0].pid, ended);
    assert_eq!(asked(), failure(), "another cause is told");
    let none = loading(&tasks, done());
    let answer = PidsResponse::parse_from_bytes(&none.payload).unwrap();
    assert_eq!(answer.processes[0].pid, ended, "runc names none");
    let named = responses::process(7);
    assert_eq!(loading(&tasks, named.clone()), named);
    // `ctr tasks ps`: its user has the task.
    let mut user = tasks.request(&request).1.unwrap();
    user.note(&mut HashSet::from(["c1".to_owned()]));
    assert_eq!(tasks.response(user, failure()), failure());
    tasks.tell_end("c1", Duration::ZERO);
    assert!(tasks.lock().is_empty());
    assert_eq!(calls.join().unwrap(), ["Delete", "Shutdown"]);
    tasks.tell_end("c1", Duration::ZERO);
    drop(tasks);
    let (tasks, _) = created(dir.path());
    assert_eq!(loading(&tasks, failure()), failure(), "no answer");
}

/// What a container that is gone has left may take long to remove.
#[test]
fn other_containers_do_not_wait_for_one_that_is_forgotten() {
    struct Unlocked(Arc<Tasks>);
    impl HeldCall for Unlocked {
        fn pass(self: Box<Self>) {}
        fn answer(self: Box<Self>, _: Response) {
            assert!(self.0.containers.try_lock().is_ok());
        }
    }
    let bundle = tempfile::tempdir().unwrap();
    let tasks = Arc::new(created(bundle.path()).0);
    let held = Box::new(Unlocked(Arc::clone(&tasks)));
    tasks.lock().get_mut("c1").unwrap().waiting.push(held);
    tasks.forget("c1");
}

#[test]
fn a_container_whose_criu_hangs_is_not_said_to_have_ended() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = PackedCheckpoint {
        id: "c1".into(),
        images: dir.path().into(),
        succeeded: true,
    };
    let log = dir.path().join("log");
    let said = |hangs| {
        let _ = std::fs::remove_file(&log);
        checkpoint.keep(hangs, &log);
        std::fs::read_to_string(&log).unwrap()
    };
    assert!(said(false).contains("c1, which has ended"));
    let said = said(true);
    assert!(said.contains("has not ended within 10 minutes"), "{said}");
    assert!(!said.contains("which has ended"), "{said}");
}

#[test]
fn images_are_complete_with_what_is_written_last() {
    let dir = tempfile::tempdir().unwrap();
    let put = |name: &str| std::fs::write(dir.path().join(name), "").unwrap();
    put(names::CRIU_INVENTORY);
    let again = WrittenImages::new(dir.path().into());
    assert!(!again.are_complete(), "of an earlier checkpoint");
    std::fs::remove_file(dir.path().join(names::CRIU_INVENTORY)).unwrap();
    let images = WrittenImages::new(dir.path().into());
    assert!(!images.are_complete());
    put(names::CRIU_INVENTORY);
    assert!(images.are_complete());
    put(names::NVIDIA_IMAGE);
    assert!(!images.are_complete());
    put(names::METADATA);
    assert!(images.are_complete());
}

/// Who would read it may have been killed.
#[test]
fn the_output_has_a_reader_until_the_call_ends() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("stdout");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "mine").unwrap();
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(&fifo, &link).unwrap();
    let has_reader = || {
        let mut options = File::options();
        let options = options.write(true).custom_flags(libc::O_NONBLOCK);
        options.open(&fifo).is_ok()
    };
    let tasks = tasks();
    let mut create = create(dir.path());
    for (stdout, read) in [(&file, false), (&link, false), (&fifo, true)] {
        create.stdout = stdout.to_str().unwrap().into();
        let request = made("Create", create.write_to_bytes().unwrap());
        let watched = tasks.request(&request).1;
        assert_eq!(has_reader(), read, "{stdout:?}");
        tasks.response(watched.unwrap(), done());
        assert!(!has_reader());
    }
    let mut start = StartRequest::new();
    start.id = "c1".into();
    let watched = tasks.request(&made("Start", start.write_to_bytes().unwrap()));
    assert!(has_reader());
    drop(watched);
    assert!(!has_reader());
}
