//! Checkpoints for tests.
#![allow(dead_code, clippy::unwrap_used, reason = "each test uses a part")]

use cryopod_test_files::TestFiles;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use cryopod_archive::format::limits::Limits;
use cryopod_archive::source::Source;
use cryopod_host::files::Host;

pub const PODMAN_CONFIG: &str = r#"{"id":"0123456789abcdef","name":"web","lockID":3,"runtime":"cryopod-runtime","rootfsImageID":"aa","rootfsImageName":"docker.io/library/web:1","createdTime":"2026-01-02T03:04:05Z"}"#;

/// Bytes of which about half is noise.
pub fn half(seed: u64, len: usize) -> Vec<u8> {
    let mut out = noise(seed, len);
    for page in out.chunks_mut(8192) {
        let half = page.len() / 2;
        page[half..].fill(7);
    }
    out
}

/// Bytes that do not compress.
pub fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = vec![0; len];
    for word in out.chunks_mut(8) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        word.copy_from_slice(&x.to_le_bytes()[..word.len()]);
    }
    out
}

/// A podman checkpoint as a directory, with small files and large ones.
pub fn checkpoint(dir: &Path) -> PathBuf {
    let root = dir.join("checkpoint-in");
    let images = root.join("checkpoint");
    images.dir("vram");
    root.put("config.dump", PODMAN_CONFIG);
    root.put(
        "spec.dump",
        r#"{"annotations":{"io.kubernetes.cri.sandbox-name":"pod1"}}"#,
    );
    root.put("rootfs-diff.tar", half(1, 100_000));
    root.put("volumes/v1.tar", "");
    images.put("inventory.img", b"\x19CVT\x16\x311X\0\0\0\0");
    images.put("core-1.img", half(2, 3000));
    images.put("pages-1.img", half(3, 40 << 20));
    images.put("pages-2.img", noise(4, (33 << 20) + 5));
    images.join("vram").put("n".repeat(120), half(5, 70_000));
    root
}

/// Every entry of a source: name to content, a directory's being `None`.
pub fn content(source: &Source) -> BTreeMap<String, Option<Vec<u8>>> {
    let mut out = BTreeMap::new();
    source
        .visit(&Limits::default(), &mut |entry, reader| {
            let mut data = Vec::new();
            reader.read_to_end(&mut data).unwrap();
            assert_eq!(data.len() as u64, entry.size);
            assert!(
                out.insert(entry.name.clone(), entry.is_file().then_some(data))
                    .is_none()
            );
            Ok(())
        })
        .unwrap();
    out
}

/// Names in a directory, also hidden ones.
pub fn listing(dir: &Path) -> Vec<String> {
    Host::at(dir).names("/")
}
