use cryopod_test_files::TestFiles;
use std::fs;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};

use super::*;
use crate::format::names;
use crate::store::{About, Origin, find, put};

struct Bed {
    _dir: tempfile::TempDir,
    temporary: PathBuf,
    content: PathBuf,
    containers: PathBuf,
    store: PathBuf,
}

impl Bed {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| {
            let path = dir.path().join(name);
            fs::DirBuilder::new().mode(0o700).create(&path).unwrap();
            path
        };
        let bed = Self {
            temporary: at("tmp"),
            content: at("content"),
            containers: at("containers"),
            store: at("store"),
            _dir: dir,
        };
        fs::create_dir_all(bed.blobs()).unwrap();
        bed
    }

    fn blobs(&self) -> PathBuf {
        self.content.join("blobs/sha256")
    }

    fn origin(&self) -> Origin {
        Origin {
            temporary: Some(self.temporary.clone()),
            content: KnownOrigins::of(&self.content),
            directory: KnownOrigins::of(&self.containers),
            elsewhere: false,
        }
    }

    /// A checkpoint in containerd's image directory.
    fn checkpoint(&self, n: u32, origin: Option<&Origin>) -> (PathBuf, Reference) {
        let images = self.temporary.join(format!("ctrd-checkpoint{n}"));
        fs::create_dir(&images).unwrap();
        images.put("vram-0000.img", vec![7u8; 1 << 20]);
        images.put("a-first.img", [1u8; 700]);
        let about = About {
            container: "c1",
            created: "2026-01-02T03:04:05Z",
            threads: 1,
            until: None,
            origin,
            handed: false,
        };
        let reference = put(&images, &self.store, &about).unwrap().unwrap();
        (images, reference)
    }

    /// containerd packs an image directory.
    fn packed(&self, images: &Path, blob: &str) -> PathBuf {
        let path = self.blobs().join(blob);
        let mut tar = tar::Builder::new(fs::File::create(&path).unwrap());
        for name in ["a-first.img", names::STORE_REFERENCE] {
            tar.append_path_with_name(images.join(name), name).unwrap();
        }
        tar.finish().unwrap();
        path
    }

    /// docker unpacks it.
    fn kept(&self, images: &Path, name: &str) -> PathBuf {
        let path = self.containers.join("c1/checkpoints").join(name);
        fs::create_dir_all(&path).unwrap();
        fs::copy(
            images.join(names::STORE_REFERENCE),
            path.join(names::STORE_REFERENCE),
        )
        .unwrap();
        path
    }

    fn clean(&self, others: &[PathBuf]) -> usize {
        self.clean_with(others, &[])
    }

    fn clean_with(&self, others: &[PathBuf], used_in: &[PathBuf]) -> usize {
        let removed = clean(&self.store, others, used_in, Duration::ZERO);
        removed.unwrap().len()
    }

    fn entries(&self) -> usize {
        list(&self.store).unwrap().len()
    }
}

#[test]
fn an_entry_lives_as_long_as_something_refers_to_it() {
    let bed = Bed::new();
    let (images, reference) = bed.checkpoint(1, Some(&bed.origin()));
    assert_eq!(bed.clean(&[]), 0, "containerd's image directory");
    let blob = bed.packed(&images, "aa");
    fs::remove_dir_all(&images).unwrap();
    assert_eq!(bed.clean(&[]), 0, "containerd's content");
    let _other = bed.checkpoint(2, Some(&bed.origin()));
    bed.blobs().put("bb", b"no tar");
    bed.blobs().put("cc", vec![3u8; 5000]);
    bed.temporary.put(
        "ctrd-checkpoint3/cryopod-store.json",
        fs::read(bed.store.join(&reference.id).join(names::STORE_REFERENCE)).unwrap(),
    );
    let kept = bed.kept(&bed.temporary.join("ctrd-checkpoint3"), "cp");
    fs::remove_dir_all(bed.temporary.join("ctrd-checkpoint3")).unwrap();
    fs::remove_file(&blob).unwrap();
    assert_eq!(bed.clean(&[]), 0, "docker's directory");
    let copy = bed.temporary.join("copy");
    fs::rename(&kept, &copy).unwrap();
    assert_eq!(bed.clean(&[copy]), 0, "a directory of the configuration");
    assert_eq!(bed.clean(&[]), 1);
    assert_eq!(bed.entries(), 1, "the other one stays");
}

