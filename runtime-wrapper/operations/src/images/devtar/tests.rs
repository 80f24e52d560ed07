use super::*;
use std::fs;
use std::process::Command;

fn pack(dir: &Path, to: &Path) {
    let done = Command::new("tar")
        .args([
            "--create",
            "--gzip",
            "--no-unquote",
            "--no-wildcards",
            "--one-file-system",
        ])
        .args([
            "--check-links",
            "--preserve-permissions",
            "--sparse",
            "--numeric-owner",
        ])
        .arg("--file")
        .arg(to)
        .arg("--directory")
        .arg(dir)
        .arg(".")
        .status()
        .unwrap();
    assert!(done.success());
}

fn list(file: &Path) -> Vec<String> {
    let out = Command::new("tar")
        .args(["-tvzf"])
        .arg(file)
        .output()
        .unwrap();
    assert!(out.status.success(), "{out:?}");
    let text = String::from_utf8(out.stdout).unwrap();
    let mut lines: Vec<String> = text
        .lines()
        .map(|l| l.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect();
    lines.sort();
    lines
}

fn node(path: &str, model: &str, major: u64, minor: u64) -> TarNode {
    TarNode {
        path: path.into(),
        model: model.into(),
        otherwise: None,
        major,
        minor,
    }
}

#[test]
fn a_dev_of_gnu_tar() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: mknod needs root");
        return;
    }
    use nix::sys::stat::{Mode, SFlag, makedev, mknod};
    let dir = tempfile::tempdir().unwrap();
    let dev = dir.path().join("dev");
    fs::create_dir_all(dev.join("dri")).unwrap();
    let make = |name: &str, mode, n: (u64, u64)| {
        let path = dev.join(name);
        let bits = Mode::from_bits_truncate(mode);
        mknod(&path, SFlag::S_IFCHR, bits, makedev(n.0, n.1)).unwrap();
        nix::unistd::chown(&path, None, Some(44.into())).unwrap();
    };
    make("nvidia0", 0o640, (195, 0));
    make("dri/renderD128", 0o600, (226, 128));
    make("null", 0o600, (1, 3));
    let long = "x".repeat(180);
    fs::write(dev.join(&long), "a long name").unwrap();
    // A sparse file whose map does not fit into its header.
    let sparse = fs::File::create(dev.join("sparse")).unwrap();
    for i in 0..40 {
        std::os::unix::fs::FileExt::write_at(&sparse, &[i; 5000], u64::from(i) << 20).unwrap();
    }
    fs::write(dev.join("zz-last"), vec![7; 70_000]).unwrap();
    let (from, to) = (dir.path().join("a.tar.gz"), dir.path().join("b.tar.gz"));
    pack(&dev, &from);
    let nodes = [
        node("nvidia0", "nvidia0", 195, 1),
        node("nvidia1", "nvidia0", 195, 1),
        node("dri/renderD130", "dri/renderD128", 226, 130),
        TarNode {
            otherwise: Some((0o620, 0, 5)),
            ..node("nvidia2", "mounted", 195, 2)
        },
        node("nvidia9", "removed", 195, 1),
    ];
    let before = fs::read(&from).unwrap();
    rewrite(&from, &to, &nodes).unwrap();
    assert_eq!(fs::read(&from).unwrap(), before);
    let out = dir.path().join("out");
    fs::create_dir(&out).unwrap();
    let unpacked = Command::new("tar")
        .args([
            "--extract",
            "--gzip",
            "--no-unquote",
            "--no-wildcards",
            "--file",
        ])
        .arg(&to)
        .arg("--directory")
        .arg(&out)
        .output()
        .unwrap();
    assert!(
        unpacked.status.success() && unpacked.stderr.is_empty(),
        "{unpacked:?}"
    );
    use std::os::unix::fs::MetadataExt;
    let is = |name: &str| {
        let m = fs::metadata(out.join(name)).unwrap();
        let n = cryopod_host::files::split_rdev(m.rdev());
        (n.0, n.1, m.mode() & 0o7777, m.gid())
    };
    assert_eq!(is("nvidia0"), (195, 1, 0o640, 44));
    assert_eq!(is("nvidia1"), (195, 1, 0o640, 44));
    assert_eq!(is("nvidia9"), (195, 1, 0o640, 44), "as that of its number");
    assert_eq!(is("dri/renderD130"), (226, 130, 0o600, 44));
    assert_eq!(is("dri/renderD128"), (226, 128, 0o600, 44), "not asked for");
    assert_eq!(is("nvidia2"), (195, 2, 0o620, 5));
    assert_eq!(is("null"), (1, 3, 0o600, 44));
    for name in [long.as_str(), "sparse", "zz-last"] {
        let same = fs::read(out.join(name)).unwrap() == fs::read(dev.join(name)).unwrap();
        assert!(same, "{name}");
    }
    // Rewriting with the same nodes leaves the list unchanged.
    let again = dir.path().join("c.tar.gz");
    rewrite(&to, &again, &nodes).unwrap();
    assert_eq!(list(&again), list(&to));

    let e = |from: &Path, nodes: &[TarNode]| {
        let to = dir.path().join("d.tar.gz");
        let _ = fs::remove_file(&to);
        rewrite(from, &to, nodes).unwrap_err().to_string()
    };
    let missing = e(&from, &[node("a", "nvidia7", 1, 1)]);
    assert!(
        missing.contains("a.tar.gz") && missing.contains("no device \"nvidia7\""),
        "{missing}"
    );
    let damaged = dir.path().join("damaged.tar.gz");
    fs::write(&damaged, &before[..before.len() / 2]).unwrap();
    let cut = e(&damaged, &nodes);
    assert!(
        cut.contains("damaged.tar.gz: cannot read the archived /dev"),
        "{cut}"
    );
    let nothing = e(&dir.path().join("none"), &nodes);
    assert!(nothing.contains("none: cannot read"), "{nothing}");
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut gz = GzEncoder::new(Vec::new(), Compression::fast());
    gz.write_all(bytes).unwrap();
    gz.finish().unwrap()
}

