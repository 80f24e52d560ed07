//! `start` as containerd 2.3 sends it and its stock shim answers, with a stand-in for both: no Debian suite has
//! containerd 2.3 yet (`CRYOPOD_CONTAINERD`, docs/testbed.md, shows one to the tests of the real stack). The stand-in's
//! `start` is a script that keeps its input and prints a prepared answer; a thread of the test answers calls on its socket.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::fs;
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use containerd_shim::api::Options;
use containerd_shim::protos::protobuf::well_known_types::any::Any;
use containerd_shim::protos::protobuf::{Message, UnknownFields};
use containerd_shim::protos::ttrpc::proto::MESSAGE_TYPE_RESPONSE;
use containerd_shim::protos::ttrpc::{Request, Response};
use cryopod_shim::bootstrap::{StartRequest, fields};
use cryopod_shim::options;
use cryopod_shim::ttrpc::address::{Address, Bootstrap};
use cryopod_shim::ttrpc::frame::Frame;

const SHIM: &str = env!("CARGO_BIN_EXE_containerd-shim-cryopod-v2");
const ID: &str = "c1";
const NAMESPACE: &str = "default";

/// A stock shim's socket, on which every call succeeds with an empty answer.
#[derive(Default, Clone)]
struct StockShim {
    streams: Arc<Mutex<Vec<UnixStream>>>,
    calls: Arc<Mutex<Vec<String>>>,
}