#[test]
fn an_entry_to_which_its_checkpoint_is_about_to_refer_stays() {
    let bed = Bed::new();
    let (images, reference) = bed.checkpoint(1, Some(&bed.origin()));
    fs::remove_dir_all(images).unwrap();
    let entry = fs::File::open(bed.store.join(&reference.id)).unwrap();
    let lock = Flock::lock(entry, FlockArg::LockExclusiveNonblock).unwrap();
    assert_eq!(bed.clean(&[]), 0);
    drop(lock);
    assert_eq!(bed.clean(&[]), 1);
}

#[test]
fn a_place_of_the_configuration_is_searched_to_its_end() {
    let bed = Bed::new();
    let (images, _) = bed.checkpoint(1, Some(&bed.origin()));
    let place = bed.temporary.join("srv");
    let deep = place.join("cluster/ns/user/job/1");
    fs::create_dir_all(deep.parent().unwrap()).unwrap();
    fs::rename(&images, &deep).unwrap();
    let link = |target: &Path, name: &str| std::os::unix::fs::symlink(target, place.join(name));
    link(Path::new("cluster/ns/removed"), "latest").unwrap();
    link(&bed.temporary, names::PARENT_LINK).unwrap();
    link(Path::new("/etc/passwd"), "file").unwrap();
    let named = [place.clone()];
    assert_eq!(bed.clean(&named), 0);
    fs::remove_dir_all(&deep).unwrap();
    for target in [bed.containers.as_path(), Path::new("/nowhere")] {
        link(target, "away").unwrap();
        let error = clean(&bed.store, &named, &[], Duration::ZERO).unwrap_err();
        assert!(error.to_string().contains("srv/away"), "{error}");
        fs::remove_file(place.join("away")).unwrap();
    }
    link(&bed.containers, "searched").unwrap();
    assert_eq!(bed.clean(&[place, bed.containers.clone()]), 1);
}

#[test]
fn what_is_new_unknown_or_elsewhere_stays() {
    let bed = Bed::new();
    let gone = |origin: Option<&Origin>, n| {
        let (images, _) = bed.checkpoint(n, origin);
        fs::remove_dir_all(images).unwrap();
    };
    gone(None, 1);
    assert_eq!(bed.clean(&[]), 0, "nobody knows");
    let elsewhere = Origin {
        elsewhere: true,
        ..bed.origin()
    };
    gone(Some(&elsewhere), 2);
    assert_eq!(bed.clean(&[]), 0, "elsewhere");
    gone(Some(&bed.origin()), 3);
    let hour = Duration::from_secs(3600);
    assert_eq!(clean(&bed.store, &[], &[], hour).unwrap().len(), 0, "new");
    assert_eq!(bed.clean(&[]), 1);
    assert_eq!(bed.entries(), 2);
}

#[test]
fn another_directory_of_the_same_name_says_nothing() {
    let bed = Bed::new();
    let (images, _) = bed.checkpoint(1, Some(&bed.origin()));
    let kept = bed.kept(&images, "cp");
    fs::remove_dir_all(images).unwrap();
    let away = bed.temporary.join("unmounted");
    fs::rename(&bed.containers, &away).unwrap();
    assert_eq!(bed.clean(&[]), 0, "it is not there");
    fs::create_dir(&bed.containers).unwrap();
    assert_eq!(bed.clean(&[]), 0, "another one is there");
    fs::remove_dir(&bed.containers).unwrap();
    fs::rename(&away, &bed.containers).unwrap();
    fs::remove_dir_all(kept).unwrap();
    assert_eq!(bed.clean(&[]), 1);
}

