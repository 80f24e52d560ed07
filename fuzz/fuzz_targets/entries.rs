//! A tar of entries of all types, names and sizes, packed into an image, an image unpacked: nothing leaves.
#![no_main]

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::sync::LazyLock;

use cryopod_archive::source::Source;
use cryopod_archive::unpack::{UnpackOptions, unpack};
use libfuzzer_sys::fuzz_target;

static DIR: LazyLock<PathBuf> = LazyLock::new(|| {
    let dir = cryopod_fuzz::scratch("entries");
    let _ = fs::create_dir(&dir);
    dir
});

// Each entry: type, length of its name, bytes of content, name.
fuzz_target!(|data: &[u8]| {
    let mut file = Vec::new();
    let mut put = |kind: u8, name: &[u8], link: &[u8], size: usize| {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::new(kind));
        header.set_mode(0o7777);
        header.set_size(size as u64);
        let old = header.as_old_mut();
        let n = name.len().min(100);
        old.name[..n].copy_from_slice(&name[..n]);
        let n = link.len().min(100);
        old.linkname[..n].copy_from_slice(&link[..n]);
        header.set_cksum();
        let _ = file.write_all(header.as_bytes());
        file.resize(file.len() + size.next_multiple_of(512), b'x');
    };
    put(b'0', b"config.dump", b"", 0);
    put(b'0', b"checkpoint/inventory.img", b"", 4);
    let mut rest = data;
    while let [kind, len, size, tail @ ..] = rest {
        let (name, tail) = tail.split_at(tail.len().min(usize::from(*len)));
        let (link, tail) = if *kind == b'2' {
            tail.split_at(tail.len().min(16))
        } else {
            (&b""[..], tail)
        };
        put(*kind, name, link, usize::from(*size));
        rest = tail;
    }
    file.resize(file.len() + 1024, 0);
    // An empty config.dump is no JSON: a real one ahead of the rest.
    let head = tar_of_config();
    let whole = [&head[..], &file[512..]].concat();
    let path = DIR.join("in.tar");
    if fs::write(&path, &whole).is_err() {
        return;
    }
    let Ok(source) = Source::open(&path) else {
        return;
    };
    let out = DIR.join("out");
    let done = unpack(
        &source,
        &out,
        &UnpackOptions {
            threads: 1,
            ..UnpackOptions::default()
        },
    );
    let names: Vec<_> = fs::read_dir(&*DIR)
        .into_iter()
        .flatten()
        .flatten()
        .map(|e| e.file_name())
        .collect();
    let expected = if done.is_ok() { 2 } else { 1 };
    assert_eq!(names.len(), expected, "{names:?}");
    let _ = fs::remove_dir_all(&out);
});

fn tar_of_config() -> Vec<u8> {
    let text = b"{\"lockID\":1}";
    let mut header = tar::Header::new_gnu();
    header.set_size(text.len() as u64);
    header.set_mode(0o600);
    header.as_old_mut().name[..11].copy_from_slice(b"config.dump");
    header.set_cksum();
    let mut out = header.as_bytes().to_vec();
    out.extend_from_slice(text);
    out.resize(1024, 0);
    out
}
