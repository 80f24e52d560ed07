//! The documents of an OCI image, or the parts of containerd's checkpoint: config, manifest and index, separated by NUL,
//! around one layer: a good one, or what follows a third NUL, as it is or (after an `E`) encrypted for the reader's key.
#![no_main]

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use age::secrecy::ExposeSecret;
use cryopod_archive::Identities;
use cryopod_archive::format::digest::Digest;
use cryopod_archive::format::limits::Limits;
use cryopod_archive::source::Source;
use libfuzzer_sys::fuzz_target;

static FILE: LazyLock<PathBuf> = LazyLock::new(|| cryopod_fuzz::scratch("image"));

static KEY: LazyLock<age::x25519::Identity> = LazyLock::new(age::x25519::Identity::generate);
static IDENTITIES: LazyLock<Identities> = LazyLock::new(|| {
    let file = cryopod_fuzz::scratch("image.key");
    let _ = fs::write(&file, KEY.to_string().expose_secret());
    Identities::read(&[file])
});

fuzz_target!(|data: &[u8]| {
    let mut parts = data.splitn(4, |b| *b == 0);
    let mut next = || String::from_utf8_lossy(parts.next().unwrap_or_default()).into_owned();
    let (config, manifest, index) = (next(), next(), next());
    let layer = match parts.next() {
        None => vec![0; 1024],
        Some([b'E', plain @ ..]) => match age::encrypt(&KEY.to_public(), plain) {
            Ok(layer) => layer,
            Err(_) => return,
        },
        Some(layer) => layer.to_vec(),
    };
    // `@C`, `@M`, `@L` stand for the digests and `@S` for the layer's size, so that the fuzzer need not guess them.
    let digest = |b: &[u8]| Digest::of(b).to_string();
    let config = config.replace("@L", &digest(&layer));
    let manifest = manifest
        .replace("@L", &digest(&layer))
        .replace("@S", &layer.len().to_string())
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
    let Ok(mut source) = Source::open(&FILE) else {
        return;
    };
    source.unlock(&IDENTITIES);
    let _ = source.visit(&Limits::default(), &mut |entry, _| {
        let parts = entry.name.split('/');
        assert!(parts.clone().all(|p| !matches!(p, "" | "." | "..")));
        assert!(!entry.name.chars().any(char::is_control));
        Ok(())
    });
});
