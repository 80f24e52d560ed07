use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use cryopod_host::files::Host;

use super::*;

const ABOUT: About<'_> = About {
    container: "c1",
    created: "2026-01-02T03:04:05Z",
    threads: 3,
    until: None,
    origin: None,
    handed: false,
};

/// A directory for everything, an image directory with large and small files, a store.
fn set_up() -> (tempfile::TempDir, PathBuf, PathBuf) {
    set_up_in(tempfile::tempdir().unwrap())
}

fn set_up_in(dir: tempfile::TempDir) -> (tempfile::TempDir, PathBuf, PathBuf) {
    let (images, store) = (dir.path().join("images"), dir.path().join("store"));
    for (directory, mode) in [(&images, 0o755), (&store, 0o700)] {
        fs::create_dir(directory).unwrap();
        fs::set_permissions(directory, fs::Permissions::from_mode(mode)).unwrap();
    }
    for (name, bytes) in [
        ("pages-1.img", 3 << 20),
        ("pages-2.img", 5000),
        ("pages-3.img", (1 << 20) + 1),
        ("vram-0000.img", 2 << 20),
        ("vram-index.img", 2 << 20),
        ("inventory.img", 10),
    ] {
        let content: Vec<u8> = (0..bytes)
            .map(|i: usize| (i * 31 + i / 997) as u8)
            .collect();
        fs::write(images.join(name), content).unwrap();
    }
    (dir, images, store)
}

fn names_of(dir: &Path) -> Vec<String> {
    Host::at(dir).names("/")
}

#[test]
fn the_large_files_go_and_are_found() {
    // Once beside the store, once on another file system.
    for other in [false, true] {
        let (dir, mut images, store) = set_up();
        let away = tempfile::tempdir_in("/dev/shm").unwrap();
        if other {
            let moved = away.path().join("images");
            fs::create_dir(&moved).unwrap();
            for name in names_of(&images) {
                fs::copy(images.join(&name), moved.join(&name)).unwrap();
            }
            images = moved;
        }
        let inode = fs::metadata(images.join("pages-1.img")).unwrap().ino();
        let content = fs::read(images.join("pages-1.img")).unwrap();
        let put = put(&images, &store, &ABOUT).unwrap().unwrap();
        assert_eq!(
            names_of(&images),
            [
                "cryopod-store.json",
                "inventory.img",
                "pages-2.img",
                "vram-index.img"
            ]
        );
        let stores = [dir.path().join("none"), store.clone()];
        let found = find(&images, &stores).unwrap().unwrap();
        assert_eq!(found.reference, put);
        assert_eq!(found.entry, store.join(&put.id));
        assert_eq!(
            names_of(&found.entry),
            [
                "cryopod-store.json",
                "pages-1.img",
                "pages-3.img",
                "vram-0000.img"
            ]
        );
        let page = found.entry.join("pages-1.img");
        assert_eq!(fs::read(&page).unwrap(), content);
        assert_eq!(fs::metadata(&page).unwrap().ino() == inode, !other);
        let digests: Vec<bool> = put.files.iter().map(|f| f.blake3.is_some()).collect();
        assert_eq!(digests, [true, true, false]);
        assert_eq!(
            (put.bytes(), put.pages_bytes()),
            ((6 << 20) + 1, (4 << 20) + 1)
        );
        found.verify(2, None).unwrap();
        assert_eq!(
            names_of(&store).len(),
            1,
            "nothing is left beside the entry"
        );
        // The second time does nothing, and the reference stays.
        assert_eq!(super::put(&images, &store, &ABOUT).unwrap(), None);
        assert!(find(&images, &stores).unwrap().is_some());
    }
}

