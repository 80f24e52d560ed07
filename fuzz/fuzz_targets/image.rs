//! The documents of an OCI image, or the parts of containerd's checkpoint: config, manifest and index, separated by NUL,
//! around one good layer.
#![no_main]

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use cryopod_archive::format::digest::Digest;
use cryopod_archive::format::limits::Limits;
use cryopod_archive::source::Source;
use libfuzzer_sys::fuzz_target;

static FILE: LazyLock<PathBuf> = LazyLock::new(|| cryopod_fuzz::scratch("image"));

fuzz_target!(|data: &[u8]| {
    let mut parts = data
        .split(|b| *b == 0)
        .map(|p| String::from_utf8_lossy(p).into_owned());
    let mut next = || parts.next().unwrap_or_default();
    let (config, manifest, index) = (next(), next(), next());
    let layer = vec![0; 1024];
    // `@C`, `@M`, `@L` stand for the digests, so that the fuzzer need not guess them.
    let digest = |b: &[u8]| Digest::of(b).to_string();
    let config = config.replace("@L", &digest(&layer));
    let manifest = manifest
        .replace("@L", &digest(&layer))
        .replace("@C", &digest(config.as_bytes()));
    let index = index
        .replace("@M", &digest(manifest.as_bytes()))
        .replace("@C", &digest(config.as_bytes()))
        .replace("@L", &digest(&layer));
    let mut tar = tar::Builder::new(Vec::new());
    let mut add = |name: String, content: &[u8]| {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o600);
        tar.append_data(&mut header, name, content).is_ok()
    };
    let blob = |b: &[u8]| format!("blobs/sha256/{}", Digest::of(b).hex());
    add("oci-layout".into(), br#"{"imageLayoutVersion":"1.0.0"}"#);
    add("index.json".into(), index.as_bytes());
    for content in [config.as_bytes(), manifest.as_bytes(), &layer] {
        add(blob(content), content);
    }
    let Ok(bytes) = tar.into_inner() else { return };
    if fs::write(&*FILE, bytes).is_err() {
        return;
    }
    let Ok(source) = Source::open(&FILE) else {
        return;
    };
    let _ = source.visit(&Limits::default(), &mut |entry, _| {
        let parts = entry.name.split('/');
        assert!(parts.clone().all(|p| !matches!(p, "" | "." | "..")));
        assert!(!entry.name.chars().any(char::is_control));
        Ok(())
    });
});
