use super::*;
use cryopod_test_files::TestFiles;
use serde_json::json;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

#[test]
fn whose_changes_are_carried() {
    let spec = |a: serde_json::Value| Spec::from_json(json!({ "annotations": a }));
    let named = |bundle| (bundle, "c1");
    let docker = Path::new("/run/containerd/io.containerd.runtime.v2.task/moby/c1");
    let other = Path::new("/run/containerd/io.containerd.runtime.v2.task/default/moby");
    let auto = RootfsOptions::default();
    let with = |carry| RootfsOptions {
        carry,
        ..RootfsOptions::default()
    };
    let (always, never) = (with(Carry::Always), with(Carry::Never));
    let (none, on, off) = (
        json!({}),
        json!({"dev.cryopod.rootfs": "on"}),
        json!({"dev.cryopod.rootfs": "off"}),
    );
    for (options, annotations, bundle, expected) in [
        (&auto, &none, docker, true),
        (&auto, &none, other, false),
        (&auto, &json!({"nerdctl/name": "x"}), other, true),
        (&auto, &off, docker, false),
        (&auto, &on, other, true),
        (&always, &none, other, true),
        (&always, &off, other, false),
        (&never, &none, docker, false),
        (&never, &on, docker, true),
    ] {
        assert_eq!(
            wanted(options, &spec(annotations.clone()), named(bundle), false).unwrap(),
            expected,
            "{options:?} {annotations} {bundle:?}"
        );
    }
    // docker in another namespace, as with `--userns-remap`.
    let remapped = Spec::from_json(json!({"mounts": [{
        "destination": "/etc/hostname",
        "source": "/var/lib/docker/100000.100000/containers/c1/hostname",
    }]}));
    assert!(wanted(&auto, &remapped, named(other), false).unwrap());
    assert!(!wanted(&auto, &remapped, (other, "c2"), false).unwrap());
    // Its engine packs the files when they have changed.
    assert!(wanted(&auto, &spec(none.clone()), named(other), true).unwrap());
    assert!(!wanted(&auto, &spec(off), named(other), true).unwrap());
    assert!(!wanted(&never, &spec(none), named(other), true).unwrap());
    for (word, expected) in [("true", true), ("on ", true), ("false", false)] {
        let spec = spec(json!({"dev.cryopod.rootfs": word}));
        assert_eq!(
            wanted(&auto, &spec, named(docker), false).unwrap(),
            expected,
            "{word}"
        );
    }
    for word in ["yes", "On", ""] {
        let spec = spec(json!({"dev.cryopod.rootfs": word}));
        let said = wanted(&auto, &spec, named(docker), false)
            .unwrap_err()
            .to_string();
        assert!(said.contains("dev.cryopod.rootfs: "), "{said}");
    }
}

fn pack(upper: &Path, images: &Path, bounds: &RootfsOptions) -> std::io::Result<()> {
    capture::pack(&fs::File::open(upper)?, &images.join(FILE), bounds).map(drop)
}

