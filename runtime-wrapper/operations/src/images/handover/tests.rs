use super::*;
use cryopod_host::files::Host;

/// A bundle with large and small images, below a directory.
fn images() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let images = dir.path().join("checkpoint");
    fs::create_dir(&images).unwrap();
    for (name, bytes) in [
        ("pages-1.img", 2 << 20),
        ("vram-0000.img", 1 << 20),
        ("vram-index.img", 2 << 20),
        ("pages-2.img", 10),
        ("inventory.img", 10),
    ] {
        fs::write(images.join(name), vec![1u8; bytes]).unwrap();
    }
    (dir, images)
}

fn names(dir: &Path) -> Vec<String> {
    Host::at(dir).names("/")
}

fn handed(images: &Path) {
    put_into(&asked(images).unwrap(), images).unwrap();
    assert_eq!(names(images).len(), 4);
}

#[test]
fn aside_only_where_it_was_asked_for_and_back() {
    let (dir, images) = images();
    let all = names(&images);
    assert_eq!(asked(&images), None);
    let store = dir.path().join(names::HANDOVER);
    std::os::unix::fs::symlink("/tmp", &store).unwrap();
    assert_eq!(asked(&images), None, "a link is no request");
    ExportRequest::new(&images).unwrap_err();
    fs::remove_file(&store).unwrap();
    let request = ExportRequest::new(&images).unwrap();
    before_checkpoint(&images).unwrap();
    handed(&images);
    let found = find(&images, std::slice::from_ref(&store))
        .unwrap()
        .unwrap();
    let large: Vec<&str> = found.reference.files.iter().map(|f| &*f.name).collect();
    assert_eq!(large, ["pages-1.img", "vram-0000.img"]);
    let error = ExportRequest::new(&images).unwrap_err().to_string();
    assert!(error.contains("another export"), "{error}");
    drop(request);
    assert_eq!(names(&images), all);
    assert!(!store.exists());
}

#[test]
fn a_ticket_is_good_once_and_a_strangers_never() {
    let (dir, images) = images();
    let desk = dir.path().join("desk");
    let ticket = Ticket::issue_at(&desk, &images, dir.path()).unwrap();
    let store = dir.path().join(names::HANDOVER);
    // Another store's reference is not for this one, nor is this one's for another.
    let error = find(&images, &[dir.path().to_owned()])
        .unwrap_err()
        .to_string();
    assert!(error.contains("import the archive itself"), "{error}");
    ticket.ask_for_map("0=1").unwrap();
    fs::write(ticket.entry.join(names::VRAM_PLACES), "{}").unwrap();
    assert!(!ticket.is_redeemed());
    let grant = redeem(&images, &desk).unwrap();
    assert!(ticket.is_redeemed());
    assert_eq!(grant.map.as_deref(), Some("0=1"));
    assert_eq!(grant.places.as_ref(), Some(&ticket.entry));
    assert_eq!(grant.store.as_ref(), Some(&store));
    assert!(
        find(&images, std::slice::from_ref(&store))
            .unwrap()
            .is_some()
    );
    // Once is all.
    assert_eq!(redeem(&images, &desk).unwrap(), ImportGrant::default());
    assert!(names(&desk).is_empty());
    // What lies in the images themselves is a stranger's.
    let text = fs::read_to_string(images.join(names::STORE_REFERENCE)).unwrap();
    for name in [MAP, names::VRAM_PLACES] {
        fs::write(images.join(name), "0=7").unwrap();
        assert_eq!(redeem(&images, &desk).unwrap(), ImportGrant::default());
    }
    for (old, new) in [(&*grant_id(&ticket), "../../../../../etc"), ("true", "1")] {
        let path = images.join(names::STORE_REFERENCE);
        fs::write(path, text.replace(old, new)).unwrap();
        redeem(&images, &desk).unwrap_err();
    }
}

fn grant_id(ticket: &Ticket) -> String {
    ticket.entry.file_name().unwrap().to_str().unwrap().into()
}

#[test]
fn nobody_asks_any_more() {
    let (dir, images) = images();
    let all = names(&images);
    let store = dir.path().join(names::HANDOVER);
    // A killed export leaves its store, unlocked. Killed before the checkpoint: nothing is moved.
    let killed = || {
        let mut request = ExportRequest::new(&images).unwrap();
        request.images = dir.path().join("none/checkpoint");
        request.store = dir.path().join("none/store");
        request
    };
    drop(killed());
    assert_eq!(asked(&images), None);
    // Killed after it: the next checkpoint, export or restore finds all files in place.
    for next in [
        before_checkpoint as fn(&Path) -> Result<(), StoreError>,
        |images| ExportRequest::new(images).map(drop),
        |images| before_restore(images).map(drop),
    ] {
        let request = killed();
        handed(&images);
        drop(request);
        next(&images).unwrap();
        assert_eq!(names(&images), all);
        assert!(!store.exists());
    }
    // An entry that nothing refers to goes.
    fs::create_dir_all(store.join("0")).unwrap();
    fs::set_permissions(&store, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    before_checkpoint(&images).unwrap();
    assert!(!store.exists());
}

#[test]
fn tickets_of_the_dead() {
    let ((dir, first), (other, second)) = (images(), images());
    let desk = dir.path().join("desk");
    let killed = Ticket::issue_at(&desk, &first, dir.path()).unwrap();
    let alive = Ticket::issue_at(&desk, &second, other.path()).unwrap();
    revoke_at(&desk, dir.path());
    assert!(killed.is_redeemed() && !alive.is_redeemed());
    drop(alive);
    assert!(names(&desk).is_empty());
}
