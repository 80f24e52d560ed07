//! Any bytes as an archive: detection, tar, gzip, zstd, and the reader with several threads.
#![no_main]

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use cryopod_archive::format::limits::Limits;
use cryopod_archive::source::Source;
use cryopod_archive::verify::{VerifyOptions, verify};
use libfuzzer_sys::fuzz_target;

static FILE: LazyLock<PathBuf> = LazyLock::new(|| cryopod_fuzz::scratch("source"));

fuzz_target!(|data: &[u8]| {
    if fs::write(&*FILE, data).is_err() {
        return;
    }
    let limits = Limits {
        entries: 1000,
        small_file_bytes: 1 << 16,
        small_total_bytes: 1 << 18,
        total_bytes: 1 << 24,
        ratio_slack_bytes: 1 << 20,
        ..Limits::default()
    };
    let Ok(source) = Source::open_image(&FILE, None, &limits) else {
        return;
    };
    let visited = source.visit(&limits, &mut |entry, reader| {
        assert!(!entry.name.is_empty() && !entry.name.starts_with('/'));
        assert!(
            entry
                .name
                .split('/')
                .all(|part| !matches!(part, "" | "." | ".."))
        );
        assert_eq!(entry.mode & !0o777, 0);
        let read = std::io::copy(reader, &mut std::io::sink());
        assert!(read.is_err() || read.is_ok_and(|n| n == entry.size));
        Ok(())
    });
    let options = VerifyOptions {
        threads: 1,
        limits,
        ..VerifyOptions::default()
    };
    // Both ways through an archive agree on whether its form is sound.
    if verify(&source, &options).is_ok() {
        assert!(visited.is_ok());
    }
});