fn bundle(dir: &Path) -> std::path::PathBuf {
    let bundle = dir.join("bundle");
    bundle.dir("rootfs");
    let capabilities = r#"{"permitted":["CAP_SETUID","CAP_SETFCAP"]}"#;
    let process = format!(r#"{{"user":{{"uid":1000,"gid":1000}},"capabilities":{capabilities}}}"#);
    bundle.put(
        "config.json",
        format!(r#"{{"root":{{"path":"rootfs"}},"process":{process}}}"#),
    );
    bundle
}

fn restore(images: &Path, bundle: &Path) -> Result<(), Error> {
    apply(&Config::default(), images, bundle)
}

#[test]
fn there_and_back() {
    let dir = tempfile::tempdir().unwrap();
    let (upper, images) = (dir.path().join("upper"), dir.path().join("images"));
    fs::create_dir(&images).unwrap();
    upper.put("a/b/file", "new");
    fs::set_permissions(upper.join("a/b/file"), fs::Permissions::from_mode(0o4751)).unwrap();
    fs::hard_link(upper.join("a/b/file"), upper.join("z")).unwrap();
    upper.link("a/link", "/etc/passwd");
    upper.put("directory", "now a file");
    pack(&upper, &images, &RootfsOptions::default()).unwrap();
    let bundle = bundle(dir.path());
    let root = bundle.join("rootfs");
    root.dir("directory/with");
    root.put("a/b/file", "old");
    root.put("a/b/kept", "kept");
    restore(&images, &bundle).unwrap();
    let read = |p: &str| fs::read_to_string(root.join(p)).unwrap();
    assert_eq!(
        [
            read("a/b/file"),
            read("a/b/kept"),
            read("z"),
            read("directory")
        ],
        ["new", "kept", "new", "now a file"]
    );
    let meta = fs::metadata(root.join("a/b/file")).unwrap();
    assert_eq!(meta.mode() & 0o7777, 0o4751);
    assert_eq!(meta.ino(), fs::metadata(root.join("z")).unwrap().ino());
    assert_eq!(
        fs::read_link(root.join("a/link")).unwrap(),
        Path::new("/etc/passwd")
    );
    assert_eq!(fs::read_dir(&root).unwrap().count(), 3);
}

/// Writes entries independently of the code under test.
fn tar(images: &Path, entries: &[(&str, tar::EntryType, &str)]) {
    let mut tar = tar::Builder::new(fs::File::create(images.join(FILE)).unwrap());
    for (name, kind, text) in entries {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(*kind);
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(1);
        let mut data: &[u8] = b"";
        match kind {
            tar::EntryType::Regular => data = text.as_bytes(),
            _ => header.set_link_name(text).unwrap(),
        }
        header.set_size(data.len() as u64);
        header.as_gnu_mut().unwrap().name[..name.len()].copy_from_slice(name.as_bytes());
        header.set_cksum();
        tar.append(&header, data).unwrap();
    }
    tar.finish().unwrap();
}

#[test]
fn deleted_and_hidden() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = bundle(dir.path());
    let root = bundle.join("rootfs");
    root.dir("opaque/x");
    root.dir("gone/y");
    let file = tar::EntryType::Regular;
    tar(
        dir.path(),
        &[
            (".wh.gone", file, ""),
            (".wh.never", file, ""),
            ("opaque/.wh..wh..opq", file, ""),
            ("opaque/new", file, "1"),
        ],
    );
    restore(dir.path(), &bundle).unwrap();
    assert!(!root.join("gone").exists());
    assert!(!root.join("opaque/x").exists());
    assert!(root.join("opaque/new").exists());
}

#[test]
fn nothing_leads_out_of_the_root() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = bundle(dir.path());
    let root = bundle.join("rootfs");
    let outside = dir.path().join("outside");
    fs::create_dir(&outside).unwrap();
    outside.put("secret", "s");
    let file = tar::EntryType::Regular;
    tar(dir.path(), &[("../outside/bad", file, "x")]);
    let e = restore(dir.path(), &bundle).unwrap_err().to_string();
    assert!(e.contains("../outside/bad"), "{e}");
    // A link in the tar or in the image: followed within the root.
    let to = outside.to_str().unwrap();
    tar(
        dir.path(),
        &[
            ("out", tar::EntryType::Symlink, to),
            ("out/bad", file, "x"),
            ("out/.wh.secret", file, ""),
        ],
    );
    let _ = restore(dir.path(), &bundle);
    let secret = format!("{to}/secret");
    tar(dir.path(), &[("hard", tar::EntryType::Link, &secret)]);
    assert!(restore(dir.path(), &bundle).is_err());
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 1);
    assert!(!root.join("hard").exists());
}

#[test]
fn whiteouts_of_dots_are_no_directories() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = bundle(dir.path());
    let root = bundle.join("rootfs");
    root.dir("kept");
    let file = tar::EntryType::Regular;
    for name in [".wh.", ".wh..", ".wh...", "kept/.wh...", "kept/.wh.."] {
        // The entries before it are not unpacked either.
        tar(dir.path(), &[("new", file, "x"), (name, file, "")]);
        let e = restore(dir.path(), &bundle).unwrap_err().to_string();
        assert!(e.contains(name) && e.contains("no name"), "{e}");
        assert!(bundle.join("config.json").exists(), "{name}");
        let names: Vec<_> = fs::read_dir(&root)
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        assert_eq!(names, ["kept"], "{name}");
    }
}

