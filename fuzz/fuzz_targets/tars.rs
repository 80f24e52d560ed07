//! The tars of a checkpoint that root unpacks or rewrites: the container's changes of files, and its archived `/dev`. The
//! first byte says which. Nothing may be written outside of the container's root.
#![no_main]

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use cryopod_operations::config::Config;
use cryopod_operations::images::devtar::{self, TarNode};
use cryopod_operations::rootfs;
use libfuzzer_sys::fuzz_target;

static DIR: LazyLock<PathBuf> = LazyLock::new(|| {
    let dir = cryopod_fuzz::scratch("tars");
    let _ = fs::create_dir_all(dir.join("images"));
    let _ = fs::create_dir_all(dir.join("bundle/outside"));
    let _ = fs::write(dir.join("bundle/outside/canary"), "alive");
    let _ = fs::write(
        dir.join("bundle/config.json"),
        r#"{"root":{"path":"rootfs"}}"#,
    );
    dir
});

fuzz_target!(|data: &[u8]| {
    let [which, rest @ ..] = data else { return };
    if which % 2 == 0 {
        files(rest);
    } else {
        nodes(rest, *which);
    }
});

fn files(tar: &[u8]) {
    // Without an end mark nothing is unpacked.
    let mut tar = tar.to_vec();
    tar.resize(tar.len().next_multiple_of(512) + 1024, 0);
    let root = DIR.join("bundle/rootfs");
    let _ = fs::remove_dir_all(&root);
    if fs::create_dir(&root).is_err()
        || fs::write(DIR.join("images").join(rootfs::FILE), tar).is_err()
    {
        return;
    }
    // So that a link in the root that leads out is there to be followed.
    let _ = std::os::unix::fs::symlink(DIR.join("bundle/outside"), root.join("out"));
    let mut config = Config::default();
    config.rootfs.max_gib = 1;
    config.rootfs.max_files = 64;
    let _ = rootfs::apply(&config, &DIR.join("images"), &DIR.join("bundle"));
    assert_eq!(
        names(&DIR.join("bundle")),
        ["config.json", "outside", "rootfs"]
    );
    assert_eq!(names(&DIR.join("bundle/outside")), ["canary"]);
    assert_eq!(
        fs::read(DIR.join("bundle/outside/canary")).ok().as_deref(),
        Some(&b"alive"[..])
    );
}

fn nodes(tar: &[u8], level: u8) {
    let (from, to) = (DIR.join("from"), DIR.join("to"));
    let _ = fs::remove_file(&to);
    // Compressed here, or as it is.
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    let bytes = match packed.write_all(tar).and_then(|()| packed.finish()) {
        Ok(bytes) if level % 4 == 1 => bytes,
        _ => tar.to_vec(),
    };
    if fs::write(&from, bytes).is_err() {
        return;
    }
    let node = TarNode {
        path: "nvidia1".into(),
        model: "nvidia0".into(),
        otherwise: (level > 128).then_some((0o666, 0, 0)),
        major: 195,
        minor: 1,
    };
    let _ = devtar::rewrite(&from, &to, &[node]);
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}