#[test]
fn what_was_elsewhere_is_known_once_it_is_seen() {
    let bed = Bed::new();
    let elsewhere = Origin {
        elsewhere: true,
        directory: None,
        ..bed.origin()
    };
    let (images, _) = bed.checkpoint(1, Some(&elsewhere));
    bed.packed(&images, "aa");
    assert_eq!(bed.clean(&[]), 0);
    fs::remove_file(bed.blobs().join("aa")).unwrap();
    let kept = bed.kept(&images, "cp");
    fs::remove_dir_all(images).unwrap();
    let named = [bed.containers.clone()];
    assert_eq!(bed.clean(&[]), 0, "passing by is not staying");
    assert_eq!(bed.clean_with(&named, &named), 0);
    fs::remove_dir_all(kept).unwrap();
    assert_eq!(bed.clean_with(&named, &named), 1);
}

#[test]
fn a_copy_that_goes_does_not_take_the_entry_with_it() {
    let bed = Bed::new();
    let elsewhere = Origin {
        elsewhere: true,
        directory: None,
        ..bed.origin()
    };
    let (images, _) = bed.checkpoint(1, Some(&elsewhere));
    let copy = bed.kept(&images, "cp");
    fs::remove_dir_all(images).unwrap();
    let allowed = [bed.containers.clone()];
    assert_eq!(bed.clean(&allowed), 0);
    fs::remove_dir_all(copy).unwrap();
    assert_eq!(bed.clean(&allowed), 0, "nobody knows where it is");
}

#[test]
fn what_killed_processes_left_goes() {
    let bed = Bed::new();
    let (_images, reference) = bed.checkpoint(1, Some(&bed.origin()));
    let left = |name: String| {
        let path = bed.store.join(name);
        fs::create_dir(&path).unwrap();
        path.put("pages-1.img", "x");
        path
    };
    let removed = left(format!(".{}{}removed", "0".repeat(32), staging::MARK));
    let killed = left(format!(".{}{}17-0", "0".repeat(32), staging::MARK));
    let written = left(format!(".{}{}18-0", "1".repeat(32), staging::MARK));
    let file = fs::File::open(&written).unwrap();
    let lock = Flock::lock(file, FlockArg::LockExclusive).unwrap();
    bed.clean(&[]);
    assert!(!removed.exists() && !killed.exists());
    assert!(written.exists(), "its writer lives");
    assert!(bed.store.join(reference.id).exists());
    drop(lock);
}

#[test]
fn forgotten_image_directories_go() {
    let bed = Bed::new();
    let private = |n: u32, days: u64| {
        let (images, reference) = bed.checkpoint(n, Some(&bed.origin()));
        fs::set_permissions(&images, fs::Permissions::from_mode(0o700)).unwrap();
        let then = SystemTime::now() - Duration::from_secs(days * 24 * 3600 + 60);
        let times = fs::FileTimes::new().set_modified(then);
        fs::File::open(&images).unwrap().set_times(times).unwrap();
        (images, reference)
    };
    let (passing, _) = private(1, 0);
    let (forgotten, _) = private(2, 1);
    let (elses, reference) = private(3, 1);
    fs::remove_file(elses.join(names::STORE_REFERENCE)).unwrap();
    let (only, _) = private(4, 0);
    only.put(names::ONLY_COPY, "");
    let old = SystemTime::now() - 2 * LEFTOVER;
    let times = fs::FileTimes::new().set_modified(old);
    fs::File::open(&only).unwrap().set_times(times).unwrap();
    let (used, _) = private(5, 1);
    let open = fs::File::open(used.join(names::STORE_REFERENCE)).unwrap();
    assert_eq!(bed.clean(&[]), 2);
    assert!(passing.exists() && !forgotten.exists() && only.exists());
    assert!(used.exists(), "its clock was set");
    drop(open);
    bed.clean(&[]);
    assert!(!used.exists());
    assert!(elses.exists(), "no checkpoint of ours: {}", reference.id);
}

#[test]
fn an_entry_that_is_kept_stays_whatever_refers_to_it() {
    let bed = Bed::new();
    let (images, reference) = bed.checkpoint(1, Some(&bed.origin()));
    let found = find(&images, std::slice::from_ref(&bed.store));
    found.unwrap().unwrap().keep().unwrap();
    fs::remove_dir_all(images).unwrap();
    assert_eq!(bed.clean(&[]), 0);
    assert!(bed.store.join(&reference.id).is_dir());
}
