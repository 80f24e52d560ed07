//! What is seen late: by a verification, in directories, on the disk.

use cryopod_test_files::TestFiles;
use std::fs;
use std::path::Path;

use cryopod_archive::source::Source;
use cryopod_archive::unpack::{UnpackOptions, unpack};

use serde_json::{Value, json};

use crate::common::{PODMAN_CONFIG, listing};
use crate::make::*;
use crate::{Count, INVENTORY};

#[test]
fn what_only_a_verification_sees() {
    let mut count = Count::default();
    let tar = |name: &str, content: &[u8]| write(Tar::good().file(name, content).end());
    count.seen_by_verify(
        "checkpoint/inventory.img: not an image of CRIU",
        write({
            Tar::default()
                .file("config.dump", PODMAN_CONFIG.as_bytes())
                .file("checkpoint/inventory.img", b"junk")
                .end()
        }),
    );
    count.seen_by_verify("spec.dump: not valid JSON", tar("spec.dump", b"{\"a\":"));
    count.seen_by_verify(
        "checkpoint/cryopod.json",
        tar("checkpoint/cryopod.json", b"{\"schema\":\"9.0\"}"),
    );
    count.seen_by_verify(
        "checkpoint/cryopod.json",
        tar("checkpoint/cryopod.json", b"{}"),
    );
    count.seen_by_verify("the image says 5 bytes of content", |p: &Path| {
        let change = |m: &mut Value| m["annotations"] = json!({"dev.cryopod.content.bytes": "5"});
        Layout::good().write(p, change, |_| {}, |_| {});
    });
    assert_eq!(count.0, 5);
}

#[test]
fn directories_with_traps() {
    let mut count = Count::default();
    let directory = |then: &'static dyn Fn(&Path)| {
        move |p: &Path| {
            p.put("config.dump", PODMAN_CONFIG);
            p.put("checkpoint/inventory.img", INVENTORY);
            then(p);
        }
    };
    refused! { count:
        "a symbolic link to /etc/passwd" => directory(&|p| p.link("evil", "/etc/passwd"));
        "a symbolic link to /etc" => directory(&|p| p.link("checkpoint/parent", "/etc"));
        "a fifo" => directory(&|p| { nix::unistd::mkfifo(&p.join("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap(); });
        "a socket" => directory(&|p| { drop(std::os::unix::net::UnixListener::bind(p.join("s")).unwrap()); });
        "control characters" => directory(&|p| p.put("a\nb", ""));
    }
    assert_eq!(count.0, 5);
}

#[test]
fn an_archive_larger_than_the_disk_is_not_begun() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    let change = |m: &mut Value| {
        m["annotations"] = json!({"dev.cryopod.content.bytes": (1u64 << 60).to_string()})
    };
    Layout::good().write(&path, change, |_| {}, |_| {});
    let out = dir.path().join("out");
    let error = unpack(
        &Source::open(&path).unwrap(),
        &out,
        &UnpackOptions::default(),
    )
    .unwrap_err()
    .to_string();
    assert!(
        error.contains("1152921504606846976 bytes are needed"),
        "{error}"
    );
    assert_eq!(listing(dir.path()), ["image"]);
}

#[test]
fn set_id_bits_and_owners_are_not_taken() {
    use std::os::unix::fs::MetadataExt;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.tar");
    fs::write(&path, Tar::good().end()).unwrap(); // all with mode 6755
    let out = dir.path().join("out");
    unpack(
        &Source::open(&path).unwrap(),
        &out,
        &UnpackOptions::default(),
    )
    .unwrap();
    let meta = fs::metadata(out.join("config.dump")).unwrap();
    assert_eq!(meta.mode() & 0o7777, 0o755);
}