#[test]
fn hostile_headers() {
    let dir = tempfile::tempdir().unwrap();
    let from = dir.path().join("a");
    let try_it = |header: &mut Header| {
        header.set_cksum();
        fs::write(&from, gzip(header.as_bytes())).unwrap();
        let to = dir.path().join("b");
        let _ = fs::remove_file(&to);
        rewrite(&from, &to, &[]).map_err(|e| e.to_string())
    };
    let mut header = Header::new_gnu();
    header.set_path("x").unwrap();
    header.set_size(u64::MAX);
    assert!(try_it(&mut header).unwrap_err().contains("too large"));
    header.set_size(1 << 40);
    assert!(try_it(&mut header).unwrap_err().contains("cut off"));
    header.set_entry_type(EntryType::GNULongName);
    assert!(try_it(&mut header).unwrap_err().contains("too long"));
    header.set_size(700);
    assert!(try_it(&mut header).unwrap_err().contains("cut off"));
    let mut wrong = Header::new_gnu();
    wrong.set_path("y").unwrap();
    wrong.set_size(0);
    wrong.set_cksum();
    let mut bytes = *wrong.as_bytes();
    bytes[0] = b'z';
    fs::write(&from, gzip(&bytes)).unwrap();
    let e = rewrite(&from, &dir.path().join("c"), &[])
        .unwrap_err()
        .to_string();
    assert!(e.contains("sum is wrong"), "{e}");
}

#[test]
fn only_a_whole_archive_is_rewritten() {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("a"), dir.path().join("b"));
    let try_it = |bytes: &[u8]| {
        fs::write(&from, bytes).unwrap();
        let _ = fs::remove_file(&to);
        rewrite(&from, &to, &[]).map_err(|e| e.to_string())
    };
    let mut tar = tar::Builder::new(Vec::new());
    let mut header = Header::new_gnu();
    header.set_size(3);
    tar.append_data(&mut header, "x", &b"abc"[..]).unwrap();
    let mut tar = tar.into_inner().unwrap();
    let mut whole = gzip(&tar);
    try_it(&whole).unwrap();
    for length in [0, 300, 1024] {
        let e = try_it(&gzip(&tar[..length])).unwrap_err();
        assert!(e.contains("cut off"), "{length}: {e}");
    }
    // gzip's checksum, and its length.
    for at in [8, 4] {
        let at = whole.len() - at;
        whole[at] ^= 1;
        let e = try_it(&whole).unwrap_err();
        assert!(e.contains("corrupt"), "{e}");
        whole[at] ^= 1;
    }
    assert!(try_it(&whole[..whole.len() - 8]).is_err());
    tar.resize(3 << 20, 0);
    let e = try_it(&gzip(&tar)).unwrap_err();
    assert!(e.contains("more than 1 MiB"), "{e}");
}