#[test]
fn what_is_wrong_with_a_store_is_told_and_the_images_stay() {
    let (dir, images, store) = set_up();
    let all = names_of(&images);
    let says = |store: &Path, about: &About<'_>, needle: &str| {
        let error = put(&images, store, about).unwrap_err().to_string();
        assert!(error.contains(needle), "{needle}: {error}");
        assert_eq!(names_of(&images), all);
    };
    says(&dir.path().join("none"), &ABOUT, "mount it, or make it");
    fs::set_permissions(&store, fs::Permissions::from_mode(0o777)).unwrap();
    says(&store, &ABOUT, "nobody else can write");
    fs::set_permissions(&store, fs::Permissions::from_mode(0o700)).unwrap();
    let over = std::time::Instant::now();
    let late = About {
        until: Some(over),
        ..ABOUT
    };
    says(&store, &late, "in time");
    assert!(names_of(&store).is_empty(), "no entry is left");
    // A link to a store is accepted.
    let link = dir.path().join("link");
    symlink(&store, &link).unwrap();
    put(&images, &link, &ABOUT).unwrap().unwrap();
    assert!(find(&images, &[link]).unwrap().is_some());
}

#[test]
fn an_entry_that_is_not_what_it_was() {
    let (_dir, images, store) = set_up();
    let put = put(&images, &store, &ABOUT).unwrap().unwrap();
    let entry = store.join(&put.id);
    let stores = [store.clone()];
    let look = || -> Result<(), StoreError> { find(&images, &stores)?.unwrap().verify(2, None) };
    let says = |needles: &[&str]| {
        let error = look().unwrap_err().to_string();
        for needle in needles {
            assert!(error.contains(needle), "{needle}: {error}");
        }
    };
    let page = entry.join("pages-3.img");
    let whole = fs::read(&page).unwrap();
    // Another byte; shorter; a link to the same; a directory; missing.
    let mut other = whole.clone();
    other[77] ^= 1;
    fs::write(&page, &other).unwrap();
    says(&["pages-3.img: its digest is", "damaged"]);
    fs::write(&page, &whole[1..]).unwrap();
    says(&["pages-3.img: 1048576 bytes in place of 1048577"]);
    let aside = entry.join("aside");
    fs::write(&aside, &whole).unwrap();
    fs::remove_file(&page).unwrap();
    says(&["pages-3.img", "No such file"]);
    symlink(&aside, &page).unwrap();
    says(&["pages-3.img"]);
    fs::remove_file(&page).unwrap();
    fs::create_dir(&page).unwrap();
    says(&["pages-3.img: not a regular file"]);
    fs::remove_dir(&page).unwrap();
    fs::rename(&aside, &page).unwrap();
    look().unwrap();
    // The entry is writable for another user, a link, missing; the store is missing.
    fs::set_permissions(&entry, fs::Permissions::from_mode(0o777)).unwrap();
    says(&["is not this user's alone"]);
    fs::set_permissions(&entry, fs::Permissions::from_mode(0o700)).unwrap();
    let elsewhere = store.join("elsewhere");
    fs::rename(&entry, &elsewhere).unwrap();
    says(&[
        "has no such entry",
        "cryopod bundle",
        &put.id,
        "3 files, 7 MiB",
    ]);
    symlink(&elsewhere, &entry).unwrap();
    says(&["is not this user's alone"]);
    fs::rename(&store, store.with_extension("away")).unwrap();
    says(&["is not there"]);
    let error = find(&images, &[]).unwrap_err().to_string();
    assert!(error.contains("no store is configured"), "{error}");
}

