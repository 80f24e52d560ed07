//! The actions of the program, with a script as the stock shim.

#![allow(clippy::unwrap_used, reason = "tests report by failing")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;

use containerd_shim::protos::protobuf::Message;
use containerd_shim::protos::protobuf::well_known_types::any::Any;
use cryopod_shim::options;
use cryopod_shim::record::Record;
use cryopod_shim::ttrpc::address::Address;

/// Runs the program, and returns what the stock shim got: its low-level runtime, and its standard input.
fn run(dir: &Path, args: &[&str], low_level: &str, stdin: &[u8]) -> (String, Vec<u8>) {
    // Starting a program while another thread writes one gives ETXTBSY.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    let stock = dir.join("stock");
    let script = format!(
        "#!/bin/sh\necho \"$CRYOPOD_LOW_LEVEL_RUNTIME\" > {0}/low-level\ncat > {0}/stdin\n",
        dir.display()
    );
    fs::write(&stock, script).unwrap();
    fs::set_permissions(&stock, fs::Permissions::from_mode(0o755)).unwrap();
    let input = dir.join("input");
    fs::write(&input, stdin).unwrap();
    let status = Command::new(env!("CARGO_BIN_EXE_containerd-shim-cryopod-v2"))
        .args(args)
        .env("CRYOPOD_STOCK_SHIM", &stock)
        .env("CRYOPOD_RUNTIME", "/bin/true")
        .env("CRYOPOD_LOW_LEVEL_RUNTIME", low_level)
        .stdin(fs::File::open(&input).unwrap())
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
    let low_level = fs::read_to_string(dir.join("low-level")).unwrap();
    (
        low_level.trim().into(),
        fs::read(dir.join("stdin")).unwrap(),
    )
}

#[test]
fn delete_without_a_record_keeps_containerds_low_level_runtime() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("bundle");
    fs::create_dir(&bundle).unwrap();
    let bundle_arg = bundle.to_str().unwrap();
    let id = ["-namespace", "cryopod-tests", "-id", "c1"];
    let args = [&id[..], &["-bundle", bundle_arg, "delete"]].concat();
    assert_eq!(run(dir.path(), &args, "crun", b"").0, "crun");
    assert_eq!(run(dir.path(), &args, "", b"").0, "runc");
    let socket = |name| Address(dir.path().join(name).to_str().unwrap().into());
    let record = Record {
        upstream: socket("upstream"),
        address: socket("ours"),
        low_level: "youki".into(),
        root: None,
    };
    record.write(&bundle).unwrap();
    assert_eq!(run(dir.path(), &args, "crun", b"").0, "youki");
}

/// The stock shim of containerd 2 takes only its own options to `-info`.
#[test]
fn info_passes_the_stock_shims_own_options() {
    let dir = tempfile::tempdir().unwrap();
    let toml = "BinaryName = \"crun\"\n";
    let mut given = Any::new();
    given.type_url = "runtimeoptions.v1.Options".into();
    given.value = vec![0x1a, u8::try_from(toml.len()).unwrap()];
    given.value.extend_from_slice(toml.as_bytes());
    let passed = |stdin: &[u8]| run(dir.path(), &["-info"], "", stdin).1;
    let got = Any::parse_from_bytes(&passed(&given.write_to_bytes().unwrap())).unwrap();
    assert_eq!(got.type_url, "containerd.runc.v1.Options");
    assert_eq!(options::decode(Some(&got)).unwrap().binary_name, "crun");
    assert_eq!(passed(b""), b"");
    assert_eq!(passed(b"no message"), b"no message");
}