#[test]
fn bounds() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = bundle(dir.path());
    let refused = |options: &RootfsOptions| {
        let config = Config {
            rootfs: options.clone(),
            ..Config::default()
        };
        let e = apply(&config, dir.path(), &bundle).unwrap_err().to_string();
        assert_eq!(fs::read_dir(bundle.join("rootfs")).unwrap().count(), 0);
        e
    };
    let file = tar::EntryType::Regular;
    tar(
        dir.path(),
        &[("a", file, ""), ("b", file, ""), ("c", file, "")],
    );
    let e = refused(&RootfsOptions {
        max_files: 2,
        ..RootfsOptions::default()
    });
    assert!(e.contains("rootfs.max_files"), "{e}");
    // A file of 2 TiB, which is not there.
    let mut header = tar::Header::new_gnu();
    header.set_path("big").unwrap();
    header.set_mode(0o600);
    header.set_size(2 << 40);
    header.set_cksum();
    dir.put(FILE, header.as_bytes());
    let e = refused(&RootfsOptions::default());
    assert!(e.contains("more than 64 GiB (rootfs.max_gib"), "{e}");
    // A time that no clock shows.
    header.set_size(0);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(u64::MAX);
    header.set_cksum();
    dir.put(FILE, header.as_bytes());
    let e = refused(&RootfsOptions::default());
    assert!(e.contains("/big: no clock"), "{e}");
    // Records that would be read into memory, and malicious ones.
    let write = |kind, size: u64, text: &[u8]| {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(0o600);
        header.set_size(size);
        header.set_cksum();
        dir.put(FILE, [header.as_bytes(), text].concat());
        refused(&RootfsOptions::default())
    };
    for kind in [
        tar::EntryType::GNULongName,
        tar::EntryType::GNULongLink,
        tar::EntryType::XHeader,
    ] {
        let e = write(kind, 1 << 30, b"");
        assert!(e.contains("a name or record of 1073741824 bytes"), "{e}");
    }
    let e = write(tar::EntryType::XHeader, 15, b"15 size=999999\n");
    assert!(e.contains("\"size\""), "{e}");
    let e = write(tar::EntryType::XGlobalHeader, 0, b"");
    assert!(e.contains("for all files"), "{e}");
}

/// A mode shows the mask of an access control list in place of the group's rights.
#[test]
fn a_list_that_is_lost_gives_nobody_more() {
    let dir = tempfile::tempdir().unwrap();
    let (upper, images) = (dir.path().join("upper"), dir.path().join("images"));
    fs::create_dir(&images).unwrap();
    upper.put("file", "secret");
    // user::rw-, user:1000:rw-, group::---, mask::rw-, other::---
    let mut list = 2u32.to_le_bytes().to_vec();
    for (tag, rights, id) in [
        (1u16, 6u16, !0u32),
        (2, 6, 1000),
        (4, 0, !0),
        (16, 6, !0),
        (32, 0, !0),
    ] {
        list.extend([tag.to_le_bytes(), rights.to_le_bytes()].concat());
        list.extend(id.to_le_bytes());
    }
    let name = "system.posix_acl_access";
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(upper.join("file"), name, &list, flags).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
    assert_eq!(mode(&upper.join("file")), 0o660);
    let opened = fs::File::open(&upper).unwrap();
    let left_out = capture::pack(&opened, &images.join(FILE), &RootfsOptions::default()).unwrap();
    let warning = left_out.to_string();
    assert!(
        warning.contains("(system.posix_acl_access): /file"),
        "{warning}"
    );
    let bundle = bundle(dir.path());
    restore(&images, &bundle).unwrap();
    assert_eq!(mode(&bundle.join("rootfs/file")), 0o600);
}

#[test]
fn zeros_take_no_room() {
    let dir = tempfile::tempdir().unwrap();
    let (upper, images) = (dir.path().join("upper"), dir.path().join("images"));
    fs::create_dir(&images).unwrap();
    upper.put("sparse", "begin");
    let file = fs::File::options().write(true).open(upper.join("sparse"));
    file.unwrap().set_len(9_000_001).unwrap();
    pack(&upper, &images, &RootfsOptions::default()).unwrap();
    let bundle = bundle(dir.path());
    restore(&images, &bundle).unwrap();
    let restored = bundle.join("rootfs/sparse");
    let (was, is) = (fs::read(upper.join("sparse")), fs::read(&restored));
    assert_eq!(was.unwrap(), is.unwrap());
    assert!(fs::metadata(&restored).unwrap().blocks() < 1000);
}