impl StockShim {
    fn serve(socket: &Path) -> Self {
        let listener = UnixListener::bind(socket).unwrap();
        let new = Self::default();
        let all = new.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let copy = stream.try_clone().unwrap();
                all.streams.lock().unwrap().push(copy);
                let calls = Arc::clone(&all.calls);
                thread::spawn(move || {
                    while let Ok(Some(mut frame)) = Frame::read(&mut stream) {
                        let request = Request::parse_from_bytes(&frame.body).unwrap();
                        calls.lock().unwrap().push(request.method);
                        frame.header.type_ = MESSAGE_TYPE_RESPONSE;
                        frame.body = Response::new().write_to_bytes().unwrap();
                        frame.write(&mut stream).unwrap();
                    }
                });
            }
        });
        new
    }

    /// Ends, so that our process in front of it does.
    fn end(&self, front: &Address) {
        for stream in &*self.streams.lock().unwrap() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        for _ in 0..6000 {
            if front.connect().is_err() {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
        panic!("{}: our process is still there", front.0);
    }
}

fn program(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// Starting a program while another thread writes one gives ETXTBSY.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Begins a `start` in this directory; `in_place`: by the stock shim's own name. Returns the stock shim, which answers.
fn begin(
    dir: &Path,
    answer: impl Fn(&str) -> Vec<u8>,
    in_place: bool,
) -> (Child, StockShim, Address) {
    let at = |name: &str| dir.join(name);
    let stock = Address(format!("unix://{}", at("s").display()));
    let stock_shim = StockShim::serve(&at("s"));
    fs::create_dir(at("bundle")).unwrap();
    fs::write(at("answer"), answer(&stock.0)).unwrap();
    program(&at("stock"), "#!/bin/sh\ncat > ../input; cat ../answer\n");
    program(&at("cryopod-runtime"), "#!/bin/sh\n");
    let ours = at(match in_place {
        true => "containerd-shim-runc-v2",
        false => "containerd-shim-cryopod-v2",
    });
    symlink(SHIM, &ours).unwrap();
    let child = Command::new(&ours)
        .args(["-namespace", NAMESPACE, "-id", ID])
        .args(["-address", "/a", "start"])
        .env("CRYOPOD_STOCK_SHIM", at("stock"))
        .env("CRYOPOD_RUNTIME", at("cryopod-runtime"))
        .current_dir(at("bundle"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    (child, stock_shim, stock)
}

fn any(kind: &str, value: Vec<u8>) -> Any {
    let mut any = Any::new();
    any.type_url = kind.into();
    any.value = value;
    any
}

fn runc_options(cgroup: &str) -> Any {
    let mut options = Options::new();
    options.shim_cgroup = cgroup.into();
    options.binary_name = "crun".into();
    options::encode(&options).unwrap()
}

/// Options of a runtime that containerd does not know: a TOML text in field 3.
fn generic_options() -> Any {
    let mut message = UnknownFields::new();
    message.add_length_delimited(3, b"BinaryName = \"crun\"\n".to_vec());
    any("runtimeoptions.v1.Options", message.write_to_bytes())
}

fn extension(of: &Any) -> Vec<u8> {
    let mut extension = UnknownFields::new();
    extension.add_length_delimited(1, of.write_to_bytes().unwrap());
    extension.write_to_bytes()
}

/// A `BootstrapParams` with a log level, an address, and a field that no version has yet.
fn params(id: &str, namespace: &str, extensions: &[Any]) -> Vec<u8> {
    let mut params = UnknownFields::new();
    params.add_length_delimited(1, id.into());
    params.add_length_delimited(2, namespace.into());
    params.add_varint(3, 4);
    params.add_length_delimited(5, b"/run/containerd/containerd.sock.ttrpc".to_vec());
    for of in extensions {
        params.add_length_delimited(8, extension(of));
    }
    params.add_length_delimited(99, b"from a newer version".to_vec());
    params.write_to_bytes()
}

/// A `BootstrapResult` with an extension (field 6) and a field that no version has yet.
fn result(address: &str) -> Vec<u8> {
    let mut result = UnknownFields::new();
    result.add_varint(1, 3);
    result.add_length_delimited(2, address.into());
    result.add_length_delimited(3, b"ttrpc".to_vec());
    result.add_length_delimited(6, b"an extension".to_vec());
    result.add_fixed64(77, 7);
    result.write_to_bytes()
}

/// All fields but one.
fn without(message: &[u8], number: u32) -> UnknownFields {
    let mut fields = fields(message).unwrap();
    fields.remove(number);
    fields
}

#[test]
fn options_of_every_containerd() {
    let other = any("containerd.io/cri.v1.PodSandboxConfig", vec![8, 1]);
    for given in [Any::new(), runc_options("pods"), generic_options()] {
        let decoded = options::decode(Some(&given)).unwrap();
        let wanted = options::encode(&decoded).unwrap();
        let input = given.write_to_bytes().unwrap();
        let before_2_3 = StartRequest::read(&input, ID, NAMESPACE);
        assert_eq!(before_2_3.options(), Some(given.clone()));
        assert_eq!(
            before_2_3.with_options(&wanted),
            wanted.write_to_bytes().unwrap()
        );
        // The options in the form that the stock shim takes, and all else as it came.
        let sent = params(ID, NAMESPACE, &[other.clone(), given.clone()]);
        let newer = StartRequest::read(&sent, ID, NAMESPACE);
        assert_eq!(
            newer.options(),
            options::is_options(&given).then_some(given)
        );
        let passed = newer.with_options(&wanted);
        if newer.options().is_some() {
            let expected = params(ID, NAMESPACE, &[other.clone(), wanted]);
            assert_eq!(fields(&passed), fields(&expected));
        }
        assert_eq!(without(&passed, 8), without(&sent, 8));
    }
}

#[test]
fn containerd_2_3_and_newer() {
    let _one = ONE_AT_A_TIME.lock();
    for in_place in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let (mut child, stock_shim, stock) = begin(dir.path(), result, in_place);
        let sent = params(ID, NAMESPACE, &[generic_options()]);
        child.stdin.take().unwrap().write_all(&sent).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let input = fs::read(dir.path().join("input")).unwrap();
        let got = StartRequest::read(&input, ID, NAMESPACE).options().unwrap();
        assert_eq!(options::decode(Some(&got)).unwrap().binary_name, "crun");
        assert!(got.type_url.ends_with("containerd.runc.v1.Options"));
        // containerd gets our address, and all else as it came.
        let told = Bootstrap::read(&output.stdout).unwrap();
        let address = Address(told.address);
        assert_eq!(address, Address::for_upstream(&stock));
        assert_eq!(without(&output.stdout, 2), without(&result(&stock.0), 2));
        stock_shim.end(&address);
    }
}

/// Nobody else would: containerd does not know of it.
#[test]
fn a_shim_whose_containerd_has_died_is_ended() {
    let _one = ONE_AT_A_TIME.lock();
    let dir = tempfile::tempdir().unwrap();
    let bare = |address: &str| address.as_bytes().to_vec();
    let (mut child, stock_shim, stock) = begin(dir.path(), bare, false);
    drop(child.stdout.take());
    drop(child.stdin.take());
    assert!(!child.wait().unwrap().success());
    // Our process does not wait long for the answer.
    let calls = || stock_shim.calls.lock().unwrap().clone();
    for _ in 0..6000 {
        if calls().last().is_some_and(|last| last == "Shutdown") {
            break;
        }
        thread::sleep(Duration::from_millis(10));
    }
    let calls = calls();
    assert_eq!(
        calls.last().map(String::as_str),
        Some("Shutdown"),
        "{calls:?}"
    );
    stock_shim.end(&Address::for_upstream(&stock));
}

/// As the stock shim tells the two forms apart.
#[test]
fn a_request_for_another_container_is_none() {
    for (id, namespace) in [("c2", NAMESPACE), (ID, "other"), ("", "")] {
        let sent = params(id, namespace, &[runc_options("pods")]);
        let read = StartRequest::read(&sent, ID, NAMESPACE);
        assert!(matches!(read, StartRequest::Options(_)), "{read:?}");
    }
}