#[test]
fn references_of_strangers() {
    let file = |name: &str| {
        format!(
            r#"{{"name":"{name}","bytes":1048576,"blake3":"{}"}}"#,
            "a".repeat(64)
        )
    };
    let id = "0123456789abcdef0123456789abcdef";
    let text = |id: &str, files: &str| format!(r#"{{"version":1,"id":"{id}","files":[{files}]}}"#);
    let parse = |text: &str| Reference::parse(text.as_bytes(), Path::new("r.json"));
    parse(&text(id, &file("pages-1.img"))).unwrap();
    parse(&text(id, r#"{"name":"vram-0000.img","bytes":1}"#)).unwrap();
    let refused = |needle: &str, bad: &str| {
        let error = parse(bad).unwrap_err().to_string();
        assert!(
            error.starts_with("r.json: ") && error.contains(needle),
            "{bad}: {error}"
        );
    };
    let page = file("pages-1.img");
    let upper = id.to_uppercase();
    for id in ["../../../../../../../../etc/pass", "/etc", "", &upper] {
        refused("`id`", &text(id, &page));
    }
    let names = "../pages-1.img pages-1.img/../../x /etc/shadow pages-.img pages-12345678901.img inventory.img";
    for name in names.split(' ') {
        refused("no large file", &text(id, &file(name)));
    }
    for (needle, files) in [
        ("twice", &*format!("{page},{page}")),
        ("no BLAKE3", r#"{"name":"pages-1.img","bytes":1}"#),
        (
            "no BLAKE3",
            r#"{"name":"pages-1.img","bytes":1,"blake3":"ab"}"#,
        ),
        (
            "no BLAKE3",
            r#"{"name":"vram-1.img","bytes":1,"blake3":"ab"}"#,
        ),
        ("invalid value", r#"{"name":"vram-1.img","bytes":-1}"#),
        (
            "beyond all bounds",
            r#"{"name":"vram-1.img","bytes":18446744073709551615},{"name":"vram-2.img","bytes":1}"#,
        ),
        ("0 files", ""),
    ] {
        refused(needle, &text(id, files));
    }
    let named = text(id, &page).replace("\"id\"", "\"store\":\"a\\u001b\",\"id\"");
    refused("no plain text", &named);
    for (version, needle) in [("2", "update it"), ("0", "no `version`")] {
        let other = format!("\"version\":{version}");
        refused(needle, &text(id, "").replace("\"version\":1", &other));
    }
    refused("no `version`", "[]");
    refused("not a reference", "{");
    // A reference that is a link is refused.
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("real"), text(id, &file("pages-1.img"))).unwrap();
    symlink("real", dir.path().join(names::STORE_REFERENCE)).unwrap();
    Reference::open(dir.path()).unwrap_err();
}

#[test]
fn only_old_leftovers_are_swept() {
    let (_dir, images, store) = set_up();
    let left = |name: &str, hours: u64| {
        let path = store.join(format!(".{name}.cryopod-partial-1-0"));
        fs::create_dir(&path).unwrap();
        let then = std::time::SystemTime::now() - std::time::Duration::from_secs(hours * 3600);
        let times = fs::FileTimes::new().set_modified(then);
        fs::File::open(&path).unwrap().set_times(times).unwrap();
        path
    };
    let (new, old) = (left("new", 23), left("old", 25));
    put(&images, &store, &ABOUT).unwrap().unwrap();
    assert!(new.exists() && !old.exists());
}

#[test]
fn entries_are_listed_and_removed() {
    let (_dir, images, store) = set_up();
    let put = put(&images, &store, &ABOUT).unwrap().unwrap();
    fs::create_dir(store.join("other")).unwrap();
    let unfinished = store.join(format!(".{}{}1-1", put.id, crate::bytes::staging::MARK));
    fs::create_dir(&unfinished).unwrap();
    let entries = list(&store).unwrap();
    assert_eq!(entries.len(), 1);
    assert_eq!(entries[0].reference, put);
    remove(&entries[0]).unwrap();
    assert!(list(&store).unwrap().is_empty());
    assert!(remove(&entries[0]).is_err());
    assert!(unfinished.exists() && store.join("other").exists());
    let error = find(&images, &[store]).unwrap_err().to_string();
    assert!(error.contains("has no such entry"), "{error}");
    assert!(list(&images.join("none")).is_err());
}

#[test]
fn a_directory_is_whole_again() {
    let (_dir, images, store) = set_up();
    let before: Vec<_> = names_of(&images)
        .into_iter()
        .map(|n| (fs::read(images.join(&n)).unwrap(), n))
        .collect();
    put(&images, &store, &ABOUT).unwrap().unwrap();
    let found = find(&images, std::slice::from_ref(&store))
        .unwrap()
        .unwrap();
    // Killed before, in the middle of the first file.
    fs::write(images.join(".vram-0000.img.partial"), "vr").unwrap();
    gather(&images, &found, 2).unwrap();
    let after: Vec<_> = names_of(&images)
        .into_iter()
        .map(|n| (fs::read(images.join(&n)).unwrap(), n))
        .collect();
    assert!(before == after, "{:?}", names_of(&images));
    assert_eq!(list(&store).unwrap().len(), 1, "others may need the entry");
}