#[test]
fn long_names_and_what_is_cut_off() {
    let dir = tempfile::tempdir().unwrap();
    let (upper, images) = (dir.path().join("upper"), dir.path().join("images"));
    let long = "n".repeat(200);
    upper.dir(&long);
    fs::create_dir(&images).unwrap();
    upper.join(&long).put("file", "text");
    upper.link("link", format!("/{long}/file"));
    // What is packed within the bounds is within them.
    let three = RootfsOptions {
        max_files: 3,
        ..RootfsOptions::default()
    };
    pack(&upper, &images, &three).unwrap();
    let bundle = bundle(dir.path());
    let config = Config {
        rootfs: three.clone(),
        ..Config::default()
    };
    apply(&config, &images, &bundle).unwrap();
    let root = bundle.join("rootfs");
    assert_eq!(fs::read(root.join(&long).join("file")).unwrap(), b"text");
    let link = fs::read_link(root.join("link")).unwrap();
    assert_eq!(link.to_str(), Some(&format!("/{long}/file")[..]));
    // The end is missing, within a file.
    let mut header = tar::Header::new_gnu();
    header.set_path("cut").unwrap();
    header.set_mode(0o600);
    header.set_mtime(1);
    header.set_uid(0);
    header.set_gid(0);
    header.set_size(100);
    header.set_cksum();
    let text = [header.as_bytes(), &b"short"[..]].concat();
    images.put(FILE, text);
    let e = restore(&images, &bundle).unwrap_err().to_string();
    assert!(e.contains("cut off"), "{e}");
    assert!(!root.join("cut").exists());
    // An empty file, and one that ends between two entries.
    pack(&upper, &images, &three).unwrap();
    let whole = fs::read(images.join(FILE)).unwrap();
    fs::remove_file(root.join("link")).unwrap();
    for length in [0, whole.len() - 1024] {
        images.put(FILE, &whole[..length]);
        let e = restore(&images, &bundle).unwrap_err().to_string();
        assert!(e.contains("no end mark"), "{length}: {e}");
        assert!(fs::symlink_metadata(root.join("link")).is_err());
    }
}

/// Unpacked layers of images have files with such names.
#[test]
fn names_like_whiteouts_are_files() {
    let dir = tempfile::tempdir().unwrap();
    let (upper, images) = (dir.path().join("upper"), dir.path().join("images"));
    fs::create_dir(&images).unwrap();
    upper.put("d/.wh.file", "1");
    fs::hard_link(upper.join("d/.wh.file"), upper.join("d/.wh.twin")).unwrap();
    upper.put("d/.wh..wh..opq", "2");
    upper.put("d/.wh.directory/in", "3");
    upper.link("d/.wh.link", "to");
    upper.put("d/.wh.", "4");
    // A header has no room for this name.
    let long = format!("d/.wh.{}", "n".repeat(200));
    upper.put(&long, "5");
    pack(&upper, &images, &RootfsOptions::default()).unwrap();
    let bundle = bundle(dir.path());
    let root = bundle.join("rootfs");
    for name in ["file", "twin", "directory", "link", "kept"] {
        root.join("d").put(name, "old");
    }
    restore(&images, &bundle).unwrap();
    let read = |p: &str| fs::read_to_string(root.join(p)).unwrap();
    for name in ["file", "twin", "directory", "link", "kept"] {
        assert_eq!(read(&format!("d/{name}")), "old");
    }
    for (name, text) in [
        ("d/.wh.file", "1"),
        ("d/.wh.twin", "1"),
        ("d/.wh..wh..opq", "2"),
        ("d/.wh.directory/in", "3"),
        ("d/.wh.", "4"),
        (&long, "5"),
    ] {
        assert_eq!(read(name), text, "{name}");
    }
    let link = fs::read_link(root.join("d/.wh.link")).unwrap();
    assert_eq!(link, Path::new("to"));
}

#[test]
fn an_unpacked_file_takes_no_name_of_the_containers() {
    let dir = tempfile::tempdir().unwrap();
    let (upper, images) = (dir.path().join("upper"), dir.path().join("images"));
    fs::create_dir(&images).unwrap();
    upper.put(".cryopod-unpacked", "its own");
    upper.put("z", "new");
    pack(&upper, &images, &RootfsOptions::default()).unwrap();
    let bundle = bundle(dir.path());
    let root = bundle.join("rootfs");
    restore(&images, &bundle).unwrap();
    let own = fs::read_to_string(root.join(".cryopod-unpacked"));
    assert_eq!(own.unwrap(), "its own");
    assert_eq!(fs::read_dir(&root).unwrap().count(), 2);
}

#[test]
fn off_leaves_the_files_alone() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = bundle(dir.path());
    let spec = r#"{"root":{"path":"rootfs"},"annotations":{"dev.cryopod.rootfs":"off"}}"#;
    bundle.put("config.json", spec);
    tar(dir.path(), &[("x", tar::EntryType::Regular, "1")]);
    restore(dir.path(), &bundle).unwrap();
    assert!(!bundle.join("rootfs/x").exists());
}

/// A name that is a link to a secret, a FIFO, a socket and a file in turn, while it is packed.
#[test]
fn what_changes_while_it_is_packed_leads_nowhere() {
    let dir = tempfile::tempdir().unwrap();
    let (upper, images) = (dir.path().join("upper"), dir.path().join("images"));
    fs::create_dir_all(&upper).unwrap();
    fs::create_dir(&images).unwrap();
    dir.dir("host");
    let secret = dir.path().join("host/secret");
    fs::write(&secret, "the host's own").unwrap();
    let done = std::sync::atomic::AtomicBool::new(false);
    let swap = || {
        let (new, name) = (dir.path().join("new"), upper.join("name"));
        let mut n = 0;
        while !done.load(std::sync::atomic::Ordering::Relaxed) {
            match n % 4 {
                0 => symlink(&secret, &new).unwrap(),
                1 => nix::unistd::mkfifo(&new, nix::sys::stat::Mode::S_IRWXU).unwrap(),
                2 => drop(std::os::unix::net::UnixListener::bind(&new).unwrap()),
                _ => fs::write(&new, "the container's").unwrap(),
            }
            fs::rename(&new, &name).unwrap();
            // A directory that becomes a link to the host's.
            let (directory, link) = (upper.join("directory"), upper.join("link"));
            let _ = match n % 2 {
                0 => fs::create_dir(&directory),
                _ => fs::remove_dir(&directory)
                    .and_then(|()| symlink(dir.path().join("host"), &link))
                    .and_then(|()| fs::rename(&link, &directory))
                    .and_then(|()| fs::remove_file(&directory)),
            };
            n += 1;
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(swap);
        for _ in 0..400 {
            // The left-over of an earlier attempt that was killed.
            images.put(FILE, "");
            pack(&upper, &images, &RootfsOptions::default()).unwrap();
            let tar = fs::read(images.join(FILE)).unwrap();
            let found = tar.windows(14).any(|bytes| bytes == b"the host's own");
            if found {
                done.store(true, std::sync::atomic::Ordering::Relaxed);
            }
            assert!(!found);
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

#[test]
fn only_root_may_read_the_packed_files() {
    let dir = tempfile::tempdir().unwrap();
    let upper = dir.path().join("upper");
    fs::create_dir(&upper).unwrap();
    pack(&upper, dir.path(), &RootfsOptions::default()).unwrap();
    let mode = fs::metadata(dir.path().join(FILE)).unwrap().mode();
    assert_eq!(mode & 0o7777, 0o600);
}

/// A restore would refuse it; and a sparse file of an exabyte would fill the disk.
#[test]
fn what_is_packed_is_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let upper = dir.path().join("upper");
    fs::create_dir(&upper).unwrap();
    let sparse = fs::File::create(upper.join("sparse")).unwrap();
    sparse.set_len(65 << 30).unwrap();
    let error = pack(&upper, dir.path(), &RootfsOptions::default()).unwrap_err();
    assert!(error.to_string().contains("rootfs.max_gib"), "{error}");
    let few = RootfsOptions {
        max_files: 0,
        ..RootfsOptions::default()
    };
    fs::remove_file(upper.join("sparse")).unwrap();
    upper.dir("directory");
    let error = pack(&upper, dir.path(), &few).map(drop);
    assert!(error.is_err());
}

#[test]
fn an_engines_tar_is_adopted() {
    let dir = tempfile::tempdir().unwrap();
    let (unpacked, images) = (dir.path(), dir.path().join("checkpoint"));
    fs::create_dir(&images).unwrap();
    adopt(&RootfsOptions::default(), unpacked, &images).unwrap();
    assert!(!images.join(FILE).exists());
    let mut tar = tar::Builder::new(fs::File::create(unpacked.join("rootfs-diff.tar")).unwrap());
    // As Go's writer does for what a header cannot hold.
    let long = "d/".repeat(80) + "new";
    tar.append_pax_extensions([("mtime", &b"1.5"[..]), ("path", long.as_bytes())])
        .unwrap();
    let mut header = tar::Header::new_gnu();
    header.set_mode(0o640);
    header.set_uid(nix::unistd::geteuid().as_raw().into());
    header.set_gid(nix::unistd::getegid().as_raw().into());
    header.set_mtime(0);
    header.set_size(3);
    tar.append_data(&mut header, "short", &b"abc"[..]).unwrap();
    tar.into_inner().unwrap();
    unpacked.put("deleted.files", r#"["/gone", "a/gone", "../out"]"#);
    adopt(&RootfsOptions::default(), unpacked, &images).unwrap();
    let bundle = bundle(dir.path());
    let root = bundle.join("rootfs");
    root.dir("a");
    for path in ["gone", "a/gone", "a/stays"] {
        root.put(path, "");
    }
    dir.put("out", "");
    restore(&images, &bundle).unwrap();
    assert_eq!(fs::read_to_string(root.join(long)).unwrap(), "abc");
    assert!(!root.join("gone").exists() && !root.join("a/gone").exists());
    assert!(root.join("a/stays").exists() && dir.path().join("out").exists());
    let few = RootfsOptions {
        max_files: 0,
        ..RootfsOptions::default()
    };
    fs::remove_file(images.join(FILE)).unwrap();
    // Its whiteout would be the mark of an opaque directory.
    unpacked.put("deleted.files", r#"["/a/.wh..opq"]"#);
    let e = adopt(&RootfsOptions::default(), unpacked, &images)
        .unwrap_err()
        .to_string();
    assert!(e.contains("/a/.wh..opq: "), "{e}");
    fs::remove_file(unpacked.join("deleted.files")).unwrap();
    // The engine's tar was cut off.
    let whole = fs::read(unpacked.join("rootfs-diff.tar")).unwrap();
    unpacked.put("rootfs-diff.tar", &whole[..whole.len() - 1024]);
    let e = adopt(&RootfsOptions::default(), unpacked, &images)
        .unwrap_err()
        .to_string();
    assert!(e.contains("no end mark"), "{e}");
    assert!(!images.join(FILE).exists());
    unpacked.put("rootfs-diff.tar", whole);
    let e = adopt(&few, unpacked, &images).unwrap_err().to_string();
    assert!(e.contains("rootfs.max_files"), "{e}");
}

/// podman lists deleted files; containerd has whiteouts, and so has what its CRI calls as podman does.
#[test]
fn whose_tar_has_whiteouts() {
    for (name, is_gzip, has_whiteouts) in [
        ("rootfs-diff.tar", false, false),
        ("rootfs-diff.tar", true, true),
        ("containerd/rw.tar", false, true),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let (unpacked, images) = (dir.path(), dir.path().join("checkpoint"));
        fs::create_dir(&images).unwrap();
        let mut tar = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o640);
        header.set_uid(nix::unistd::geteuid().as_raw().into());
        header.set_gid(nix::unistd::getegid().as_raw().into());
        header.set_mtime(0);
        header.set_size(0);
        tar.append_data(&mut header, ".wh.x", std::io::empty())
            .unwrap();
        let mut bytes = tar.into_inner().unwrap();
        if is_gzip {
            let mut gzip = flate2::read::GzEncoder::new(&bytes[..], flate2::Compression::fast());
            let mut packed = Vec::new();
            std::io::Read::read_to_end(&mut gzip, &mut packed).unwrap();
            bytes = packed;
        }
        unpacked.put(name, &bytes);
        adopt(&RootfsOptions::default(), unpacked, &images).unwrap();
        let bundle = bundle(dir.path());
        let root = bundle.join("rootfs");
        root.put("x", "old");
        restore(&images, &bundle).unwrap();
        let (is_deleted, is_file) = (!root.join("x").exists(), root.join(".wh.x").exists());
        assert_eq!(
            (is_deleted, is_file),
            (has_whiteouts, !has_whiteouts),
            "{name}"
        );
        if is_gzip {
            let at = bytes.len() - 8;
            bytes[at] ^= 1;
            unpacked.put(name, &bytes);
            fs::remove_file(images.join(FILE)).unwrap();
            assert!(adopt(&RootfsOptions::default(), unpacked, &images).is_err());
        }
    }
}
